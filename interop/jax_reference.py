"""Attention in jax.numpy, memory linear in length: what runs on backends without a kernel, and every higher derivative.

Queries are taken in blocks whose scores fit in a few tens of megabytes; each block is recomputed in reverse mode, so
neither direction ever holds a seqlen_q x seqlen_k array. Arithmetic is float32 whatever the inputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cuflash.interop.jax_axes import vary_like
from cuflash.problem import Problem
from cuflash.scores import Where

__all__ = ["attention", "attention_backward"]

_BLOCK_BYTES = 64 << 20  # scores of one block of queries
_SMALLEST_BLOCK = 16  # rows


def attention(problem: Problem, q: Any, k: Any, v: Any, slopes: Any = None) -> tuple[Any, Any]:
    """``(out, lse)``: [batch, seqlen_q, num_q_heads, head_dim_v] as q and [batch, num_q_heads, seqlen_q] float32."""
    batch, seqlen_q, num_q_heads, _ = q.shape
    seqlen_k, num_kv_heads, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    if 0 in (batch, seqlen_q, num_q_heads, seqlen_k):
        out = jnp.zeros((batch, seqlen_q, num_q_heads, head_dim_v), q.dtype)
        lse = jnp.full((batch, num_q_heads, seqlen_q), -jnp.inf, jnp.float32)
        return vary_like((out, lse), (q, k, v))
    seen = _seen_keys(problem, seqlen_q, seqlen_k)[None, :, None, None]
    # [batch, kv head, key, dim]; a key that no query sees may hold NaN, and 0 * NaN is NaN
    k, v = (jnp.where(seen, x, 0).astype(jnp.float32).transpose(0, 2, 1, 3) for x in (k, v))
    groups = num_q_heads // num_kv_heads
    rows = _block_rows(batch * num_q_heads * seqlen_k, seqlen_q)
    blocks = -(-seqlen_q // rows)
    q = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, blocks * rows - seqlen_q), (0, 0), (0, 0)))
    # [block, batch, kv head, query head in group, row, dim]
    q = q.reshape(batch, blocks, rows, num_kv_heads, groups, -1).transpose(1, 0, 3, 4, 2, 5)
    if slopes is not None:
        slopes = slopes.reshape(*slopes.shape[:-1], num_kv_heads, groups)

    def one_block(first: Any, q_block: Any) -> tuple[Any, Any]:
        return _block(problem, first, q_block, k, v, slopes)

    if blocks == 1:
        out, lse = (x[None] for x in one_block(0, q[0]))
    else:
        body = jax.checkpoint(lambda first, q_block: one_block(first, q_block))
        out, lse = lax.map(lambda xs: body(*xs), (jnp.arange(blocks) * rows, q))
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, blocks * rows, num_q_heads, head_dim_v)[:, :seqlen_q]
    lse = lse.transpose(1, 2, 3, 0, 4).reshape(batch, num_q_heads, blocks * rows)[..., :seqlen_q]
    return out.astype(problem.dtype.numpy), lse


def attention_backward(
    problem: Problem, d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, slopes: Any = None
) -> tuple[Any, ...]:
    """Gradients of q, k, v and, when given, the slopes."""
    primals = (q, k, v) if slopes is None else (q, k, v, slopes)
    (_, lse), pullback = jax.vjp(lambda *arrays: attention(problem, *arrays), *primals)
    (d_lse,) = vary_like((jnp.zeros_like(lse) if d_lse is None else d_lse,), (lse,))
    gradients: tuple[Any, ...] = pullback((d_out, d_lse))
    return gradients


def _block(problem: Problem, first: Any, q: Any, k: Any, v: Any, slopes: Any) -> tuple[Any, Any]:
    """One block of rows against every key: ([batch, kv head, group, row, dim_v], [batch, kv head, group, row])."""
    rows = first + jnp.arange(q.shape[-2])[:, None]
    columns = jnp.arange(k.shape[-2])[None, :]
    keep = problem.mask.keeps(rows, columns, problem.shift) & (rows < problem.seqlen_q)
    raw = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, precision=lax.Precision.HIGHEST) * np.float32(problem.scale)
    operands = {} if slopes is None else {"alibi_slopes": slopes}
    # masked scores are selected away before and after the score function, so that its derivative never meets NaN
    scored = problem.score.apply(jnp.where(keep, raw, 0), Where(rows, columns, problem.shift, operands, jnp))
    logits = jnp.where(keep, scored, -jnp.inf)
    top = lax.stop_gradient(logits.max(-1, keepdims=True))
    base = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.where(keep, jnp.exp(logits - base), 0)
    total = weights.sum(-1, keepdims=True)
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    out = jnp.einsum("bhgqk,bhkd->bhgqd", weights / safe, v, precision=lax.Precision.HIGHEST)
    lse = jnp.where(empty, -jnp.inf, base + jnp.log(safe))[..., 0]
    return jnp.where(empty, 0, out), lse


def _seen_keys(problem: Problem, seqlen_q: int, seqlen_k: int) -> Any:
    """Which keys some query sees: the rows that see key j are an interval. Traced, for custom_partitioning takes no
    array constants."""
    key = jnp.arange(seqlen_k)
    first, last = problem.mask.edges(problem.shift)
    lowest = 0 if last is None else jnp.maximum(key - last, 0)
    highest = seqlen_q - 1 if first is None else jnp.minimum(key - first, seqlen_q - 1)
    return (lowest <= highest) & (key >= 0)


def _block_rows(scores_per_row: int, seqlen_q: int) -> int:
    rows = max(_BLOCK_BYTES // (4 * scores_per_row), _SMALLEST_BLOCK)
    return min(1 << (rows.bit_length() - 1), seqlen_q)
