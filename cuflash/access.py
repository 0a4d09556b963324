"""How wide one memory access may be, given where arrays start and how far apart their rows lie."""

from __future__ import annotations

from collections.abc import Iterable

from cuflash.problem import ArraySpec

__all__ = ["copy_bytes", "store_bytes"]

WIDTHS = (16, 8, 4)  # bytes


def copy_bytes(specs: Iterable[ArraySpec], itemsize: int) -> int:
    """Widest access that suits every row of every array; one element where the last axis is not contiguous.

    A row may hold fewer elements than a whole number of accesses: a copy reads only the valid bytes of the last one.
    """
    return min((_width(spec, itemsize, ()) for spec in specs), default=WIDTHS[0])


def store_bytes(spec: ArraySpec, itemsize: int) -> int:
    """As ``copy_bytes``, and a row is a whole number of accesses: a store must not touch what lies behind the row."""
    return _width(spec, itemsize, (spec.shape[-1] * itemsize,))


def _width(spec: ArraySpec, itemsize: int, also: tuple[int, ...]) -> int:
    *outer, last = zip(spec.shape, spec.strides, strict=True)
    if last[0] > 1 and last[1] != 1:
        return itemsize
    steps = (spec.alignment, *also, *(stride * itemsize for extent, stride in outer if extent > 1))
    return next((width for width in WIDTHS if width >= itemsize and not any(s % width for s in steps)), itemsize)
