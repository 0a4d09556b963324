"""Variant to loaded kernel: the only file that speaks to the compiler.

Two doors. ``load`` gives a kernel on the current GPU through ``cupy.RawModule``, whose disk cache is keyed by the text
(our digest line included), the options and the compiler's version, written by atomic rename and checked when read.
``compile_cubin`` asks NVRTC directly and needs no GPU: for tests, ``cuflash compile`` and targets beyond RawModule.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuflash import sources
from cuflash.errors import CompileError
from cuflash.side_by_side import side_by_side
from cuflash.variant import Variant

__all__ = ["Cubin", "Resources", "compile_cubin", "load", "load_all", "nvrtc_version", "options"]

_TARGET_BY_NAME = (12, 9)  # first NVRTC that accepts CuPy's own -arch beside ours; before it both together are an error
_lock = threading.Lock()
_building: dict[tuple[int, Variant, int], threading.Lock] = {}
_loaded: dict[tuple[int, Variant, int], Any] = {}


@dataclass(frozen=True)
class Cubin:
    """Machine code for one target, and what the compiler said."""

    symbol: str
    target: str
    code: bytes
    log: str


@dataclass(frozen=True)
class Resources:
    """What a loaded kernel takes: registers a thread, spilled bytes a thread, static shared memory."""

    registers: int
    local_bytes: int
    shared_bytes: int


def options(target: str | None) -> tuple[str, ...]:
    """Compiler options; ``target`` None leaves the choice to CuPy, which names the current GPU."""
    chosen = ("--std=c++20", f"-I{sources.source_root()}", "--ftz=true", "--extra-device-vectorization")
    return chosen if target is None else (*chosen, f"-arch={target}")


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ModuleNotFoundError as error:
        remedy = 'pip install "cuflash[cuda12]" or "cuflash[cuda13]"; compiling needs no GPU'
        raise ModuleNotFoundError(f"NVRTC comes with CuPy, which is not importable ({error}); {remedy}") from error
    return nvrtc


def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC that CuPy found."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def load(variant: Variant, shared_bytes: int) -> Any:
    """The kernel on the current GPU as a ``cupy.RawKernel``, with its shared-memory limit raised.

    Loaded once a process, variant and device; a forked child starts with its own table.

    Raises:
        CompileError: NVRTC refused the text.
    """
    import cupy

    key = (cupy.cuda.runtime.getDevice(), variant, os.getpid())
    kernel = _loaded.get(key)
    if kernel is None:
        with _lock:
            building = _building.setdefault(key, threading.Lock())
        with building:  # one compiler a kernel, many kernels at once
            kernel = _loaded.get(key) or _build(variant)
            _loaded[key] = kernel
    if shared_bytes > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel


def load_all(kernels: Iterable[tuple[Variant, int]]) -> list[Any]:
    """``load`` for each pair of a variant and its shared memory; those not loaded yet are compiled side by side.

    Raises:
        CompileError: NVRTC refused a text.
    """
    import cupy

    wanted, device = list(kernels), cupy.cuda.runtime.getDevice()
    missing = {variant: shared for variant, shared in wanted if (device, variant, os.getpid()) not in _loaded}

    def load_there(kernel: tuple[Variant, int]) -> None:
        with cupy.cuda.Device(device):  # the current device belongs to a thread
            load(*kernel)

    if len(missing) > 1:
        side_by_side(load_there, missing.items(), os.cpu_count() or 1)
    return [load(*kernel) for kernel in wanted]


def resources(variant: Variant) -> Resources:
    """Registers and spills of a variant on the current GPU."""
    kernel = load(variant, 0)
    return Resources(kernel.num_regs, kernel.local_size_bytes, kernel.shared_size_bytes)


def compile_cubin(variant: Variant, target: str) -> Cubin:
    """Compiles for ``target`` (such as "sm_86") without a GPU; ptxas's resource report is in the log.

    Raises:
        CompileError: NVRTC refused the text or does not know the target.
        ModuleNotFoundError: CuPy, which brings NVRTC's binding, is not here.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(variant.source(), f"{variant.symbol}.cu", (), ())
    try:
        report = ("--ptxas-options=-v", "--ptxas-options=--warn-on-spills")
        # RawModule adds this one by itself: constexpr functions need no annotation.
        nvrtc.compileProgram(program, (*options(target), "--device-as-default-execution-space", *report))
        # CuPy's binding takes the image for a C string and drops its last byte, a zero of the last table.
        image = nvrtc.getCUBIN(program) + b"\0"
        return Cubin(variant.symbol, target, image, nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program) or str(error)
        raise CompileError(variant.symbol, target, log, _reproduce(variant, target)) from error
    finally:
        nvrtc.destroyProgram(program)


def _build(variant: Variant) -> Any:
    import cupy

    target = "sm_90a" if variant.family == "sm90" else None
    if target is not None and nvrtc_version() < _TARGET_BY_NAME:
        return _from_cubin(variant, target)
    try:
        module = cupy.RawModule(code=variant.source(), options=options(target), backend="nvrtc")
        return module.get_function(variant.symbol)
    except cupy.cuda.compiler.CompileException as error:
        name = target or f"sm_{cupy.cuda.Device().compute_capability}"
        raise CompileError(variant.symbol, name, str(error), _reproduce(variant, name)) from error


def _from_cubin(variant: Variant, target: str) -> Any:
    import cupy

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{variant.symbol}.cubin"
        path.write_bytes(compile_cubin(variant, target).code)
        kernel = cupy.RawModule(path=str(path)).get_function(variant.symbol)
        _ = kernel.num_regs  # loads the file before the folder goes
    return kernel


def _reproduce(variant: Variant, target: str) -> str:
    return f"cuflash compile --arch {target} --symbol {variant.symbol}"
