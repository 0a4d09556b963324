"""From the public keywords to a score function. Their order: softcap, then ALiBi (as in flash-attn)."""

from __future__ import annotations

from cuflash.errors import ArgumentError
from cuflash.numeric import finite_number
from cuflash.scores import OFF, Alibi, Identity, Scaled, Score, Softcap, Then, score_of_keyword

__all__ = ["score_from_keywords", "softcap_of_keyword"]


def score_from_keywords(scale: float, softcap: object, has_alibi: bool, score: object) -> Score:
    """The score function meant by ``scale=``, ``softcap=``, ``alibi_slopes=`` and ``score=``.

    Raises:
        ArgumentError, ArgumentTypeError: a value outside the rules, or a score object beside the keywords.
    """
    score = score_of_keyword(score)
    if score is not None:
        if softcap is not None:
            raise ArgumentError("score", score, "cannot be combined with softcap=", "give one of them")
        if has_alibi != ("alibi_slopes" in score.pointers):
            raise ArgumentError("score", score, "takes alibi_slopes= exactly when it contains Alibi")
        return Scaled() if isinstance(score, Identity) and scale <= 0 else score
    cap = softcap_of_keyword(softcap)
    capped = None if cap is None else Softcap(cap)
    if capped and has_alibi:
        return Then(capped, Alibi())
    if has_alibi:
        return Alibi()
    return capped or (Identity() if scale > 0 else Scaled())


def softcap_of_keyword(softcap: object) -> float | None:
    """The cap as a plain number, None where it is off; raises as Softcap does."""
    cap = None if softcap is None else finite_number("softcap", softcap, OFF)
    return Softcap(cap).cap if cap else None
