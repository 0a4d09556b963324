"""Small arrays and the comparisons that the tests of the doors use."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import reference
from cuflash.dtypes import DTYPES

Array = np.ndarray[Any, Any]
SHAPE = (2, 33, 40, 4, 2, 16)  # batch, seqlen_q, seqlen_k, num_q_heads, num_kv_heads, head_dim


def sample(dtype: str = "float32", shape: tuple[int, ...] = SHAPE, seed: int = 0) -> dict[str, Array]:
    """q, k, v and d_out with a mean that is not zero; one shape for all, so that one kernel serves many tests."""
    batch, seqlen_q, seqlen_k, num_q_heads, num_kv_heads, head_dim = shape
    rng = np.random.default_rng(seed)
    query, key = (batch, seqlen_q, num_q_heads, head_dim), (batch, seqlen_k, num_kv_heads, head_dim)
    shapes = {"q": query, "k": key, "v": key, "d_out": query}
    kind = DTYPES[dtype].numpy
    return {name: (rng.standard_normal(size) + 0.1).astype(kind) for name, size in shapes.items()}


def exact(arrays: dict[str, Array], **words: Any) -> tuple[Array, ...]:
    """out, lse, dq, dk, dv in float64."""
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    forward = reference.attention(q, k, v, **words)
    return (*forward, *reference.attention_backward(arrays["d_out"].astype(np.float64), q, k, v, **words))


def assert_close(found: Any, wanted: Any, dtype: str = "float32", scale: float = 1.0) -> None:
    """Within a few units of the dtype's last place, relative to the largest element; infinities where they belong."""
    found, wanted = np.asarray(found).astype(np.float64), np.asarray(wanted).astype(np.float64)
    assert found.shape == wanted.shape
    assert np.array_equal(np.isfinite(found), np.isfinite(wanted))
    finite = np.isfinite(wanted)
    if not finite.any():
        return
    error = np.abs(found[finite] - wanted[finite]).max()
    budget = scale * 8 * DTYPES[dtype].roundoff * max(1.0, np.abs(wanted[finite]).max()) + 1e-6
    assert error <= budget, f"error {error:.3g} > {budget:.3g}"
