"""Reported faults: lengths next to a tile's edge, and pad rows of one head that spill into the next."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import case, dense, stored, untouched_outside
from oracle import assert_right, expected
from places import Place

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 127, 129)


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_lengths_around_tile_edges(device: Place, causal: bool, seqlen: int) -> None:
    """Guard rows of NaN on both sides of every array: never read into a result, never written."""
    plain = case(dense(1, 2, 2, seqlen, seqlen, 64, dtype="float16"), seqlen)
    arrays = {name: stored(array, "guard rows") for name, array in plain.items()}
    words = {"causal": causal, "scale": 0.5}
    assert_right(device.both(arrays, **words), plain, **words)
    assert all(untouched_outside(array) for array in arrays.values())


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(4, 64), (2, 128)])
def test_value_gradients_head_by_head(device: Place, kv_heads: int, head_dim: int) -> None:
    arrays = case(dense(1, 4, kv_heads, 100, 100, head_dim, dtype="float16"), 1)
    found = device.both(arrays)
    assert_right(found, arrays)
    exact, unfused = expected(arrays)["dv"], expected(arrays, "float16")["dv"]
    for head in range(kv_heads):
        error = np.abs(found["dv"][:, :, head] - exact[:, :, head]).max()
        assert error <= 2 * np.abs(unfused[:, :, head] - exact[:, :, head]).max() + 1e-3, head
