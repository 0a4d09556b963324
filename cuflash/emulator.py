"""Executes a Plan on a CPU: the same kernel sources, with host twins of the instructions, threads as fibers.

By default the emulator is an adversary: threads run in a random order drawn from a seed, asynchronous copies happen as
late or as oddly as the program allows, fresh memory holds NaN, and every access is checked for bounds. What it finds is
raised as EmulatorError with the kernel's file and line and the seed that repeats it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cuflash import emulator_build, emulator_tensor_map
from cuflash.emulator_options import EmulatorOptions, Statistics
from cuflash.emulator_structs import BufferStruct, OptionsStruct, describe
from cuflash.errors import EmulatorError
from cuflash.plan import Launch, Plan

__all__ = ["EmulatorOptions", "Statistics", "execute"]

_MESSAGE_BYTES = 8192


def execute(
    plan: Plan,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    *,
    seed: int | None = None,
    race: bool | None = None,
    instrument: bool | None = None,
    workers: int | None = None,
    options: EmulatorOptions | None = None,
) -> tuple[Statistics, ...]:
    """Runs the plan's launches in order on NumPy arrays, one for each operand; returns what each launch did.

    A workspace that is not among the arrays is allocated. Inputs are read-only to the kernels.

    Raises:
        EmulatorError: a kernel did something it must not, or there is no compiler.
    """
    chosen = options or EmulatorOptions.from_environment()
    given: dict[str, Any] = {"seed": seed, "race": race, "instrument": instrument, "workers": workers}
    chosen = replace(chosen, **{name: value for name, value in given.items() if value is not None})
    operands = dict(arrays)
    if plan.workspace_bytes and "workspace" not in operands:
        operands["workspace"] = _workspace(plan)
    written = {output.name for output in plan.outputs} | {"workspace"}
    buffers = [describe(name, array, name in written) for name, array in operands.items() if array.size]
    table = (BufferStruct * max(len(buffers), 1))(*buffers)
    return tuple(
        _launch(launch, operands, table, len(buffers), replace(chosen, seed=chosen.seed + index))
        for index, launch in enumerate(plan.launches)
    )


def _workspace(plan: Plan) -> np.ndarray[Any, Any]:
    """Aligned as a GPU allocator would, poisoned unless a launch relies on zeros."""
    room = np.full(plan.workspace_bytes + 256, 0xFF, np.uint8)
    start = -room.ctypes.data % 256
    workspace = room[start : start + plan.workspace_bytes]
    if plan.zeroed:
        workspace[:] = 0
    return workspace


def _opened(path: Path, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=mode)
    except OSError as error:
        remedy = "delete it to have it built again, or choose another folder with CUFLASH_EMULATOR_CACHE"
        raise EmulatorError(f"a library of the emulator cannot be loaded ({error}); {remedy}") from error


@cache
def _runtime(path: Path) -> Any:
    library = _opened(path, ctypes.RTLD_GLOBAL)
    entry = library.cuflash_emulator_launch
    entry.restype = ctypes.c_int
    entry.argtypes = (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32),
        *(ctypes.POINTER(OptionsStruct), ctypes.POINTER(BufferStruct), ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)),
        *(ctypes.c_char_p, ctypes.c_uint64),
    )
    return entry


@cache
def _kernel(path: Path, symbol: str) -> tuple[int, int, int]:
    """Address, parameter bytes and thread limit of a kernel."""
    library = _opened(path)
    address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0
    return address, library[f"{symbol}_param_bytes"](), library[f"{symbol}_max_threads"]()


def _launch(
    launch: Launch, operands: Mapping[str, np.ndarray[Any, Any]], table: Any, count: int, options: EmulatorOptions
) -> Statistics:
    run = _runtime(emulator_build.runtime_library())
    library = emulator_build.kernel_library(launch.variant.source(), options.instrument)
    symbol = launch.variant.symbol
    address, param_bytes, max_threads = _kernel(library, symbol)
    if param_bytes != len(launch.params):
        packed = len(launch.params)
        raise EmulatorError(f"{symbol}: the plan packs {packed} parameter bytes, the kernel has {param_bytes}")
    if launch.block % 32 or not 0 < launch.block <= max_threads:
        rule = f"must be a multiple of 32 up to the declared {max_threads}"
        raise EmulatorError(f"{symbol}: {launch.block} threads {rule}")
    storage, params = _params(launch, operands)
    native = OptionsStruct.of(options)
    statistics = (ctypes.c_uint64 * len(Statistics._fields))()
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    sizes = (param_bytes, launch.grid, launch.block, launch.shared_bytes)
    failed = run(address, params, *sizes, ctypes.byref(native), table, count, statistics, message, _MESSAGE_BYTES)
    del storage
    if failed:
        text = _with_lines(message.value.decode(errors="replace"), library)
        raise EmulatorError(f"{symbol}: {text} [seed {options.seed}]")
    return Statistics(*statistics)


def _params(launch: Launch, operands: Mapping[str, np.ndarray[Any, Any]]) -> tuple[Any, int]:
    """The parameter struct with addresses and tensor maps filled in, 64-byte aligned; the owner and the address."""
    room = np.zeros(len(launch.params) + 64, np.uint8)
    start = -room.ctypes.data % 64
    params = room[start : start + len(launch.params)]
    params[:] = np.frombuffer(launch.params, np.uint8)
    for pointer in launch.pointers:
        value = operands[pointer.operand].ctypes.data + pointer.byte_offset
        params[pointer.offset : pointer.offset + 8] = np.frombuffer(value.to_bytes(8, "little"), np.uint8)
    for slot in launch.tensor_maps:
        image = emulator_tensor_map.encode(slot, operands[slot.operand].ctypes.data + slot.byte_offset)
        params[slot.offset : slot.offset + 128] = np.frombuffer(image, np.uint8)
    return room, params.ctypes.data


def _with_lines(message: str, library: Path) -> str:
    """Code offsets of an instrumented kernel as file and line, where addr2line is at hand."""
    tool = shutil.which("addr2line")
    if tool is None:
        return message

    def line(match: re.Match[str]) -> str:
        offset = hex(int(match.group(1), 16) - 1)  # the call, not where it returns to
        found = subprocess.run([tool, "-e", str(library), offset], capture_output=True, text=True).stdout.strip()
        return f"[{Path(found).name}]" if found and not found.startswith("?") else match.group(0)

    return re.sub(r"\[kernel\+0x([0-9a-f]+)\]", line, message)
