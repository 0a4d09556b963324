"""The structs that cross to the emulator's runtime: twins of cuda_src/emulator/runtime/options.h."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cuflash.emulator_options import EmulatorOptions

__all__ = ["BufferStruct", "OptionsStruct", "describe"]

_TIMINGS = ("eager", "late", "random")  # order of enum Timing
_MAX_DIMS = 6


class OptionsStruct(ctypes.Structure):  # twin of Options in runtime/options.h
    _fields_ = (
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("random_order", "timing", "poison", "race", "preempt", "workers")),
        ("watchdog_seconds", ctypes.c_double),
    )

    @classmethod
    def of(cls, options: EmulatorOptions) -> OptionsStruct:
        """The same options; preemption happens in instrumented kernels only."""
        return cls(
            options.seed,
            options.random_order,
            _TIMINGS.index(options.timing),
            options.poison,
            options.race,
            options.preempt if options.instrument else 0,
            options.workers,
            options.watchdog,
        )


class BufferStruct(ctypes.Structure):  # twin of Buffer in runtime/options.h
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("run_bytes", ctypes.c_uint64),
        ("extents", ctypes.c_uint64 * _MAX_DIMS),
        ("strides", ctypes.c_uint64 * _MAX_DIMS),
        ("name", ctypes.c_char * 32),
    )


def describe(name: str, array: np.ndarray[Any, Any], writable: bool) -> BufferStruct:
    """The array's exact extent: its contiguous runs, so that an access between rows is out of bounds too."""
    base = array.ctypes.data
    dims = [(abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1 and s != 0]
    base += sum(s * (n - 1) for s, n in zip(array.strides, array.shape, strict=True) if s < 0)
    total = array.itemsize + sum(s * (n - 1) for s, n in dims)
    run = array.itemsize
    outer: list[tuple[int, int]] = []
    span = run  # bytes from the first to past the last byte of what is described so far
    for stride, extent in sorted(dims):
        if stride < span:  # rows overlap: only the whole extent can be checked
            run, outer = total, []
            break
        if not outer and stride == run:
            run *= extent
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0], outer[-1][1] * extent)
        else:
            outer.append((stride, extent))
        span = stride * (extent - 1) + span
    if len(outer) > _MAX_DIMS:
        run, outer = total, []
    entry = BufferStruct(base, total, writable, len(outer), run, name=name.encode()[:31])
    for place, (stride, extent) in enumerate(reversed(outer)):
        entry.strides[place], entry.extents[place] = stride, extent
    return entry
