"""Reported faults: which end a causal mask is aligned to, rows that see nothing, a flag that is ignored or cached."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import case, dense
from oracle import assert_right
from places import Place


def table(seqlen_q: int, seqlen_k: int, first: float) -> dict[str, np.ndarray]:
    """q = k = 0 and v[j] = first + j in every channel: a row's output is the mean of the keys it sees."""
    v = np.arange(first, first + seqlen_k, dtype=np.float32)[None, :, None, None]
    return {
        "q": np.zeros((1, seqlen_q, 1, 64), np.float32),
        "k": np.zeros((1, seqlen_k, 1, 64), np.float32),
        "v": np.broadcast_to(v, (1, seqlen_k, 1, 64)).copy(),
        "d_out": np.ones((1, seqlen_q, 1, 64), np.float32),
    }


@pytest.mark.parametrize(("words", "rows"), [({}, (1.5, 2.0)), ({"align": "top-left"}, (0.0, 0.5))], ids=str)
def test_fewer_queries_than_keys(device: Place, words: dict[str, str], rows: tuple[float, ...]) -> None:
    found = device.forward(table(2, 5, 0), causal=True, **words)
    for row, value in enumerate(rows):
        np.testing.assert_allclose(found["out"][0, row], value, atol=1e-6)


def test_more_queries_than_keys(device: Place) -> None:
    found = device.both(table(5, 2, 1), causal=True)
    assert (found["out"][0, :3] == 0).all() and np.isneginf(found["lse"][0, 0, :3]).all()
    assert (found["dq"][0, :3] == 0).all()
    np.testing.assert_allclose(found["out"][0, 3], 1.0, atol=1e-6)
    np.testing.assert_allclose(found["out"][0, 4], 1.5, atol=1e-6)
    np.testing.assert_allclose(found["lse"][0, 0, 3:], [0.0, np.log(2)], atol=1e-6)


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["causal first", "full first"])
def test_the_flag_is_neither_ignored_nor_cached(device: Place, order: tuple[bool, bool]) -> None:
    arrays = case(dense(1, 2, 2, 256, 256, 64, dtype="float16"), 1)
    found = {causal: device.both(arrays, causal=causal) for causal in order}
    for causal in order:
        assert_right(found[causal], arrays, causal=causal)
    first_key = [found[causal]["dk"][:, 0].astype(np.float64) for causal in order]
    assert np.abs(first_key[0] - first_key[1]).max() > 1e-2
