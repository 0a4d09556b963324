"""The launcher's twin in Python: the same words, executed through the CUDA driver with ctypes. Needs no compiler."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np

from cuflash.driver import CLUSTER, OVERLAP, LaunchAttribute, LaunchConfig, is_captured
from cuflash.errors import CuflashError
from cuflash.interop.words import FlatLaunch, decode
from cuflash.plan import MAP_BYTES

__all__ = ["LaunchConfig", "PythonLauncher"]

_ALIGNMENT = 64  # bytes; what a tensor map asks of its place among the parameters
_PREPARED_LIMIT, _MAPS_LIMIT = 4096, 1024  # plans, addresses of one operand; a full table starts afresh
Queue = Callable[[Sequence[int], int], None]  # (addresses of the operands, stream)


@cache
def libcuda() -> ctypes.CDLL:
    """The driver's library.

    Raises:
        CuflashError: there is none.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CuflashError(f"libcuda.so.1 of CUDA 12 or newer is not here: {error}") from error
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


class PythonLauncher:
    """Executes words with ctypes. All that does not change between calls is bound once a plan and device."""

    name = "python"

    def __init__(self, driver: Any = None) -> None:
        self._driver = driver
        self._handles: dict[tuple[int, int], int] = {}
        self._prepared: dict[tuple[bytes, int], Queue] = {}

    @property
    def driver(self) -> Any:
        """libcuda, looked for at the first call; the tests put a double here."""
        if self._driver is None:
            self._driver = libcuda()
        return self._driver

    def register(self, key: int, device: int, handle: int) -> None:
        self._handles[key, device] = handle

    def prepare(self, words: np.ndarray[Any, Any]) -> Callable[[Sequence[int], int, int], None]:
        """The plan of these words, ready to be queued again and again."""
        return partial(self.run_bytes, words.tobytes())

    def run_bytes(self, words: bytes, operands: Sequence[int], stream: int, device: int) -> None:
        """Queues the launches of the plan whose words these bytes are; device < 0 is the current context's."""
        if device < 0:
            ordinal = ctypes.c_int()
            _check("cuCtxGetDevice", self.driver.cuCtxGetDevice(ctypes.byref(ordinal)))
            device = ordinal.value
        else:
            self._ensure_context(device)
        queue = self._prepared.get((words, device))
        if queue is None:
            queue = self._bind(words, device)
        queue(operands, stream)

    def _bind(self, words: bytes, device: int) -> Queue:
        try:
            plan = decode(np.frombuffer(words, np.int64).tolist())
        except ValueError as error:
            raise CuflashError(str(error)) from error
        for launch in plan.launches:
            if (launch.key, device) not in self._handles:
                raise CuflashError(
                    f"kernel {launch.key:016x} is not loaded on device {device} of this process; trace the same call "
                    "once (jax.eval_shape is enough) before running a deserialised program"
                )
        launches = [_bind_launch(self.driver, x, self._handles[x.key, device]) for x in plan.launches]
        lock, count, cleared, driver = threading.Lock(), plan.num_operands, plan.cleared_words, self.driver

        def queue(operands: Sequence[int], stream: int) -> None:
            if len(operands) != count:
                raise CuflashError(f"the plan names {count} operands and the call brings {len(operands)}")
            if cleared:
                where, there = ctypes.c_void_p(operands[-1]), ctypes.c_void_p(stream)
                _check("cuMemsetD32Async", driver.cuMemsetD32Async(where, 0, ctypes.c_size_t(cleared), there))
            with lock:  # the buffers of the parameters are shared; the driver copies them before it returns
                for launch in launches:
                    launch(operands, stream)

        if len(self._prepared) >= _PREPARED_LIMIT:
            self._prepared.clear()
        self._prepared[words, device] = queue
        return queue

    def _ensure_context(self, device: int) -> None:
        """A thread that has made no call of the CUDA runtime has no context, and memory from a pool needs none."""
        context = ctypes.c_void_p()
        if self.driver.cuCtxGetCurrent(ctypes.byref(context)) or not context:
            _check("cuDevicePrimaryCtxRetain", self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            _check("cuCtxSetCurrent", self.driver.cuCtxSetCurrent(context))


def _bind_launch(driver: Any, launch: FlatLaunch, handle: int) -> Queue:
    storage = ctypes.create_string_buffer(len(launch.params) + _ALIGNMENT)
    base = ctypes.addressof(storage)
    base += -base % _ALIGNMENT
    ctypes.memmove(base, launch.params, len(launch.params))
    params = memoryview((ctypes.c_char * len(launch.params)).from_address(base)).cast("B")
    patches = [_patch(params, run) for run in _neighbours(launch.pointers)]
    maps = [(row[0], row[1], row[2], _encoder(driver, row)) for row in launch.tensor_maps]
    config, attributes = _config(launch)
    used = config.num_attributes
    arguments = (ctypes.c_void_p * 1)(base)
    where = ctypes.addressof(config), handle, ctypes.addressof(arguments), None
    start = driver.cuLaunchKernelEx

    def run(operands: Sequence[int], stream: int, keep: Any = (storage, attributes, arguments)) -> None:
        for patch in patches:
            patch(operands)
        for offset, operand, byte_offset, encoded in maps:
            params[offset : offset + MAP_BYTES] = encoded(operands[operand] + byte_offset)
        config.stream = stream or None
        if launch.overlap:  # the last attribute
            config.num_attributes = used - is_captured(driver, stream)
        if status := start(*where):
            _check("cuLaunchKernelEx", status)

    return run


def _config(launch: FlatLaunch) -> tuple[LaunchConfig, Any]:
    attributes = (LaunchAttribute * 2)()
    used = 0
    if launch.cluster > 1:
        attributes[used].id = CLUSTER
        attributes[used].value[0:3] = [launch.cluster, 1, 1]
        used += 1
    if launch.overlap:
        attributes[used].id = OVERLAP
        attributes[used].value[0] = 1
        used += 1
    sizes = (ctypes.c_uint * 3)(launch.grid, 1, 1), (ctypes.c_uint * 3)(launch.block, 1, 1)
    return LaunchConfig(*sizes, launch.shared_bytes, None, attributes, used), attributes


def _neighbours(pointers: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Pointers grouped into runs that lie side by side in the struct."""
    runs: list[list[tuple[int, int, int]]] = []
    for pointer in sorted(pointers):
        if runs and runs[-1][-1][0] + 8 == pointer[0]:
            runs[-1].append(pointer)
        else:
            runs.append([pointer])
    return runs


def _patch(params: memoryview, run: Sequence[tuple[int, int, int]]) -> Callable[[Sequence[int]], None]:
    """Writes one run of addresses."""
    offset, numbers, shifts = run[0][0], [row[1] for row in run], [row[2] for row in run]
    pack = partial(struct.Struct(f"<{len(run)}Q").pack_into, params, offset)
    if any(shifts):
        return lambda operands: pack(*[operands[i] + shift for i, shift in zip(numbers, shifts, strict=True)])
    if len(numbers) == 1:
        return lambda operands: pack(operands[numbers[0]])
    pick = itemgetter(*numbers)
    return lambda operands: pack(*pick(operands))


def _encoder(driver: Any, row: Sequence[int]) -> Callable[[int], bytes]:
    """Tensor maps by address; an allocator hands out the same few addresses again and again."""
    known: dict[int, bytes] = {}
    _, _, _, dtype, rank, swizzle, l2_promotion, *rest = row
    dims, strides = ((ctypes.c_uint64 * 5)(*rest[i : i + 5]) for i in (0, 5))
    box, ones = (ctypes.c_uint32 * 5)(*rest[10:15]), (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1)

    def encoded(address: int) -> bytes:
        found = known.get(address)
        if found is None:
            storage = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
            base = ctypes.addressof(storage)
            base += -base % _ALIGNMENT
            where = ctypes.c_void_p(base), dtype, rank, ctypes.c_void_p(address)
            options = 0, swizzle, l2_promotion, 0
            _check("cuTensorMapEncodeTiled", driver.cuTensorMapEncodeTiled(*where, dims, strides, box, ones, *options))
            if len(known) >= _MAPS_LIMIT:
                known.clear()
            found = known[address] = ctypes.string_at(base, MAP_BYTES)
        return found

    return encoded


def _check(call: str, code: int) -> None:
    if code:
        raise CuflashError(f"{call} returned {code}")
