"""The answer as plain data: which kernels, how many blocks, which bytes, which operand goes where. Touches no device.

Whoever can run a plan is an executor: ``launch.py`` on a GPU, ``emulator.py`` on a CPU, the adapters of ``interop``.
An executor allocates ``outputs`` and one workspace, patches addresses into each launch's parameter bytes, and queues
the launches in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cuflash.architectures import Device
from cuflash.errors import UnsupportedError
from cuflash.problem import Problem
from cuflash.variant import Variant

__all__ = ["MAP_BYTES", "Launch", "Output", "Plan", "Pointer", "TensorMapSlot", "backward_plan", "forward_plan"]

MAX_GRID = 2**31 - 1  # blocks along x
MAP_BYTES = 128  # of an encoded tensor map; a struct that has some begins with them


@dataclass(frozen=True)
class Pointer:
    """An address to patch in: where in the struct, which operand, how far into it."""

    offset: int  # bytes into the parameter struct
    operand: str
    byte_offset: int = 0


@dataclass(frozen=True)
class TensorMapSlot:
    """A tensor map to encode in: arguments of cuTensorMapEncodeTiled, innermost dimension first."""

    offset: int  # bytes into the parameter struct
    operand: str
    dtype: str
    dims: tuple[int, ...]  # elements
    strides_bytes: tuple[int, ...]  # of dimensions 1 and up
    box: tuple[int, ...]  # elements
    swizzle: int  # bytes: 0, 32, 64 or 128
    byte_offset: int = 0
    l2_promotion: int = 128  # bytes that the second-level cache fetches at a time: 0, 64, 128 or 256


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    variant: Variant
    grid: int  # blocks
    block: int  # threads
    shared_bytes: int
    params: bytes
    pointers: tuple[Pointer, ...]
    tensor_maps: tuple[TensorMapSlot, ...] = ()
    overlap: bool = False  # may start before the launch before it ends, and waits by itself for what it needs of it
    zeroed: bool = False  # whether the workspace must start at zero; only counters that reset themselves need it


@dataclass(frozen=True)
class Output:
    """An array that the executor allocates, C-contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Plan:
    """What to run for one problem on one kind of device, and why."""

    kind: str  # "forward" or "backward"
    problem: Problem
    device: Device
    launches: tuple[Launch, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    workspace_bytes: int = 0
    reasons: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        sizes = f"{self.flops / 1e9:.1f} GFLOP, workspace {self.workspace_bytes / 2**20:.1f} MiB"
        lines = [f"{self.kind} on {self.device.name}: {sizes}"]
        for launch in self.launches:
            shape = f"{launch.grid} blocks of {launch.block} threads, {launch.shared_bytes / 1024:.0f} KiB shared"
            lines.append(f"  {launch.variant.symbol}: {shape}")
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])

    @cached_property
    def zeroed(self) -> bool:
        """Whether the workspace must hold zeros when the first launch starts; it does again when the last one ends."""
        return any(launch.zeroed for launch in self.launches)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the visible pairs, by the field's convention (backward: 5 products to 2)."""
        problem = self.problem
        pairs = problem.mask.visible_pairs(problem.seqlen_q, problem.seqlen_k, problem.shift)
        dims = problem.head_dim + problem.head_dim_v
        if self.kind == "backward":
            dims = 3 * problem.head_dim + 2 * problem.head_dim_v
        return 2 * problem.batch * problem.num_q_heads * pairs * dims


Planner = Callable[[Problem, Device], "Plan | str"]


def forward_plan(problem: Problem, device: Device) -> Plan:
    """The forward plan: the newest family of the device that takes the problem.

    Raises:
        UnsupportedError: no family takes it; says why.
    """
    return _first_that_fits(_forward_planners(), problem, device)


def backward_plan(problem: Problem, device: Device) -> Plan:
    """The backward plan; raises as ``forward_plan``."""
    return _first_that_fits(_backward_planners(), problem, device)


def _forward_planners() -> Mapping[str, Planner]:
    from cuflash import plan_sm80, plan_sm90

    return {"sm90": plan_sm90.forward, "sm80": plan_sm80.forward}


def _backward_planners() -> Mapping[str, Planner]:
    from cuflash import plan_sm80_backward, plan_sm90_backward

    return {"sm90": plan_sm90_backward.backward, "sm80": plan_sm80_backward.backward}


def _first_that_fits(planners: Mapping[str, Planner], problem: Problem, device: Device) -> Plan:
    refusals: list[str] = []
    for family in device.families:
        if family not in planners:
            continue
        answer = planners[family](problem, device)
        if isinstance(answer, str):
            refusals.append(f"{family}: {answer}")
            continue
        _check_grid(answer)
        return Plan(**{**_shallow(answer), "reasons": (*refusals, *answer.reasons)})
    raise UnsupportedError("problem", problem.q.shape, f"has no kernel on {device.name}: {'; '.join(refusals)}")


def _shallow(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def _check_grid(plan: Plan) -> None:
    for launch in plan.launches:
        if launch.grid > MAX_GRID:
            rule = f"needs {launch.grid} blocks, more than the {MAX_GRID} of one launch"
            raise UnsupportedError("q.shape", plan.problem.q.shape, rule, "split the batch")
