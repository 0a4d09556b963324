"""Executes a Plan on a GPU: patches addresses into parameter bytes, queues the kernels on CuPy's current stream."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import cupy
import numpy as np

from cuflash import jit
from cuflash.architectures import Device, architecture_of
from cuflash.driver import OVERLAP, LaunchAttribute, LaunchConfig, check, is_captured, libcuda
from cuflash.dtypes import DTYPES, dtype_of
from cuflash.eager import Eager, element_strides
from cuflash.errors import DeviceError
from cuflash.overlap import shares_memory
from cuflash.plan import Launch, Plan, Pointer, TensorMapSlot
from cuflash.problem import ArraySpec
from cuflash.tensormap import encode

__all__ = ["CupyBackend", "device_of", "eager", "execute"]

Runner = Callable[[Mapping[str, int], int], None]

_zeros: dict[tuple[int, int, tuple[int]], Any] = {}
_scratches: dict[tuple[int, int, int], Any] = {}
_prepared: dict[tuple[int, int], tuple[Plan, tuple[Runner, ...]]] = {}
_PREPARED_LIMIT, _MAPS_LIMIT = 8192, 1024  # plans, addresses of one operand; a full table starts afresh
_SCRATCH_BYTES, _SCRATCHES_LIMIT = 1 << 20, 64  # an allocation costs as much as a launch; pairs of thread and stream


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
        kernels = jit.load_all((launch.variant, launch.shared_bytes) for launch in plan.launches)
        entry = (plan, tuple(map(_prepare, plan.launches, kernels)))
        if len(_prepared) >= _PREPARED_LIMIT:
            _prepared.clear()
        _prepared[key] = entry
    stream = cupy.cuda.get_current_stream().ptr
    for run in entry[1]:
        run(addresses, stream)


def _prepare(launch: Launch, kernel: Any) -> Runner:
    """Binds all that does not change between calls. The driver copies the parameters before it returns, so one buffer
    serves every call; the lock keeps two threads from patching it at once.
    """
    buffer = ctypes.create_string_buffer(launch.params, len(launch.params))
    argument = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    queue, symbol = _queue(launch, kernel.kernel.ptr, argument), launch.variant.symbol
    patches = [_patch(run) for run in _neighbours(launch.pointers)]
    maps = [(slot.offset, slot.operand, slot.byte_offset, _encoder(slot)) for slot in launch.tensor_maps]
    view, lock = memoryview(buffer).cast("B"), threading.Lock()

    def run(addresses: Mapping[str, int], stream: int) -> None:
        with lock:
            for patch in patches:
                patch(buffer, addresses)
            for offset, operand, byte_offset, encoded in maps:
                view[offset : offset + 128] = encoded(addresses[operand] + byte_offset)
            status = queue(stream)
        if status:
            check(symbol, status)

    return run


def _queue(launch: Launch, function: int, argument: Any) -> Callable[[int], int]:
    """The driver's launch with all but the stream bound; one caller at a time."""
    if not launch.overlap:
        plain = libcuda().cuLaunchKernel
        fixed = (launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes)
        return lambda stream: int(plain(function, *fixed, stream, argument, None))
    attribute = LaunchAttribute(id=OVERLAP)
    attribute.value[0] = 1
    grid, block = (ctypes.c_uint * 3)(launch.grid, 1, 1), (ctypes.c_uint * 3)(launch.block, 1, 1)
    config = LaunchConfig(grid, block, launch.shared_bytes, None, ctypes.pointer(attribute), 1)
    driver, address = libcuda(), ctypes.addressof(config)

    def queue(stream: int) -> int:
        config.stream, config.num_attributes = stream, 0 if is_captured(driver, stream) else 1
        return int(driver.cuLaunchKernelEx(address, function, argument, None))

    return queue


def _encoder(slot: TensorMapSlot) -> Callable[[int], bytes]:
    """Tensor maps by address; an allocator hands out the same few addresses again and again."""
    known: dict[int, bytes] = {}

    def encoded(address: int) -> bytes:
        found = known.get(address)
        if found is None:
            if len(known) >= _MAPS_LIMIT:
                known.clear()
            found = known[address] = encode(slot, address)
        return found

    return encoded


def _neighbours(pointers: tuple[Pointer, ...]) -> list[list[Pointer]]:
    """Pointers grouped into runs that lie side by side in the struct."""
    runs: list[list[Pointer]] = []
    for pointer in sorted(pointers, key=lambda p: p.offset):
        if runs and runs[-1][-1].offset + 8 == pointer.offset:
            runs[-1].append(pointer)
        else:
            runs.append([pointer])
    return runs


def _patch(run: list[Pointer]) -> Callable[[Any, Mapping[str, int]], None]:
    """Writes one run of addresses."""
    pack, offset = struct.Struct(f"<{len(run)}Q").pack_into, run[0].offset
    names, shifts = [pointer.operand for pointer in run], [pointer.byte_offset for pointer in run]
    if any(shifts):
        return lambda buffer, addresses: pack(
            buffer, offset, *(addresses[name] + shift for name, shift in zip(names, shifts, strict=True))
        )
    return lambda buffer, addresses: pack(buffer, offset, *[addresses[name] for name in names])


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
                return cupy.ndarray(shape, _NUMPY[dtype])
        return cupy.ndarray(shape, _NUMPY[dtype])  # what cupy.empty calls, without its options

    def workspace(self, plan: Plan, like: Any) -> Any:
        words = (-(-plan.workspace_bytes // 4),)
        if not plan.zeroed:
            if plan.workspace_bytes <= _SCRATCH_BYTES and like.data.device_id == cupy.cuda.runtime.getDevice():
                return self._scratch(words, like)
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

    def _scratch(self, words: tuple[int], like: Any) -> Any:
        """A small workspace that the calls of one thread on one stream share: they follow each other there.

        Another thread's launches could fall between two of this one's, and a graph may be replayed beside anything.
        """
        stream = cupy.cuda.get_current_stream().ptr
        if cupy.cuda.runtime.streamIsCapturing(stream):
            return self.empty(words, "float32", like)
        key = (like.data.device_id, stream, threading.get_ident())
        found = _scratches.get(key)
        if found is None:
            if len(_scratches) >= _SCRATCHES_LIMIT:
                _scratches.clear()
            found = _scratches[key] = self.empty((_SCRATCH_BYTES // 4,), "float32", like)
        return found

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
