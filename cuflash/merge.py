"""Joins two partial attentions over disjoint keys, for sequence parallelism and split keys."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from cuflash.dispatch import library_of
from cuflash.dtypes import DTYPES, dtype_of
from cuflash.errors import ArgumentError, ArgumentTypeError

__all__ = ["merge_states"]


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Attention over the union of two disjoint sets of keys, from the two partial results.

    Args:
        out_a, out_b: [batch, seqlen_q, num_q_heads, head_dim_v], any one array library; float32 keeps the most digits.
        lse_a, lse_b: [batch, num_q_heads, seqlen_q] float32, natural logarithm; -inf marks a row without keys.

    Returns:
        out in the dtype of ``out_a`` and lse in float32. Plain array code: differentiable wherever the library is.

    Raises:
        ArgumentError, ArgumentTypeError: not arrays, or their shapes or dtypes do not belong together.
    """
    _check(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
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
    # A part without keys is chosen away: whatever its out holds, NaN too, zero times it would not be nothing.
    rows_a, rows_b = (
        xp.where(_as_rows(xp, lse_x == -xp.inf), xp.zeros_like(share_a), xp.astype(out_x, lse.dtype))
        for out_x, lse_x in ((out_a, lse_a), (out_b, lse_b))
    )
    return xp.astype(share_a * rows_a + share_b * rows_b, out_a.dtype), lse


def _check(**arrays: Any) -> None:
    for name, array in arrays.items():
        library_of(name, array)
        if getattr(array, "dtype", None) is None or not hasattr(array, "shape"):
            raise ArgumentTypeError(name, type(array).__name__, "must be an array with a shape and a dtype")
        if name.startswith("out"):
            dtype_of(name, array.dtype)
        elif dtype_of(name, array.dtype) is not DTYPES["float32"]:
            raise ArgumentTypeError(f"{name}.dtype", str(array.dtype), "must be float32", "cast it")
    out_a, lse_a, out_b, lse_b = arrays.values()
    if len(out_a.shape) != 4:
        rule = "must have the four axes [batch, seqlen_q, num_q_heads, head_dim_v]"
        raise ArgumentError("out_a.shape", tuple(out_a.shape), rule)
    batch, seqlen_q, num_q_heads, _ = out_a.shape
    rows = (batch, num_q_heads, seqlen_q)
    for name, array, shape in (("out_b", out_b, out_a.shape), ("lse_a", lse_a, rows), ("lse_b", lse_b, rows)):
        if tuple(array.shape) != tuple(shape):
            raise ArgumentError(f"{name}.shape", tuple(array.shape), f"must be {tuple(shape)}")


def _as_rows(xp: Any, weight: Any) -> Any:
    return xp.expand_dims(xp.permute_dims(weight, (0, 2, 1)), axis=-1)  # [batch, seqlen_q, num_q_heads, 1]
