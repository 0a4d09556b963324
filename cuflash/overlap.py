"""Whether two strided arrays share a byte: exact, from addresses alone, whatever memory they are in."""

from __future__ import annotations

import numpy as np

__all__ = ["shares_memory"]

Extent = tuple[int, tuple[int, ...], tuple[int, ...], int]  # address, shape, strides in bytes, item size in bytes
_EFFORT = 10**6  # steps of the exact search before the safe answer is given


class _Shell:
    """An address dressed as a NumPy array; never dereferenced."""

    def __init__(self, extent: Extent) -> None:
        address, shape, strides, itemsize = extent
        self.__array_interface__ = {
            "data": (address, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "version": 3,
        }


def shares_memory(one: Extent, other: Extent) -> bool:
    """True if any byte belongs to both; also True when deciding would take too long."""
    a, b = np.asarray(_Shell(one)), np.asarray(_Shell(other))
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=_EFFORT)  # type: ignore[arg-type]  # any effort is allowed
    except np.exceptions.TooHardError:
        return True
