"""The eager path shared by every array library: arrays to plan to results, with plans cached by what they depend on."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

from cuflash.architectures import Device
from cuflash.dtypes import DType
from cuflash.errors import ArgumentError
from cuflash.plan import Plan, backward_plan, forward_plan
from cuflash.problem import ArraySpec, Keywords, Problem, spec_of_contiguous

__all__ = ["Backend", "Eager", "Gradients"]

CACHE_LIMIT = 4096  # plans; a table that reaches it starts afresh
_CONTIGUOUS = ("lse", "d_lse", "alibi_slopes")  # small beside q, k and v: kernels read them as one piece


class Gradients(NamedTuple):
    """Gradients by name, shaped and typed as the inputs."""

    dq: Any
    dk: Any
    dv: Any


class Backend(Protocol):
    """What an array library must offer for its arrays to be served."""

    def key(self, array: Any) -> Any:
        """Cheap and hashable: equal keys mean equal specs on the same device."""

    def spec(self, argument: str, array: Any) -> ArraySpec:
        """Shape, strides, dtype and alignment; raises ArgumentTypeError for dtypes without a kernel."""

    def device(self, arrays: dict[str, Any]) -> Device:
        """The one device that holds every array; raises DeviceError when there are two."""

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """A fresh C-contiguous array on the device of ``like``."""

    def workspace(self, plan: Plan, like: Any) -> Any:
        """Scratch memory for one run of the plan; zeros if ``plan.zeroed``."""

    def contiguous(self, array: Any) -> Any:
        """The array itself if C-contiguous, else a copy."""

    def overlaps(self, one: Any, other: Any) -> bool:
        """Whether two arrays share memory."""

    def writable(self, array: Any) -> bool:
        """Whether results may be written into the array."""

    def run(self, plan: Plan, operands: dict[str, Any]) -> None:
        """Queues the plan's launches."""


class Eager:
    """``flash_attention`` and its backward for one backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._plans: dict[Any, Plan] = {}
        self._lock = threading.Lock()

    def forward(self, inputs: dict[str, Any], words: Keywords, out: Any = None) -> tuple[Any, Any]:
        """``(out, lse)`` for inputs q, k, v and perhaps alibi_slopes."""
        backend, inputs = self.backend, self._settled(inputs)
        plan = self.plan("forward", inputs if out is None else {**inputs, "out": out}, words)
        operands = dict(inputs)
        if out is None:
            out = backend.empty(plan.outputs[0].shape, plan.outputs[0].dtype, inputs["q"])
        else:
            self._check_out(out, inputs)
        lse = backend.empty(plan.outputs[1].shape, "float32", inputs["q"])
        operands["out"], operands["lse"] = out, lse
        self._run(plan, operands)
        return out, lse

    def backward(self, inputs: dict[str, Any], words: Keywords) -> Gradients:
        """Gradients for inputs d_out, q, k, v, out, lse and perhaps d_lse, alibi_slopes."""
        backend, inputs = self.backend, self._settled(inputs)
        plan = self.plan("backward", inputs, words)
        operands = dict(inputs)
        for output in plan.outputs:
            operands[output.name] = backend.empty(output.shape, output.dtype, inputs["q"])
        self._run(plan, operands)
        return Gradients(operands["dq"], operands["dk"], operands["dv"])

    def explain(self, inputs: dict[str, Any], words: Keywords, backward: bool) -> Plan:
        """The plan for inputs q, k, v; a backward plan assumes contiguous out and d_out."""
        inputs = self._settled(inputs)
        specs = {name: self.backend.spec(name, array) for name, array in inputs.items()}
        device = self.backend.device(inputs)
        problem = Problem.forward(specs.pop("q"), specs.pop("k"), specs.pop("v"), words, **specs)
        if not backward:
            return forward_plan(problem, device)
        out = spec_of_contiguous(problem.out_shape, problem.dtype.name)
        lse = spec_of_contiguous(problem.lse_shape, "float32")
        return backward_plan(Problem.backward(out, problem.q, problem.k, problem.v, out, lse, words, **specs), device)

    def plan(self, kind: str, arrays: dict[str, Any], words: Keywords) -> Plan:
        """The plan for these arrays, from the cache if the same question was asked before."""
        # The types too, because True equals 1: a number where a flag belongs must not find the flag's plan.
        key = (kind, words, *map(type, words), *arrays, *map(self.backend.key, arrays.values()))
        try:
            plan = self._plans.get(key)
        except TypeError:  # an option that cannot be hashed, such as an array: refused by name where the plan is made
            return self._make_plan(kind, arrays, words)
        if plan is None:
            plan = self._make_plan(kind, arrays, words)
            with self._lock:
                if len(self._plans) >= CACHE_LIMIT:
                    self._plans.clear()
                self._plans[key] = plan
        return plan

    def _make_plan(self, kind: str, arrays: dict[str, Any], words: Keywords) -> Plan:
        specs = {name: self.backend.spec(name, array) for name, array in arrays.items()}
        if kind == "forward":
            problem = Problem.forward(specs.pop("q"), specs.pop("k"), specs.pop("v"), words, **specs)
            return forward_plan(problem, self.backend.device(arrays))
        d_out, q, k, v, out, lse = (specs.pop(name) for name in ("d_out", "q", "k", "v", "out", "lse"))
        problem = Problem.backward(d_out, q, k, v, out, lse, words, **specs)
        return backward_plan(problem, self.backend.device(arrays))

    def _settled(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if not any(name in inputs for name in _CONTIGUOUS):
            return inputs
        return {name: self.backend.contiguous(x) if name in _CONTIGUOUS else x for name, x in inputs.items()}

    def _run(self, plan: Plan, operands: dict[str, Any]) -> None:
        if plan.workspace_bytes:
            operands["workspace"] = self.backend.workspace(plan, operands["q"])
        self.backend.run(plan, operands)

    def _check_out(self, out: Any, inputs: dict[str, Any]) -> None:
        if not self.backend.writable(out):
            raise ArgumentError("out", "a read-only array", "must be writable", "pass a copy")
        for name, array in inputs.items():
            if self.backend.overlaps(out, array):
                raise ArgumentError("out", "an array", f"must not share memory with {name}", "pass a fresh array")


def element_strides(argument: str, strides_bytes: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Strides in elements.

    Raises:
        ArgumentError: a byte stride that falls between elements.
    """
    if any(stride % dtype.itemsize for stride in strides_bytes):
        rule = f"must be multiples of the {dtype.itemsize}-byte element"
        raise ArgumentError(f"{argument}.strides", strides_bytes, rule, "pass a contiguous copy")
    return tuple(stride // dtype.itemsize for stride in strides_bytes)
