"""An array and a call's options as plain values: what a problem is made of."""

from __future__ import annotations

import math
from typing import NamedTuple

from cuflash.dtypes import DTYPES
from cuflash.masks import Mask
from cuflash.scores import Score

__all__ = ["ArraySpec", "Keywords", "spec_of_contiguous"]


class ArraySpec(NamedTuple):
    """What a plan needs to know of an array: shape, strides in elements, dtype name, alignment of its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = 16  # bytes; the largest power of two up to 16 that divides the address

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Keywords(NamedTuple):
    """The options of a call as the caller wrote them; hashable, so that a plan can be cached by them."""

    scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    mask: Mask | None = None
    score: Score | None = None
    align: str | int = "bottom-right"
    deterministic: bool = False
    batch_invariant: bool = False


def spec_of_contiguous(shape: tuple[int, ...], dtype: str) -> ArraySpec:
    """The spec of a fresh C-contiguous array, aligned as every allocator aligns."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return ArraySpec(shape, tuple(reversed(strides)), dtype, 16)
