"""``torch.nn.functional.scaled_dot_product_attention`` by its own signature and alignment, on cuflash's kernels."""

from __future__ import annotations

import math
from typing import Any

from cuflash.errors import ArgumentError, UnsupportedError

__all__ = ["scaled_dot_product_attention"]

_ELSEWHERE = "use torch.nn.functional.scaled_dot_product_attention for it"


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Drop-in for torch's function, laid out as there.

    Args:
        query: [..., num_q_heads, seqlen_q, head_dim]; any number of leading axes, any strides.
        key, value: [..., num_kv_heads, seqlen_k, head_dim]; fewer heads than query only with ``enable_gqa``.
        is_causal: query i sees key j when j <= i (top-left, unlike ``cuflash.flash_attention``).

    Raises:
        UnsupportedError: attn_mask, or dropout_p other than 0.
    """
    from cuflash.attention import flash_attention

    if attn_mask is not None:
        raise UnsupportedError("attn_mask", type(attn_mask).__name__, "has no kernel yet", _ELSEWHERE)
    if dropout_p:
        raise UnsupportedError("dropout_p", dropout_p, "has no kernel yet", _ELSEWHERE)
    if query.is_nested:
        raise UnsupportedError("query", "a nested tensor", "has no kernel yet", _ELSEWHERE)
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ArgumentError("query.shape", tuple(query.shape), "must have at least two axes")
    lead = query.shape[:-3]
    q, k, v = (_four_axes(name, x, lead) for name, x in (("query", query), ("key", key), ("value", value)))
    if q.shape[1] != k.shape[1] and not enable_gqa:
        rule = f"must equal query's {q.shape[1]} heads unless enable_gqa=True"
        raise ArgumentError("key.shape", tuple(key.shape), rule)
    out = flash_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale, causal=is_causal, align="top-left"
    )
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


def _four_axes(name: str, tensor: Any, lead: Any) -> Any:
    """[..., heads, rows, dim] -> [batch, heads, rows, dim]; two axes are one head."""
    if tensor.shape[:-3] != lead:
        raise ArgumentError(f"{name}.shape", tuple(tensor.shape), f"must have query's leading axes {tuple(lead)}")
    heads = tensor.shape[-3] if tensor.dim() > 2 else 1
    return tensor.reshape(math.prod(lead), heads, *tensor.shape[-2:])
