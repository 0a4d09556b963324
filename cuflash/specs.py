"""An array and a call's options as plain values: what a problem is made of."""

from __future__ import annotations

import math
from typing import NamedTuple

from cuflash.dtypes import DTYPES
from cuflash.errors import ArgumentError
from cuflash.masks import Mask, mask_from_keywords, shift_of
from cuflash.numeric import LARGEST, SMALLEST, finite_number, flag
from cuflash.score_keywords import softcap_of_keyword
from cuflash.scores import Score, score_of_keyword

__all__ = ["ArraySpec", "Keywords", "settled", "spec_of_contiguous"]


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


def settled(words: Keywords) -> Keywords:
    """The same options, checked, as plain Python values: hashable, and with a text that reads back.

    Raises:
        ArgumentError, ArgumentTypeError: names the option, its value and the rule.
    """
    mask_from_keywords(words.causal, words.window, words.mask)
    window = words.window and tuple(None if bound is None else int(bound) for bound in words.window)
    align = words.align if isinstance(words.align, str) else shift_of(words.align, 0, 0)
    shift_of(align, 0, 0)
    return Keywords(
        None if words.scale is None else _scale(words.scale),
        flag("causal", words.causal),
        window,  # type: ignore[arg-type]  # of two, which mask_from_keywords saw to
        softcap_of_keyword(words.softcap),
        words.mask,
        score_of_keyword(words.score),
        align,
        flag("deterministic", words.deterministic),
        flag("batch_invariant", words.batch_invariant),
    )


def _scale(scale: object) -> float:
    """A scale that float32 holds; what is smaller than its smallest normal number makes every score zero."""
    value = finite_number("scale", scale, "None means 1/sqrt(head_dim)")
    if abs(value) > LARGEST:
        raise ArgumentError("scale", scale, f"must be at most {LARGEST:.3g}: scores are float32", "scale q instead")
    return value if abs(value) >= SMALLEST else 0.0
