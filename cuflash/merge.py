"""Joins two partial attentions over disjoint keys, for sequence parallelism and split keys."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from cuflash.errors import ArgumentError

__all__ = ["merge_states"]


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Attention over the union of two disjoint sets of keys, from the two partial results.

    Args:
        out_a, out_b: [batch, seqlen_q, num_q_heads, head_dim_v], any one array library; float32 keeps the most digits.
        lse_a, lse_b: [batch, num_q_heads, seqlen_q] float32, natural logarithm; -inf marks a row without keys.

    Returns:
        out in the dtype of ``out_a`` and lse in float32. Plain array code: differentiable wherever the library is.

    Raises:
        ArgumentError: the shapes do not belong together.
    """
    for name, value, like in (("out_b", out_b, out_a), ("lse_b", lse_b, lse_a)):
        if value.shape != like.shape:
            raise ArgumentError(f"{name}.shape", tuple(value.shape), f"must be {tuple(like.shape)}")
    batch, seqlen_q, num_q_heads, _ = out_a.shape
    if tuple(lse_a.shape) != (batch, num_q_heads, seqlen_q):
        raise ArgumentError("lse_a.shape", tuple(lse_a.shape), f"must be {(batch, num_q_heads, seqlen_q)}")
    xp = array_namespace(out_a, lse_a, out_b, lse_b)
    top = xp.where(lse_a > lse_b, lse_a, lse_b)
    # A row without keys on either side has top = -inf; 0 keeps the difference below at -inf instead of NaN, in the
    # value and in the derivative.
    base = xp.where(top == -xp.inf, xp.zeros_like(top), top)
    weight_a, weight_b = xp.exp(lse_a - base), xp.exp(lse_b - base)
    total = weight_a + weight_b
    safe = xp.where(total == 0, xp.ones_like(total), total)
    lse = xp.where(total == 0, top, base + xp.log(safe))
    share_a, share_b = (_as_rows(xp, weight / safe) for weight in (weight_a, weight_b))
    out = share_a * xp.astype(out_a, lse.dtype) + share_b * xp.astype(out_b, lse.dtype)
    return xp.astype(out, out_a.dtype), lse


def _as_rows(xp: Any, weight: Any) -> Any:
    return xp.expand_dims(xp.permute_dims(weight, (0, 2, 1)), axis=-1)  # [batch, seqlen_q, num_q_heads, 1]
