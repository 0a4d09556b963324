"""Reported faults: a cap by the wrong formula, a cap that is missing from a kernel's key, a backward that hangs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import case, dense
from oracle import assert_equal_bits, assert_right, equal_bits
from places import Place


def spread() -> dict[str, Any]:
    """Scores from -100 to 100 over four queries and nine keys, 20 among them."""
    q, k = np.zeros((1, 4, 1, 64), np.float32), np.zeros((1, 9, 1, 64), np.float32)
    q[0, :, 0, 0] = [8.0, -8.0, 4.0, 1.6]  # scale is 1/8
    k[0, :, 0, 0] = [-100, -50, -20, -5, 0, 5, 20, 50, 100]
    rng = np.random.default_rng(0)
    v, d_out = (rng.standard_normal((1, n, 1, 64)).astype(np.float32) for n in (9, 4))
    return {"q": q, "k": k, "v": v, "d_out": d_out}


def test_four_caps_in_one_process(device: Place) -> None:
    arrays = spread()
    found = [device.both(arrays, softcap=cap, deterministic=True) for cap in (0, 15.0, 30.0, 15.0)]
    for cap, results in zip((None, 15.0, 30.0, 15.0), found, strict=True):
        assert_right(results, arrays, softcap=cap)
    assert_equal_bits(found[1], found[3])
    assert not equal_bits(found[1]["lse"], found[2]["lse"])


def test_a_score_of_20_under_a_cap_of_15(device: Place) -> None:
    """15 tanh(20 / 15) = 13.0509, and its derivative 1 - tanh^2 = 0.24299."""
    q = np.zeros((1, 1, 1, 64), np.float32)
    k = np.zeros((1, 2, 1, 64), np.float32)
    v = np.zeros((1, 2, 1, 64), np.float32)
    q[..., 0], k[0, 0, 0, 0], v[0, 0, 0, 0] = 1.0, 160.0, 1.0
    d_lse = np.ones((1, 1, 1), np.float32)
    arrays = {"q": q, "k": k[:, :1], "v": v[:, :1], "d_out": np.zeros_like(q), "d_lse": d_lse}
    found = device.both(arrays, softcap=15.0)
    assert found["lse"].item() == pytest.approx(13.0509, abs=1e-4)
    # dlse/dk = p * factor * scale * q, and p is 1 for a single key
    assert found["dk"][0, 0, 0, 0] * 8 == pytest.approx(0.24299, abs=1e-4)


def test_the_cap_comes_before_the_mask(device: Place) -> None:
    arrays = spread()
    found = device.both(arrays, softcap=15.0, causal=True, align="top-left")
    assert_right(found, arrays, softcap=15.0, causal=True, align="top-left")
    assert (found["dk"][:, 4:] == 0).all() and (found["dv"][:, 4:] == 0).all()


@pytest.mark.timeout(60)
@pytest.mark.exhaustive
def test_causal_backward_with_a_cap_returns(gpu: Place) -> None:
    """Also on many heads: gradients are right in the first and the last of them."""
    arrays = case(dense(2, 32, 32, 1024, 1024, 128), 1)
    found = gpu.both(arrays, causal=True, softcap=10.0)
    assert all(np.isfinite(array.astype(np.float32)).all() for array in found.values())
    for head in (0, 31):
        one = {name: x[:, :, head : head + 1] for name, x in arrays.items()}
        part = {name: found[name][:, :, head : head + 1] for name in ("out", "dq", "dk", "dv")}
        assert_right(part, one, causal=True, softcap=10.0)


@pytest.mark.timeout(60)
def test_a_small_causal_backward_with_a_cap_returns(device: Place) -> None:
    arrays = case(dense(1, 2, 2, 150, 150, 128), 2)
    assert_right(device.both(arrays, causal=True, softcap=10.0), arrays, causal=True, softcap=10.0)


@pytest.mark.parametrize(("cap", "dtype"), [(50.0, "bfloat16"), (1e-3, "float32")])
def test_scores_far_beyond_the_cap(device: Place, cap: float, dtype: str) -> None:
    """tanh as a quotient of exponentials is inf / inf once |score / cap| passes 88; here it reaches 10^8."""
    arrays = case(dense(1, 2, 1, 40, 40, 64, dtype=dtype), 5, std=100.0)
    found = device.both(arrays, softcap=cap, causal=True)
    assert all(np.isfinite(array).all() for array in found.values())
    assert_right(found, arrays, softcap=cap, causal=True)
