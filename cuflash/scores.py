"""What happens to a score before the softmax. Twin of cuda_src/attention/scores: same names, same meanings.

A score function receives ``scale * q.k`` in natural units, the query head and the two positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cuflash.errors import ArgumentError, ArgumentTypeError
from cuflash.numeric import positive_number

__all__ = [
    "SCORES",
    "Alibi",
    "Identity",
    "Scaled",
    "Score",
    "Softcap",
    "Then",
    "Where",
    "score_of_keyword",
]

OFF = "None (or 0) turns it off"


@dataclass(frozen=True)
class Where:
    """Where a score stands, for the Python half: positions and operands that broadcast against it."""

    q: Any
    k: Any
    shift: int
    operands: Mapping[str, Any]
    xp: Any = np


@dataclass(frozen=True)
class Score:
    """Base of the score functions."""

    header: ClassVar[str]
    pre_scale: ClassVar[bool] = True  # apply() wants scale * dot; Identity folds the scale into the exponent instead
    pointers: ClassVar[tuple[str, ...]] = ()  # operands whose address stands in Params

    @property
    def cuda(self) -> str:
        """Spelling of the CUDA half."""
        return f"cuflash::{type(self).__name__}"

    @property
    def headers(self) -> tuple[str, ...]:
        """Files of cuda_src/attention/scores that the CUDA half needs."""
        return (self.header,)

    @property
    def short(self) -> str:
        """Name in a kernel's symbol; empty for the plain score."""
        return self.header

    def params_dtype(self) -> np.dtype[Any]:
        """Layout of ``Params`` in the CUDA half."""
        return np.dtype([("unused", np.int32)], align=True)

    def params(self, shift: int, strides: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
        """Values of ``Params``; pointers are 0 here and patched by whoever executes the plan."""
        return (0,)

    def operand_offsets(self) -> dict[str, int]:
        """Byte offset of each pointer inside ``Params``."""
        return {}

    def apply(self, score: Any, where: Where) -> Any:
        """The score that enters the softmax."""
        return score

    def derivative(self, score: Any, where: Where) -> Any:
        """d apply / d score at the score that entered ``apply``."""
        return where.xp.ones_like(score)


@dataclass(frozen=True)
class Identity(Score):
    """The plain score, for a positive scale: the scale is folded into the exponent."""

    header: ClassVar[str] = "identity"
    pre_scale: ClassVar[bool] = False

    @property
    def short(self) -> str:
        return ""


@dataclass(frozen=True)
class Scaled(Score):
    """The plain score for a scale that is zero or negative: folding would turn the maximum into a minimum."""

    header: ClassVar[str] = "scaled"


@dataclass(frozen=True)
class Softcap(Score):
    """cap * tanh(score / cap), the soft limit of Gemma 2."""

    cap: float
    header: ClassVar[str] = "softcap"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cap", positive_number("softcap", self.cap, OFF))

    def params_dtype(self) -> np.dtype[Any]:
        return np.dtype([("cap", np.float32), ("inverse_cap", np.float32)], align=True)

    def params(self, shift: int, strides: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
        return (self.cap, 1.0 / self.cap)

    def apply(self, score: Any, where: Where) -> Any:
        return self.cap * where.xp.tanh(score / self.cap)

    def derivative(self, score: Any, where: Where) -> Any:
        return 1 - where.xp.tanh(score / self.cap) ** 2


@dataclass(frozen=True)
class Alibi(Score):
    """score - slope * |i + shift - j| (Press et al. 2022); slopes come from the caller, one a query head."""

    header: ClassVar[str] = "alibi"
    pointers: ClassVar[tuple[str, ...]] = ("alibi_slopes",)

    def params_dtype(self) -> np.dtype[Any]:
        return np.dtype([("slopes", np.uint64), ("batch_stride", np.int64), ("shift", np.int32)], align=True)

    def params(self, shift: int, strides: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
        slopes = strides["alibi_slopes"]
        return (0, slopes[0] if len(slopes) == 2 else 0, shift)

    def operand_offsets(self) -> dict[str, int]:
        return {"alibi_slopes": 0}

    def apply(self, score: Any, where: Where) -> Any:
        slopes = where.operands["alibi_slopes"]
        slopes = slopes.reshape(*slopes.shape, 1, 1)
        return score - slopes * abs(where.q + where.shift - where.k)


@dataclass(frozen=True)
class Then(Score):
    """first, then second."""

    first: Score
    second: Score
    header: ClassVar[str] = "then"

    def __post_init__(self) -> None:
        if score_of_keyword(self.first) is None or score_of_keyword(self.second) is None:
            raise ArgumentTypeError("score", None, "must be a score function on both sides of Then")
        if set(self.first.pointers) & set(self.second.pointers):
            raise ArgumentError("score", self.short, "reads an array twice", "add the slopes up and use one Alibi")

    @property
    def cuda(self) -> str:
        return f"cuflash::Then<{self.first.cuda}, {self.second.cuda}>"

    @property
    def headers(self) -> tuple[str, ...]:
        return (*self.first.headers, *self.second.headers, self.header)

    @property
    def short(self) -> str:
        return f"{self.first.short}_{self.second.short}"

    @property
    def pointers(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.first.pointers + self.second.pointers

    def params_dtype(self) -> np.dtype[Any]:
        fields = [("first", self.first.params_dtype()), ("second", self.second.params_dtype())]
        return np.dtype(fields, align=True)

    def params(self, shift: int, strides: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
        return (self.first.params(shift, strides), self.second.params(shift, strides))

    def operand_offsets(self) -> dict[str, int]:
        fields: Mapping[str, Any] = self.params_dtype().fields or {}
        found = {}
        for name, part in (("first", self.first), ("second", self.second)):
            base = fields[name][1]
            found.update({operand: base + offset for operand, offset in part.operand_offsets().items()})
        return found

    def apply(self, score: Any, where: Where) -> Any:
        return self.second.apply(self.first.apply(score, where), where)

    def derivative(self, score: Any, where: Where) -> Any:
        inner = self.first.apply(score, where)
        return self.second.derivative(inner, where) * self.first.derivative(score, where)


SCORES: tuple[type[Score], ...] = (Identity, Scaled, Softcap, Alibi, Then)


def score_of_keyword(score: object) -> Score | None:
    """The score function that ``score=`` gives.

    Raises:
        ArgumentTypeError: not an object of a class that has a CUDA half.
    """
    if score is None or (isinstance(score, Score) and hasattr(score, "header")):
        return score
    rule = f"must be one of cuflash's score functions ({', '.join(kind.__name__ for kind in SCORES)})"
    raise ArgumentTypeError("score", score, rule)
