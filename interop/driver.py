"""The launcher's twin in Python: the same words, executed through the CUDA driver with ctypes. Needs no compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from cuflash.errors import CuflashError
from cuflash.interop.words import MAP_BYTES, FlatLaunch, FlatPlan, decode

__all__ = ["LaunchConfig", "PythonLauncher"]

_CLUSTER, _OVERLAP = 4, 6  # CU_LAUNCH_ATTRIBUTE_*
_L2_PROMOTION_256B = 3
_ALIGNMENT = 64  # bytes; what a tensor map asks of its place among the parameters


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int32), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


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
    library.cuLaunchKernelEx.argtypes = [ctypes.POINTER(LaunchConfig), *[ctypes.c_void_p] * 3]
    return library


class PythonLauncher:
    """Executes words with ctypes. Decoded plans are kept by their bytes, so a repeated call decodes nothing."""

    name = "python"

    def __init__(self, driver: Any = None) -> None:
        self._driver = driver
        self._handles: dict[tuple[int, int], int] = {}

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
        """Queues the launches of the plan whose words these bytes are."""
        plan = _decoded(words)
        if plan.num_operands != len(operands):
            raise CuflashError(f"the plan names {plan.num_operands} operands and the call brings {len(operands)}")
        if device < 0:
            ordinal = ctypes.c_int()
            self._check("cuCtxGetDevice", self.driver.cuCtxGetDevice(ctypes.byref(ordinal)))
            device = ordinal.value
        else:
            self._ensure_context(device)
        if plan.cleared_words:
            where, queue = ctypes.c_void_p(operands[-1]), ctypes.c_void_p(stream)
            rc = self.driver.cuMemsetD32Async(where, 0, ctypes.c_size_t(plan.cleared_words), queue)
            self._check("cuMemsetD32Async", rc)
        for launch in plan.launches:
            handle = self._handles.get((launch.key, device))
            if handle is None:
                raise CuflashError(
                    f"kernel {launch.key:016x} is not loaded on device {device} of this process; trace the same call "
                    "once (jax.eval_shape is enough) before running a deserialised program"
                )
            self._launch(launch, handle, operands, stream)

    def _ensure_context(self, device: int) -> None:
        """A thread that has made no call of the CUDA runtime has no context, and memory from a pool needs none."""
        context = ctypes.c_void_p()
        if self.driver.cuCtxGetCurrent(ctypes.byref(context)) or not context:
            self._check("cuDevicePrimaryCtxRetain", self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            self._check("cuCtxSetCurrent", self.driver.cuCtxSetCurrent(context))

    def _launch(self, launch: FlatLaunch, handle: int, operands: Sequence[int], stream: int) -> None:
        storage = ctypes.create_string_buffer(len(launch.params) + _ALIGNMENT)
        base = ctypes.addressof(storage)
        base += -base % _ALIGNMENT
        ctypes.memmove(base, launch.params, len(launch.params))
        for offset, operand, byte_offset in launch.pointers:
            ctypes.c_uint64.from_address(base + offset).value = operands[operand] + byte_offset
        for row in launch.tensor_maps:
            self._encode(base, row, operands)
        attributes = (LaunchAttribute * 2)()
        used = 0
        if launch.cluster > 1:
            attributes[used].id = _CLUSTER
            attributes[used].value[0:3] = [launch.cluster, 1, 1]
            used += 1
        if launch.overlap:
            attributes[used].id = _OVERLAP
            attributes[used].value[0] = 1
            used += 1
        sizes = (ctypes.c_uint * 3)(launch.grid, 1, 1), (ctypes.c_uint * 3)(launch.block, 1, 1)
        config = LaunchConfig(*sizes, launch.shared_bytes, stream or None, attributes, used)
        arguments = (ctypes.c_void_p * 1)(base)
        rc = self.driver.cuLaunchKernelEx(ctypes.byref(config), handle, ctypes.addressof(arguments), None)
        self._check("cuLaunchKernelEx", rc)

    def _encode(self, base: int, row: Sequence[int], operands: Sequence[int]) -> None:
        offset, operand, byte_offset, dtype, rank, swizzle, *rest = row
        dims, strides = ((ctypes.c_uint64 * 5)(*rest[i : i + 5]) for i in (0, 5))
        box, ones = (ctypes.c_uint32 * 5)(*rest[10:15]), (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1)
        address = ctypes.c_void_p(operands[operand] + byte_offset)
        place = (ctypes.c_char * MAP_BYTES).from_address(base + offset)
        rc = self.driver.cuTensorMapEncodeTiled(
            place, dtype, rank, address, dims, strides, box, ones, 0, swizzle, _L2_PROMOTION_256B, 0
        )
        self._check("cuTensorMapEncodeTiled", rc)

    @staticmethod
    def _check(call: str, code: int) -> None:
        if code:
            raise CuflashError(f"{call} returned {code}")


@lru_cache(maxsize=1024)
def _decoded(words: bytes) -> FlatPlan:
    try:
        return decode(np.frombuffer(words, np.int64).tolist())
    except ValueError as error:
        raise CuflashError(str(error)) from error
