"""Reported fault: query heads tiled over key heads (0, 1, 0, 1) instead of repeated (0, 0, 1, 1)."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import normal
from places import Place

from cuflash.errors import ArgumentError
from cuflash.problem import Problem, spec_of_contiguous


@pytest.mark.parametrize(
    ("kv_heads", "reads"), [(2, (0, 0, 1, 1)), (2, (0, 0, 0, 1, 1, 1)), (3, (0, 0, 1, 1, 2, 2))], ids=str
)
def test_query_heads_read_their_own_group(device: Place, kv_heads: int, reads: tuple[int, ...]) -> None:
    v = np.broadcast_to(np.arange(kv_heads, dtype=np.float32)[:, None], (1, 5, kv_heads, 32)).copy()
    q, k = (normal((1, 5, heads, 32), "float32", heads) for heads in (len(reads), kv_heads))
    found = device.forward({"q": q, "k": k, "v": v})
    np.testing.assert_allclose(found["out"], np.broadcast_to(np.array(reads)[:, None], q.shape), atol=1e-6)


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k = (spec_of_contiguous((1, 5, heads, 32), "float32") for heads in (5, 2))
    with pytest.raises(ArgumentError, match="num_q_heads=5"):
        Problem.forward(q, k, k)
