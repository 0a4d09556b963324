"""Which keys a query sees. Twin of cuda_src/attention/masks: each class names its CUDA half and packs its parameters.

A mask never holds an array of seqlen_q x seqlen_k: it is a rule on positions. Query i stands at key position
``i + shift``; shift is ``seqlen_k - seqlen_q`` when the last query meets the last key (``align="bottom-right"``, as in
flash-attn) and 0 when the first meets the first (``align="top-left"``, as in torch and JAX).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cuflash.errors import ArgumentError, ArgumentTypeError

__all__ = ["ALIGNMENTS", "MASKS", "Causal", "Full", "Mask", "SlidingWindow", "mask_from_keywords", "shift_of"]

ALIGNMENTS = ("bottom-right", "top-left")
_FAR = 2**30  # positions; farther from key 0 than any query or key is


@dataclass(frozen=True)
class Mask:
    """Base of the masks: a rule on positions, a CUDA type of the same name and its parameters."""

    header: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ("shift",)

    @property
    def cuda(self) -> str:
        """Spelling of the CUDA half."""
        return f"cuflash::{type(self).__name__}"

    @property
    def short(self) -> str:
        """Name in a kernel's symbol."""
        return self.header

    @property
    def left(self) -> int | None:
        """Keys visible before a query's own position; None when unbounded."""
        return None

    @property
    def right(self) -> int | None:
        """Keys visible after a query's own position; None when unbounded."""
        return None

    def params_dtype(self) -> np.dtype[Any]:
        """Layout of ``Params`` in the CUDA half."""
        return np.dtype([(name, np.int32) for name in self.fields], align=True)

    def params(self, shift: int) -> tuple[int, ...]:
        """Values of ``Params``, in the order of the fields."""
        return (shift,)

    def edges(self, shift: int) -> tuple[int | None, int | None]:
        """First and last key that query 0 sees, and query i the i-th after them; None when unbounded.

        No farther from key 0 than any position is: 32-bit sums with a position do not wrap.
        """
        first = None if self.left is None else max(shift - self.left, -_FAR)
        last = None if self.right is None else min(shift + self.right, _FAR)
        return first, last

    def keeps(self, q: Any, k: Any, shift: int) -> Any:
        """Whether query position ``q`` sees key position ``k``; integers or arrays that broadcast."""
        keep = (q == q) & (k == k)
        first, last = self.edges(shift)
        if first is not None:
            keep = keep & (k >= q + first)
        if last is not None:
            keep = keep & (k <= q + last)
        return keep

    def visible_pairs(self, seqlen_q: int, seqlen_k: int, shift: int) -> int:
        """Number of (query, key) pairs that are visible: the work that a kernel cannot skip."""
        left, right = self.edges(shift)
        first = np.zeros(seqlen_q, np.int64) if left is None else np.arange(seqlen_q) + left
        last = np.full(seqlen_q, seqlen_k) if right is None else np.arange(seqlen_q) + right + 1
        return int(np.maximum(np.minimum(last, seqlen_k) - np.maximum(first, 0), 0).sum())


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    header: ClassVar[str] = "full"


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees key j when j <= i + shift."""

    header: ClassVar[str] = "causal"

    @property
    def right(self) -> int | None:
        return 0


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query i sees key j when i + shift - before <= j <= i + shift + after; both bounds inclusive, None = open.

    A window of W keys that ends at the query is ``SlidingWindow(W - 1, 0)``.
    """

    before: int | None
    after: int | None
    header: ClassVar[str] = "sliding_window"
    fields: ClassVar[tuple[str, ...]] = ("shift", "left", "right")

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            bound = getattr(self, name)
            _check_bound(name, bound, bound)
            object.__setattr__(self, name, None if bound is None else int(bound))

    @property
    def left(self) -> int | None:
        return self.before

    @property
    def right(self) -> int | None:
        return self.after

    def params(self, shift: int) -> tuple[int, ...]:
        first, last = self.edges(shift)
        return (shift, shift - (-_FAR if first is None else first), (_FAR if last is None else last) - shift)


MASKS: tuple[type[Mask], ...] = (Full, Causal, SlidingWindow)


def mask_from_keywords(causal: object, window: object, mask: object) -> Mask:
    """The mask meant by ``causal=``, ``window=`` and ``mask=``.

    Raises:
        ArgumentError, ArgumentTypeError: a value outside the rules, or a mask object beside the keywords.
    """
    if not isinstance(causal, (bool, np.bool_)):
        raise ArgumentTypeError("causal", causal, "must be True or False")
    if mask is not None:
        if not isinstance(mask, Mask) or not hasattr(mask, "header"):
            rule = "must be one of cuflash's masks (" + ", ".join(kind.__name__ for kind in MASKS) + ")"
            raise ArgumentTypeError("mask", mask, rule, "boolean mask arrays are not taken; use a rule on positions")
        if causal or window is not None:
            raise ArgumentError("mask", mask, "cannot be combined with causal= or window=", "give one of them")
        return mask
    if window is None:
        return Causal() if causal else Full()
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentTypeError("window", window, "must be a pair (left, right)", "None leaves a side open")
    for bound in window:
        _check_bound("window", window, bound)
    left, right = window
    if causal:
        right = 0
    if left is None and right is None:
        return Full()
    if left is None and right == 0:
        return Causal()
    return SlidingWindow(left if left is None else int(left), right if right is None else int(right))


def shift_of(align: object, seqlen_q: int, seqlen_k: int) -> int:
    """Key position of query 0; an integer ``align`` is that position itself, for chunks of a longer sequence.

    Raises:
        ArgumentError: an unknown alignment.
    """
    if isinstance(align, (int, np.integer)) and not isinstance(align, (bool, np.bool_)):
        if abs(align) >= _FAR:
            raise ArgumentError("align", align, f"must lie within {_FAR} positions of 0")
        return int(align)
    if not isinstance(align, str) or align not in ALIGNMENTS:
        raise ArgumentError("align", align, f"must be one of {', '.join(ALIGNMENTS)} or an integer")
    return seqlen_k - seqlen_q if align == "bottom-right" else 0


def _check_bound(argument: str, value: object, bound: object) -> None:
    if bound is None:
        return
    if isinstance(bound, (bool, np.bool_)) or not isinstance(bound, (int, np.integer)):
        raise ArgumentTypeError(argument, value, "must hold integers or None")
    if bound < 0:
        raise ArgumentError(argument, value, "must not be negative", "None leaves a side open")
