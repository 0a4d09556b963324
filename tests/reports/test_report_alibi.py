"""Reported faults: distances from the wrong end with unequal lengths, slopes made from the local number of heads."""

from __future__ import annotations

import numpy as np
from arrays import case, dense, slopes
from oracle import assert_equal_bits, assert_right
from places import Place


def test_distance_is_from_the_bottom_right_position(device: Place) -> None:
    """Slope ln 2 and equal scores: weights 1/4, 1/2, 1, so out is 10/7, for one query and for the last of three."""
    values = np.broadcast_to(np.arange(3, dtype=np.float32)[:, None, None], (3, 4, 32))[None].copy()
    zeros = np.zeros((1, 3, 4, 32), np.float32)
    alone = {"q": zeros[:, :1], "k": zeros, "v": values, "alibi_slopes": np.full(4, np.log(2), np.float32)}
    np.testing.assert_allclose(device.forward(alone)["out"], 10 / 7, rtol=1e-5)
    together = device.forward({**alone, "q": zeros})
    np.testing.assert_allclose(together["out"][:, -1], 10 / 7, rtol=1e-5)


def test_halves_of_the_heads_equal_the_whole(device: Place) -> None:
    """Eight heads at once and four by four, with slices of the caller's slopes: the same bits."""
    arrays = case(dense(1, 8, 8, 16, 16, 64, dtype="float16"), 1)
    arrays["alibi_slopes"] = slopes(8)
    whole = device.both(arrays, deterministic=True)
    assert_right(whole, arrays)
    for half in (slice(0, 4), slice(4, 8)):
        part = {name: x[half] if name == "alibi_slopes" else x[:, :, half] for name, x in arrays.items()}
        found = device.both(part, deterministic=True)
        right = {name: x[:, half] if name == "lse" else x[:, :, half] for name, x in whole.items()}
        assert_equal_bits(found, right)
