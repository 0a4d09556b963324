"""The whole GPU chain without a GPU: XLA calls launcher.c, whose driver is a double that runs the emulator."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driver_double import WritingDriver, drive
from samples import assert_close, exact, sample
from test_launcher import needs_compiler

from cuflash.architectures import Device
from cuflash.dtypes import DTYPES
from cuflash.interop import launcher as launchers
from cuflash.interop.driver import PythonLauncher
from cuflash.interop.words import encode, kernel_key, operand_names
from cuflash.plan import Plan
from cuflash.problem import Keywords

jax = pytest.importorskip("jax")

from cuflash.interop import jax_ffi, jax_frame  # noqa: E402
from cuflash.interop.jax_operator import problem_of  # noqa: E402

Array = np.ndarray[Any, Any]


class EmulatingDriver(WritingDriver):
    """A driver whose kernels run: operands are found again at the addresses that stand in the parameters."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.param_bytes = {0x1000 + i: len(launch.params) for i, launch in enumerate(plan.launches)}

    def _run(self, config: int, handle: int, arguments: int, extra: Any) -> int:
        from cuflash import emulator

        super()._run(config, handle, arguments, extra)
        launch = self.plan.launches[handle - 0x1000]
        params = self.launched[-1][2]
        operands = {}
        for pointer in launch.pointers:
            address = int.from_bytes(params[pointer.offset : pointer.offset + 8], "little") - pointer.byte_offset
            operands[pointer.operand] = over(address, *self._extent(pointer.operand))
        for slot in launch.tensor_maps:  # what ``_encode`` of the writing driver left there
            address = int.from_bytes(params[slot.offset + 16 : slot.offset + 24], "little") - slot.byte_offset
            operands[slot.operand] = over(address, *self._extent(slot.operand))
        emulator.execute(replace(self.plan, launches=(launch,)), operands)
        return 0

    def _clear(self, address: int, value: int, count: int, stream: int) -> int:
        ctypes.memset(address, 0, 4 * count)
        return super()._clear(address, value, count, stream)

    def _extent(self, name: str) -> tuple[tuple[int, ...], str]:
        if name == "workspace":
            return (-(-self.plan.workspace_bytes // 4),), "float32"
        problem = self.plan.problem
        for output in self.plan.outputs:
            if output.name == name:
                return output.shape, output.dtype
        if name in ("lse", "d_lse"):
            return problem.lse_shape, "float32"
        spec = getattr(problem, name)
        return spec.shape, spec.dtype


def over(address: int, shape: tuple[int, ...], dtype: str) -> Array:
    kind = DTYPES[dtype].numpy
    raw = (ctypes.c_char * (int(np.prod(shape)) * kind.itemsize)).from_address(address)
    return np.frombuffer(raw, kind).reshape(shape)


def plan_of(kind: str, arrays: dict[str, Array], capability: tuple[int, int] = (8, 0)) -> Plan:
    problem = problem_of(kind, Keywords(causal=True), arrays)
    return jax_ffi.make_plan(kind, problem, Device.emulated(capability))[0]


@pytest.fixture
def c_launcher() -> Iterator[Any]:
    chosen = launchers.CLauncher(launchers.build())
    yield chosen
    drive(chosen.library, None)


def through_xla(chosen: Any, plan: Plan, arrays: dict[str, Array], name: str) -> dict[str, Array]:
    driver = EmulatingDriver(plan)
    drive(chosen.library, driver)
    for number, launch in enumerate(plan.launches):
        chosen.register(kernel_key(launch.variant, "emulated"), 0, 0x1000 + number)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(chosen.library.cuflash_xla_host), platform="cpu")
    shapes = [jax.ShapeDtypeStruct(x.shape, DTYPES[x.dtype].numpy) for x in plan.outputs]
    if plan.workspace_bytes:
        shapes.append(jax.ShapeDtypeStruct((-(-plan.workspace_bytes // 4),), np.float32))
    words = encode(plan, "emulated")
    call = jax.jit(lambda *xs: jax.ffi.ffi_call(name, shapes)(*xs, plan=words))
    found = [np.asarray(x) for x in call(*(arrays[n] for n in plan.inputs))]
    return {output.name: x for output, x in zip(plan.outputs, found, strict=False)}


@needs_compiler
def test_forward_and_backward_through_the_c_launcher(c_launcher: Any) -> None:
    arrays = sample("bfloat16")
    forward = plan_of("forward", {name: arrays[name] for name in "qkv"})
    found = through_xla(c_launcher, forward, arrays, "cuflash_chain_forward")
    arrays |= found
    backward = plan_of("backward", {name: arrays[name] for name in ("d_out", "q", "k", "v", "out", "lse")})
    found |= through_xla(c_launcher, backward, arrays, "cuflash_chain_backward")
    for name, wanted in zip(("out", "lse", "dq", "dk", "dv"), exact(sample("bfloat16"), causal=True), strict=True):
        assert_close(found[name], wanted, "float32" if name == "lse" else "bfloat16", scale=4)


@needs_compiler
def test_tensor_maps_and_cleared_counters_through_the_c_launcher(c_launcher: Any) -> None:
    arrays = sample("bfloat16", (2, 300, 300, 2, 1, 64))
    plan = plan_of("forward", {name: arrays[name] for name in "qkv"}, (9, 0))
    assert plan.launches[0].tensor_maps
    found = through_xla(c_launcher, plan, arrays, "cuflash_chain_maps")
    for name, wanted in zip(("out", "lse"), exact(arrays, causal=True), strict=False):
        assert_close(found[name], wanted, "float32" if name == "lse" else "bfloat16", scale=4)


@needs_compiler
def test_errors_of_the_c_launcher_reach_the_caller(c_launcher: Any) -> None:
    arrays = sample("bfloat16", seed=1)
    plan = plan_of("forward", {name: arrays[name] for name in "qkv"})
    driver = EmulatingDriver(plan)
    drive(c_launcher.library, driver)
    jax.ffi.register_ffi_target(
        "cuflash_chain_errors", jax.ffi.pycapsule(c_launcher.library.cuflash_xla_host), platform="cpu"
    )
    shapes = [jax.ShapeDtypeStruct(x.shape, DTYPES[x.dtype].numpy) for x in plan.outputs]
    for words, message in (
        (encode(plan, "nowhere"), "FAILED_PRECONDITION.*not loaded"),
        (np.ones(9, np.int64), "INVALID"),
    ):
        call = jax.jit(lambda *xs, words=words: jax.ffi.ffi_call("cuflash_chain_errors", shapes)(*xs, plan=words))
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call(*(arrays[n] for n in "qkv")))


def test_the_python_handler_takes_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = sample("bfloat16")
    plan = plan_of("forward", {name: arrays[name] for name in "qkv"})
    driver = EmulatingDriver(plan)
    chosen = PythonLauncher(driver)
    for number, launch in enumerate(plan.launches):
        chosen.register(kernel_key(launch.variant, "emulated"), 0, 0x1000 + number)
    monkeypatch.setattr(jax_frame, "stream_of", lambda frame: 0)
    handler = jax_ffi._gpu_handler(chosen)
    jax_ffi._kept_alive.append(handler)
    jax.ffi.register_ffi_target("cuflash_chain_python", jax.ffi.pycapsule(handler), platform="cpu")
    shapes = [jax.ShapeDtypeStruct(x.shape, DTYPES[x.dtype].numpy) for x in plan.outputs]
    words = encode(plan, "emulated")
    out, _ = jax.ffi.ffi_call("cuflash_chain_python", shapes)(*(arrays[n] for n in "qkv"), plan=words)
    assert_close(out, exact(arrays, causal=True)[0], "bfloat16")


def test_kernels_are_loaded_on_every_gpu_when_a_call_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash import jit

    loaded: list[tuple[int, str]] = []
    current = [0]

    @contextlib.contextmanager
    def device(ordinal: int) -> Iterator[None]:
        current[0], before = ordinal, current[0]
        yield
        current[0] = before

    def load_all(kernels: Iterable[tuple[Any, int]]) -> list[Any]:
        symbols = [variant.symbol for variant, _ in kernels]
        loaded.extend((current[0], symbol) for symbol in symbols)
        return [SimpleNamespace(kernel=SimpleNamespace(ptr=0x1000)) for _ in symbols]

    monkeypatch.setitem(__import__("sys").modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=device)))
    monkeypatch.setattr(jit, "load_all", load_all)
    monkeypatch.setattr(jax_ffi, "gpu_devices", lambda: (0, 1))
    driver = WritingDriver()
    chosen = PythonLauncher(driver)
    monkeypatch.setattr(jax_ffi, "launcher", lambda: chosen)
    arrays = sample("bfloat16")
    plan = plan_of("forward", {name: arrays[name] for name in "qkv"})
    jax_ffi._load_kernels(plan)
    assert loaded == [(ordinal, launch.variant.symbol) for ordinal in (0, 1) for launch in plan.launches]
    driver.param_bytes[0x1000] = len(plan.launches[0].params)
    chosen.prepare(encode(plan, "sm_80"))([0x10] * len(operand_names(plan)), 0, 1)
    assert len(driver.launched) == len(plan.launches)
