"""Attention the plain way, at any precision: the oracle of every test and of ``cuflash check``.

The scores stand in full here, seqlen_q x seqlen_k: that is what the kernels avoid. ``precision=None`` computes in
float64; a dtype name computes as an unfused program in that dtype would, rounding every intermediate array to it.
Works on NumPy and CuPy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from cuflash.dtypes import DTYPES
from cuflash.masks import Mask, mask_from_keywords, shift_of
from cuflash.problem import Keywords
from cuflash.score_keywords import score_from_keywords
from cuflash.scores import Score, Where

__all__ = ["attention", "attention_backward", "rounded"]


def attention(
    q: Any, k: Any, v: Any, *, alibi_slopes: Any = None, precision: str | None = None, **keywords: Any
) -> tuple[Any, Any]:
    """``(out, lse)`` of exact attention; same keywords as ``cuflash.flash_attention``.

    Args:
        q, k, v: as in ``flash_attention``; [batch, seqlen, heads, head_dim].
        precision: None for float64, or a dtype name for the rounding of an unfused program.

    Returns:
        out [batch, seqlen_q, num_q_heads, head_dim_v] and lse [batch, num_q_heads, seqlen_q], in float64 or float32.
    """
    state = _State.of(q, k, v, alibi_slopes, precision, keywords)
    return state.out(), state.lse


def attention_backward(
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    d_lse: Any = None,
    alibi_slopes: Any = None,
    precision: str | None = None,
    **keywords: Any,
) -> tuple[Any, Any, Any]:
    """``(dq, dk, dv)`` of the forward above, at the same precision; shapes of q, k, v."""
    state = _State.of(q, k, v, alibi_slopes, precision, keywords)
    return state.gradients(d_out, d_lse)


def rounded(x: Any, precision: str | None) -> Any:
    """``x`` rounded to ``precision`` and widened again to the type that the arithmetic runs in."""
    return x if precision is None else x.astype(DTYPES[precision].numpy).astype(np.float32)


@dataclass
class _State:
    """The arrays between forward and backward, all as [batch, kv head, query head in group, row, column]."""

    q: Any
    k: Any
    v: Any
    raw: Any  # scale * q.k
    keep: Any  # [seqlen_q, seqlen_k]
    probs: Any
    lse: Any  # [batch, num_q_heads, seqlen_q]
    score: Score
    where: Where
    scale: float
    precision: str | None

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, slopes: Any, precision: str | None, keywords: dict[str, Any]) -> _State:
        words = Keywords(**{name: value for name, value in keywords.items() if name in Keywords._fields})
        scale = q.shape[-1] ** -0.5 if words.scale is None else float(words.scale)
        mask: Mask = mask_from_keywords(words.causal, words.window, words.mask)
        score = score_from_keywords(scale, words.softcap, slopes is not None, words.score)
        xp = array_namespace(q, k, v)
        work = np.float64 if precision is None else np.float32
        groups = q.shape[2] // max(k.shape[2], 1)
        q, k, v = (_split_heads(x.astype(work), n) for x, n in ((q, groups), (k, 1), (v, 1)))
        shift = shift_of(words.align, q.shape[3], k.shape[3])
        rows, columns = xp.arange(q.shape[3])[:, None], xp.arange(k.shape[3])[None, :]
        keep = mask.keeps(rows, columns, shift) & (rows >= 0)
        operands = {}
        if slopes is not None:
            operands["alibi_slopes"] = slopes.astype(work).reshape(
                *slopes.shape[:-1], slopes.shape[-1] // groups, groups
            )
        where = Where(rows, columns, shift, operands, xp)
        with np.errstate(all="ignore"):
            raw = rounded(scale * rounded(q @ k.swapaxes(-1, -2), precision), precision)
            logits = xp.where(keep, rounded(score.apply(raw, where), precision), -np.inf)
            probs, lse = _softmax(xp, logits, keep, precision)
        return cls(q, k, v, raw, keep, probs, lse, score, where, scale, precision)

    def out(self) -> Any:
        return rounded(_join_heads(_select_product(self.where.xp, self.probs, self.v, self.keep)), self.precision)

    def gradients(self, d_out: Any, d_lse: Any) -> tuple[Any, Any, Any]:
        xp, r = self.where.xp, self.precision
        groups = self.q.shape[2]
        d_out = _split_heads(d_out.astype(self.q.dtype), groups)
        with np.errstate(all="ignore"):
            out = rounded(_select_product(xp, self.probs, self.v, self.keep), r)
            delta = (d_out * out).sum(-1, keepdims=True)
            if d_lse is not None:
                delta = delta - d_lse.astype(delta.dtype).reshape(delta.shape)
            d_probs = rounded(d_out @ self.v.swapaxes(-1, -2), r)
            d_scores = xp.where(self.keep, self.probs * (d_probs - delta), 0)
            d_raw = xp.where(self.keep, d_scores * self.score.derivative(self.raw, self.where), 0)
            d_raw = rounded(d_raw, r)
            dv = (self.probs.swapaxes(-1, -2) @ d_out).sum(2, keepdims=True)
            dq = self.scale * (d_raw @ self.k)
            dk = self.scale * (d_raw.swapaxes(-1, -2) @ self.q).sum(2, keepdims=True)
        return tuple(rounded(_join_heads(x), r) for x in (dq, dk, dv))  # type: ignore[return-value]


def _split_heads(x: Any, groups: int) -> Any:
    """[batch, row, head, dim] -> [batch, kv head, query head in group, row, dim]."""
    batch, rows, heads, dim = x.shape
    return x.reshape(batch, rows, heads // max(groups, 1), groups, dim).transpose(0, 2, 3, 1, 4)


def _join_heads(x: Any) -> Any:
    """The inverse of ``_split_heads``."""
    batch, heads, groups, rows, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, rows, heads * groups, dim)


def _one_head_axis(lse: Any) -> Any:
    """[batch, kv head, group, row] to [batch, query head, row], empty axes included."""
    batch, heads, groups, rows = lse.shape
    return lse.reshape(batch, heads * groups, rows)


def _softmax(xp: Any, logits: Any, keep: Any, precision: str | None) -> tuple[Any, Any]:
    if logits.shape[-1] == 0:
        empty = xp.full(logits.shape[:-1], -np.inf, dtype=logits.dtype)
        return logits, _one_head_axis(empty)
    top = logits.max(-1, keepdims=True)
    base = xp.where(xp.isinf(top) & (top < 0), 0, top)
    weights = xp.where(keep, xp.exp(logits - base), 0)
    total = weights.sum(-1, keepdims=True)
    probs = rounded(weights / xp.where(total == 0, 1, total), precision)
    lse = (base + xp.log(total))[..., 0]
    return probs, _one_head_axis(lse)


def _select_product(xp: Any, probs: Any, v: Any, keep: Any) -> Any:
    """probs @ v in which an invisible value never takes part: 0 * NaN counts as nothing, not as NaN."""
    if bool(xp.isfinite(v).all()):
        return probs @ v
    out = xp.zeros((*probs.shape[:-1], v.shape[-1]), dtype=probs.dtype)
    for column in range(v.shape[-2]):
        part = probs[..., column : column + 1] * v[..., column : column + 1, :]
        out += xp.where(keep[:, column : column + 1], part, 0)
    return out
