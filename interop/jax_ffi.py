"""The foreign call: plans made at trace time, kernels loaded then too, and the handlers that XLA runs.

One target, ``cuflash_plan``, and one attribute, the plan's words. On CUDA the handler is launcher.c or its twin in
Python, chosen when the process starts; the compiled program is the same either way, and so are caches and exports. On
the CPU the handler runs the plan on the emulator. Workspaces are extra results, so XLA's allocator is the only pool.
"""

from __future__ import annotations

import os
import threading
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np

from cuflash.architectures import Device, architecture_of, capability_from_environment
from cuflash.dtypes import DTYPES
from cuflash.errors import ArgumentError, DeviceError
from cuflash.interop import jax_frame
from cuflash.interop.driver import PythonLauncher
from cuflash.interop.jax_axes import vary, varying_axes
from cuflash.interop.launcher import CLauncher, launcher
from cuflash.interop.words import encode, kernel_key, operand_names
from cuflash.plan import Plan, backward_plan, forward_plan
from cuflash.problem import Problem

__all__ = ["RESULTS", "TARGET", "call", "cpu_mode", "gpu_device", "make_plan"]

TARGET = "cuflash_plan"
RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
_lock = threading.Lock()
_kept_alive: list[Any] = []  # C callbacks that XLA holds the addresses of
_emulated: dict[bytes, Plan] = {}  # the emulator runs whole plans; words name them


def cpu_mode() -> str:
    """What JAX's CPU backend runs: ``reference`` (jax.numpy) or, with CUFLASH_JAX_CPU=emulator, the kernels."""
    mode = os.environ.get("CUFLASH_JAX_CPU", "reference")
    if mode not in ("reference", "emulator"):
        raise ArgumentError("CUFLASH_JAX_CPU", mode, "must be reference or emulator")
    return mode


@cache
def gpu_devices() -> tuple[int, ...]:
    """CUDA ordinals of JAX's GPUs; empty where JAX has none."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return ()
    return tuple(int(device.local_hardware_id) for device in devices)


@cache
def gpu_device() -> Device:
    """The GPU that programs are planned for: JAX's first, or without one what CUFLASH_JAX_CAPABILITY names."""
    if gpu_devices():
        from cuflash.launch import device_of

        return device_of(gpu_devices()[0])
    row = architecture_of(capability_from_environment("CUFLASH_JAX_CAPABILITY", "9.0"))
    return Device(f"any {row.target}", row.capability, 132, row.shared_limit, row.families)


@lru_cache(maxsize=4096)
def make_plan(kind: str, problem: Problem, device: Device) -> tuple[Plan, np.ndarray[Any, Any]]:
    """The plan and its words."""
    plan = (forward_plan if kind == "forward" else backward_plan)(problem, device)
    return plan, encode(plan, architecture_of(device.capability).target)


def call(kind: str, problem: Problem, arrays: dict[str, Any], platform: str) -> tuple[Any, ...]:
    """The plan's outputs, by a foreign call on ``platform`` ("cuda" or "cpu")."""
    if platform == "cpu":
        from cuflash.host import NumpyBackend

        plan, words = make_plan(kind, problem, NumpyBackend().device({}))
        _emulated[words.tobytes()] = plan
    else:
        plan, words = make_plan(kind, problem, gpu_device())
        _load_kernels(plan)
    _register_targets()
    shapes = [jax.ShapeDtypeStruct(x.shape, DTYPES[x.dtype].numpy) for x in plan.outputs]
    if plan.workspace_bytes:
        shapes.append(jax.ShapeDtypeStruct((-(-plan.workspace_bytes // 4),), np.float32))
    operands = [arrays[name] for name in plan.inputs]
    results = jax.ffi.ffi_call(TARGET, shapes)(*operands, plan=words)
    axes = varying_axes(operands)
    found = {output.name: vary(x, axes) for output, x in zip(plan.outputs, results, strict=False)}
    return tuple(found[name] for name in RESULTS[kind])


def _load_kernels(plan: Plan) -> None:
    """Loads at trace time, on every GPU of the process: inside a recorded graph nothing may be loaded."""
    if not gpu_devices():
        return
    try:
        import cupy
    except ImportError as error:
        remedy = 'pip install "cuflash[cuda12]" or "cuflash[cuda13]", as JAX\'s own CUDA'
        raise DeviceError("cupy", "missing", "compiles the kernels for JAX's GPUs", remedy) from error
    from cuflash import jit

    target = architecture_of(plan.device.capability).target
    for ordinal in gpu_devices():
        with cupy.cuda.Device(ordinal):
            kernels = jit.load_all((launch.variant, launch.shared_bytes) for launch in plan.launches)
            for launch, kernel in zip(plan.launches, kernels, strict=True):
                launcher().register(kernel_key(launch.variant, target), ordinal, kernel.kernel.ptr)


def _register_targets() -> None:
    with _lock:
        _register_once()


@cache
def _register_once() -> None:
    chosen = launcher()
    if isinstance(chosen, CLauncher):
        gpu_handler = chosen.library.cuflash_xla_cuda
    else:
        assert isinstance(chosen, PythonLauncher)
        gpu_handler = _gpu_handler(chosen)
    host_handler = jax_frame.handler(_run_on_emulator, records=False)
    _kept_alive.extend((gpu_handler, host_handler))
    for platform, function in (("CUDA", gpu_handler), ("cpu", host_handler)):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(function), platform=platform)


def _gpu_handler(chosen: PythonLauncher) -> Any:
    run, call_of = chosen.run_bytes, jax_frame.call_of

    def queue(frame: int) -> None:
        words, operands, stream = call_of(frame)
        run(words, operands, stream, -1)

    return jax_frame.handler(queue, records=True)


def _run_on_emulator(frame: int) -> None:
    from cuflash import emulator

    plan = _emulated.get(jax_frame.plan_words(frame))
    if plan is None:
        raise jax_frame.Failure(
            jax_frame.FAILED_PRECONDITION,
            "cuflash: this process has not traced the call; do so once (jax.eval_shape is enough)",
        )
    arrays = [jax_frame.as_numpy(buffer) for buffer in jax_frame.buffers(frame)]
    operands = dict(zip(operand_names(plan), arrays, strict=True))
    if plan.zeroed:
        operands["workspace"][:] = 0
    emulator.execute(plan, operands)
