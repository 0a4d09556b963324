"""Attention over a piece of a longer sequence, in every array library: what sequence parallelism is built from."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from cuflash.attention import flash_attention
from cuflash.dtypes import dtype_of
from cuflash.errors import ArgumentError, ArgumentTypeError

__all__ = ["attention_chunk"]


def attention_chunk(
    q: Any, k: Any, v: Any, *, q_offset: int = 0, k_offset: int = 0, out_dtype: Any = "float32", **keywords: Any
) -> tuple[Any, Any]:
    """Some queries over some keys of a longer sequence; ``cuflash.merge_states`` joins the pieces.

    Args:
        q, k, v: as in ``cuflash.flash_attention``, of any array library.
        q_offset, k_offset: position of the first query and of the first key in the whole sequence; Python integers.
        out_dtype: dtype of out. The kernels round out to q's dtype; float32 keeps later merges from rounding again.
        keywords: causal, window, scale, softcap, alibi_slopes and others of ``flash_attention``, except align.

    Returns:
        (out, lse), differentiable where the library is; a row without keys has out = 0 and lse = -inf.

    Raises:
        As ``flash_attention``; a traced offset is refused.
    """
    for name, value in (("q_offset", q_offset), ("k_offset", k_offset)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            rule = "must be a Python int: it is part of the plan"
            raise ArgumentTypeError(name, type(value).__name__, rule, "choose between static chunks with lax.switch")
    for name in ("align", "return_lse"):
        if name in keywords:
            raise ArgumentError(name, keywords[name], "is fixed here", "q_offset and k_offset align; lse always comes")
    row = dtype_of("out_dtype", _named(out_dtype))
    out, lse = flash_attention(q, k, v, align=int(q_offset - k_offset), return_lse=True, **keywords)
    xp = array_namespace(out)
    return xp.astype(out, getattr(xp, row.name, None) or row.numpy), lse


def _named(dtype: Any) -> Any:
    """A dtype in any spelling: NumPy's scalar types and short names, jax.numpy's scalar types, torch's dtypes."""
    if isinstance(dtype, str) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        try:
            return np.dtype(dtype)
        except TypeError:  # bfloat16 is no name of NumPy's
            return dtype
    return getattr(dtype, "dtype", dtype)
