"""Tensor maps: the 128-byte descriptors from which Hopper's copy engine finds its way through a strided array."""

from __future__ import annotations

import ctypes

from cuflash.driver import check, libcuda
from cuflash.plan import TensorMapSlot

__all__ = ["encode"]

# Values of the driver's enums CUtensorMapDataType, ...Interleave, ...Swizzle, ...L2promotion, ...FloatOOBfill.
_DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


def encode(slot: TensorMapSlot, address: int) -> bytes:
    """The descriptor of one box over one array; 1 to 2 microseconds.

    Raises:
        DeviceError: the driver refused the shape (strides and address must be multiples of 16 bytes).
    """
    rank = len(slot.dims)
    storage = (ctypes.c_uint64 * 24)()  # 128 bytes plus room to align to 64
    base = ctypes.addressof(storage)
    aligned = (base + 63) & ~63
    dims = (ctypes.c_uint64 * rank)(*slot.dims)
    strides = (ctypes.c_uint64 * max(rank - 1, 1))(*slot.strides_bytes)
    box = (ctypes.c_uint32 * rank)(*slot.box)
    steps = (ctypes.c_uint32 * rank)(*([1] * rank))
    status = libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        ctypes.c_int(_DTYPES[slot.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        dims,
        strides,
        box,
        steps,
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLES[slot.swizzle]),
        ctypes.c_int(_L2_PROMOTIONS[slot.l2_promotion]),
        ctypes.c_int(0),
    )
    check(f"tensor map of {slot.operand}", status)
    return ctypes.string_at(aligned, 128)
