"""The emulator's tensor maps: the arguments of cuTensorMapEncodeTiled in 128 bytes, checked as the driver does."""

from __future__ import annotations

import struct

from cuflash.errors import EmulatorError
from cuflash.plan import TensorMapSlot

__all__ = ["encode"]

_MAGIC = 0x50414D54
_DTYPES = {"float16": (0, 2), "bfloat16": (1, 2), "float32": (2, 4)}  # code, bytes an element
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_LAYOUT = struct.Struct("<QIBBBB5I5I4Q40x")  # twin of TensorMapImage in cuda_src/emulator/runtime/hopper_state.h
assert _LAYOUT.size == 128


def encode(slot: TensorMapSlot, address: int) -> bytes:
    """The descriptor of one box over one array that begins at ``address``.

    Raises:
        EmulatorError: the driver would refuse these arguments; says which rule they break.
    """
    rank = len(slot.dims)
    code, itemsize = _DTYPES[slot.dtype]
    inner = slot.box[0] * itemsize
    rules = (
        (1 <= rank <= 5, "rank must be 1 to 5"),
        (len(slot.box) == rank and len(slot.strides_bytes) == rank - 1, "one box side a dimension, one stride less"),
        (address % 16 == 0, f"address {address:#x} must be a multiple of 16"),
        (all(1 <= n <= 2**32 for n in slot.dims), "every dimension must be 1 to 2^32"),
        (all(0 <= s < 2**40 and s % 16 == 0 for s in slot.strides_bytes), "strides must be multiples of 16 below 2^40"),
        (all(1 <= n <= 256 for n in slot.box), "every box side must be 1 to 256"),
        (inner % 16 == 0, f"the box's inner side of {inner} bytes must be a multiple of 16"),
        (
            slot.swizzle == 0 or inner <= slot.swizzle,
            f"the box's inner side of {inner} bytes exceeds the swizzle's span",
        ),
    )
    for holds, rule in rules:
        if not holds:
            raise EmulatorError(
                f"tensor map of {slot.operand}: {rule} (dims {slot.dims}, strides {slot.strides_bytes}, "
                f"box {slot.box}, swizzle {slot.swizzle})"
            )
    dims = [n & 0xFFFFFFFF for n in slot.dims]
    pad = [0] * (5 - rank)
    strides = [*slot.strides_bytes, *[0] * (5 - rank)]
    head = (address, _MAGIC, rank, itemsize, _SWIZZLES[slot.swizzle], code)
    return _LAYOUT.pack(*head, *dims, *pad, *slot.box, *pad, *strides)
