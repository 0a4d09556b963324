"""Executes a Plan on a GPU: patches addresses into parameter bytes, queues the kernels on CuPy's current stream."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import cupy
import numpy as np

from cuflash import jit
from cuflash.architectures import Device, architecture_of
from cuflash.dtypes import DTYPES, dtype_of
from cuflash.eager import Eager, element_strides
from cuflash.errors import DeviceError
from cuflash.overlap import shares_memory
from cuflash.plan import Launch, Plan
from cuflash.problem import ArraySpec
from cuflash.tensormap import encode

__all__ = ["CupyBackend", "device_of", "eager", "execute"]

_zeros: dict[tuple[int, int, tuple[int]], Any] = {}
_ADDRESS = struct.Struct("<Q")
_prepared: dict[tuple[int, int], tuple[Plan, tuple[Callable[[Mapping[str, int]], None], ...]]] = {}


@cache
def device_of(index: int) -> Device:
    """The GPU with this ordinal as plain data."""
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    capability = (properties["major"], properties["minor"])
    name = properties["name"].decode()
    limit = int(properties["sharedMemPerBlockOptin"])
    return Device(name, capability, properties["multiProcessorCount"], limit, architecture_of(capability).families)


def execute(plan: Plan, addresses: Mapping[str, int]) -> None:
    """Queues the plan on the current device and stream; ``addresses`` names every operand. Never synchronises."""
    key = (id(plan), cupy.cuda.runtime.getDevice())
    entry = _prepared.get(key)
    if entry is None or entry[0] is not plan:
        entry = (plan, tuple(_prepare(launch) for launch in plan.launches))
        if len(_prepared) > 2 * 4096:
            _prepared.clear()
        _prepared[key] = entry
    for run in entry[1]:
        run(addresses)


def _prepare(launch: Launch) -> Callable[[Mapping[str, int]], None]:
    kernel = jit.load(launch.variant, launch.shared_bytes)
    grid, block, shared = (launch.grid, 1, 1), (launch.block, 1, 1), launch.shared_bytes
    template, pointers, maps = launch.params, launch.pointers, launch.tensor_maps
    by_value = np.dtype((np.void, len(template)))
    patch = _ADDRESS.pack_into

    def run(addresses: Mapping[str, int]) -> None:
        params = bytearray(template)
        for pointer in pointers:
            patch(params, pointer.offset, addresses[pointer.operand] + pointer.byte_offset)
        for slot in maps:
            params[slot.offset : slot.offset + 128] = encode(slot, addresses[slot.operand] + slot.byte_offset)
        kernel(grid, block, (np.frombuffer(params, by_value)[0],), shared_mem=shared)

    return run


class CupyBackend:
    """CuPy arrays on the device that holds them."""

    def key(self, array: Any) -> Any:
        data = array.data
        return (array.shape, array.strides, array.dtype, data.ptr & 15, data.device_id)

    def spec(self, argument: str, array: Any) -> ArraySpec:
        dtype = dtype_of(argument, array.dtype)
        strides = element_strides(argument, array.strides, dtype)
        return ArraySpec(tuple(array.shape), strides, dtype.name, _alignment(array.data.ptr))

    def device(self, arrays: dict[str, Any]) -> Device:
        home = arrays["q"].data.device_id
        for name, array in arrays.items():
            if array.data.device_id != home:
                rule = f"must lie on q's device {home}"
                raise DeviceError(f"{name}.device", array.data.device_id, rule, "copy it with cupy.asarray there")
        return device_of(home)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        if like.data.device_id != cupy.cuda.runtime.getDevice():
            with cupy.cuda.Device(like.data.device_id):
                return cupy.empty(shape, DTYPES[dtype].numpy)
        return cupy.empty(shape, _NUMPY[dtype])

    def workspace(self, plan: Plan, like: Any) -> Any:
        words = (-(-plan.workspace_bytes // 4),)
        if not plan.zeroed:
            return self.empty(words, "float32", like)
        with cupy.cuda.Device(like.data.device_id):
            stream = cupy.cuda.get_current_stream().ptr
            if cupy.cuda.runtime.streamIsCapturing(stream):
                return cupy.zeros(words, np.float32)  # a graph may be replayed beside anything: memory of its own
            # Runs on one stream follow each other and leave zeros behind, so they can share.
            key = (like.data.device_id, stream, words)
            if key not in _zeros:
                _zeros[key] = cupy.zeros(words, np.float32)
            return _zeros[key]

    def contiguous(self, array: Any) -> Any:
        return array if array.flags.c_contiguous else cupy.ascontiguousarray(array)

    def overlaps(self, one: Any, other: Any) -> bool:
        return shares_memory(_extent(one), _extent(other))

    def writable(self, array: Any) -> bool:
        return True

    def run(self, plan: Plan, operands: dict[str, Any]) -> None:
        addresses = {name: array.data.ptr for name, array in operands.items()}
        home = operands["q"].data.device_id
        if home == cupy.cuda.runtime.getDevice():
            execute(plan, addresses)
            return
        with cupy.cuda.Device(home):
            execute(plan, addresses)


_NUMPY = {name: row.numpy for name, row in DTYPES.items()}


def _extent(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    return array.data.ptr, array.shape, array.strides, array.dtype.itemsize


def _alignment(address: int) -> int:
    return min(address & -address, 16) if address else 16


eager = Eager(CupyBackend())
