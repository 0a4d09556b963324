"""``jax.nn.dot_product_attention`` by its own signature, alignment and conventions, on cuflash's kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cuflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError

__all__ = ["dot_product_attention"]

_ELSEWHERE = "use jax.nn.dot_product_attention for it"


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Drop-in for ``jax.nn.dot_product_attention``: equals ``implementation="xla"`` on everything it takes.

    Args:
        query: [batch, seqlen_q, num_q_heads, head_dim], or without batch.
        key, value: [batch, seqlen_k, num_kv_heads, head_dim], or without batch; num_q_heads a multiple of num_kv_heads.
        is_causal: query i sees key j when j <= i (top-left, unlike ``cuflash.flash_attention``).
        local_window_size: (left, right) or one integer for both, around position i.
        return_residual: also return the log-sum-exp [batch, seqlen_q, num_q_heads] in key's dtype, without gradient.

    Raises:
        UnsupportedError: bias, mask, query_seq_lengths, key_value_seq_lengths, or an ``implementation`` asked by name.
    """
    from cuflash.interop.jax import run_forward
    from cuflash.problem import Keywords

    absent = {"bias": bias, "mask": mask}
    absent |= {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    for name, given in absent.items():
        if given is not None:
            raise UnsupportedError(name, type(given).__name__, "has no kernel yet", _ELSEWHERE)
    if implementation is not None:
        raise UnsupportedError("implementation", implementation, "names a backend of JAX's own", _ELSEWHERE)
    given = [jnp.asarray(x) for x in (query, key, value)]
    if any(x.ndim not in (3, 4) for x in given):
        raise ArgumentError("query, key, value", [x.shape for x in given], "must have three axes, or four with a batch")
    q, k, v = (x[None] if x.ndim == 3 else x for x in given)
    if v.shape != k.shape:
        raise ArgumentError("value.shape", v.shape, f"must equal key's {k.shape}", "cuflash.flash_attention takes both")
    window = _window(local_window_size)
    words = Keywords(scale=scale, causal=is_causal, window=window, align="top-left")
    out, lse = run_forward({"q": q, "k": k, "v": v}, words)
    if k.shape[1] and _has_empty_rows(q.shape[1], k.shape[1], window):
        out, lse = _as_xla_leaves_empty_rows(out, lse, v)
    out = out.reshape(given[0].shape)
    if not return_residual:
        return out
    residual = lax.stop_gradient(lse.transpose(0, 2, 1).astype(k.dtype))
    return out, residual.reshape(given[0].shape[:-1])


def _window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else size
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(n, (int, np.integer)) for n in pair):
        kind = "a traced value" if isinstance(size, jax.Array) else size
        raise ArgumentTypeError("local_window_size", kind, "must be an int or a pair of ints")
    return int(pair[0]), int(pair[1])


def _has_empty_rows(seqlen_q: int, seqlen_k: int, window: tuple[int, int] | None) -> bool:
    """Whether the last query's window begins behind the last key; no other option leaves a row without keys."""
    return window is not None and seqlen_q - 1 - window[0] > seqlen_k - 1


def _as_xla_leaves_empty_rows(out: Any, lse: Any, v: Any) -> tuple[Any, Any]:
    """XLA masks with a large finite number, so a row without keys is the mean of all values; cuflash gives 0."""
    groups = out.shape[2] // v.shape[2]
    mean = jnp.repeat(v.astype(jnp.float32).mean(1, keepdims=True), groups, axis=2).astype(out.dtype)
    empty = lse == -jnp.inf
    out = jnp.where(empty.transpose(0, 2, 1)[..., None], mean, out)
    return out, jnp.where(empty, -0.7 * float(jnp.finfo(jnp.float32).max), lse)
