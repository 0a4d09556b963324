"""Reported faults: NaN and infinity out of finite inputs, and NaN that leaks from where nobody looks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from arrays import case, default_scale, dense, normal
from oracle import assert_equal_bits, assert_right, expected
from places import Place


def seeds(first: int) -> Any:
    """500 seeds: the first ten always, the rest on request."""
    rest = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(first + 10, first + 500)]
    return [*range(first, first + 10), *rest]


@pytest.mark.parametrize("seed", seeds(0))
def test_one_query_and_one_key(device: Place, seed: int) -> None:
    """P is exactly 1: out is v bit for bit, dq and dk vanish, dv is d_out."""
    arrays = {name: normal((1, 1, 1, 16), "float16", 3 * seed + i, std=3) for i, name in enumerate("qkv")}
    arrays["d_out"] = np.ones((1, 1, 1, 16), np.float16)
    found = device.both(arrays)
    q, k = (arrays[name].astype(np.float64).ravel() for name in "qk")
    assert_equal_bits({"out": found["out"], "dv": found["dv"]}, {"out": arrays["v"], "dv": arrays["d_out"]})
    assert np.abs(found["dq"]).max() <= 1e-3 and np.abs(found["dk"]).max() <= 1e-3
    assert abs(found["lse"].item() - default_scale(16) * (q @ k)) <= 1e-3


def test_causal_gradients_of_large_logits(device: Place) -> None:
    """Inputs of three standard deviations at head_dim 128; what the gradient buffers held before does not matter."""
    arrays = {name: normal((1, 1024, 1, 128), "float16", i, std=3) for i, name in enumerate("qkv")}
    arrays["d_out"] = normal((1, 1024, 1, 128), "float16", 4)
    found = device.both(arrays, causal=True)  # the place fills every gradient buffer with NaN beforehand
    assert all(np.isfinite(array).all() for array in found.values())
    assert_right(found, arrays, causal=True)


def test_gradient_buffers_of_zeros_and_of_nan_give_the_same(device: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {name: normal((1, 130, 1, 128), "float16", i, std=3) for i, name in enumerate("qkv")}
    arrays["d_out"] = normal((1, 130, 1, 128), "float16", 4)
    poisoned = device.both(arrays, causal=True, deterministic=True)
    backend = device.eager.backend
    empty = backend.empty

    def zeros(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        array = empty(shape, dtype, like)
        array[...] = 0
        return array

    monkeypatch.setattr(backend, "empty", zeros)
    assert_equal_bits(poisoned, device.both(arrays, causal=True, deterministic=True))


@pytest.mark.parametrize("heads", [2, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_all_positions_hold_the_same_huge_value(device: Place, heads: int) -> None:
    """Scores of 8e6, where one float32 step is 0.5: gradients stay finite."""
    arrays = {name: np.full((2, 50, heads, 64), 1000.0, np.float32) for name in "qkv"}
    arrays["d_out"] = normal((2, 50, heads, 64), "float32", 1)
    found = device.both(arrays)
    assert all(np.isfinite(array).all() for array in found.values())
    np.testing.assert_allclose(found["out"], 1000.0, rtol=1e-6)
    assert np.abs(found["dq"]).max() <= 5 and np.abs(found["dk"]).max() <= 5
    mean = np.broadcast_to(arrays["d_out"].mean(1, keepdims=True), found["dv"].shape)
    assert np.abs(found["dv"] - mean).max() <= 0.1 * np.abs(mean).max()


MASKED: dict[str, tuple[dict[str, Any], Any]] = {  # keywords, and which of 130 keys nobody among 64 queries sees
    "causal": ({"causal": True, "align": "top-left"}, np.arange(130) >= 64),
    "causal from 20": ({"causal": True, "align": 20}, np.arange(130) >= 84),
    "window (16, 0)": ({"window": (16, 0)}, np.arange(130) < 50),
    "window (0, 5) top-left": ({"window": (0, 5), "align": "top-left"}, np.arange(130) >= 69),
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("words", "hidden"), MASKED.values(), ids=MASKED)
def test_what_nobody_sees_does_not_leak(device: Place, words: dict[str, Any], hidden: Any, value: float) -> None:
    """Bitwise the run with zeros there, and gradients of exactly zero there: masks select, never multiply."""
    arrays = case(dense(1, 2, 2, 64, 130, 64, dtype="float16"), 1)
    for name in "kv":
        arrays[name][:, hidden] = 0
    clean = device.both(arrays, deterministic=True, **words)
    for name in "kv":
        arrays[name][:, hidden] = value
    found = device.both(arrays, deterministic=True, **words)
    assert_equal_bits(found, clean)
    assert (found["dk"][:, hidden] == 0).all() and (found["dv"][:, hidden] == 0).all()
    fast = device.both(arrays, **words)
    assert all(np.isfinite(array).all() for array in fast.values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_queries_without_keys_do_not_leak(device: Place, value: float) -> None:
    """The transpose of the case above: rows that see no key may hold anything, in q, d_out and d_lse."""
    arrays = case(dense(1, 2, 2, 130, 64, 64, dtype="float16"), 2, d_lse=True)
    arrays["q"][:, :66] = arrays["d_out"][:, :66] = arrays["d_lse"][:, :, :66] = 0
    clean = device.both(arrays, causal=True, deterministic=True)
    arrays["q"][:, :66] = arrays["d_out"][:, :66] = arrays["d_lse"][:, :, :66] = value
    found = device.both(arrays, causal=True, deterministic=True)
    assert_equal_bits(found, clean)
    assert (found["dq"][:, :66] == 0).all() and (found["out"][:, :66] == 0).all()


BEHIND: tuple[dict[str, Any], ...] = ({"causal": True, "align": "top-left"}, {"window": (8, 2), "align": "top-left"})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("words", BEHIND, ids=str)
def test_keys_behind_the_last_query_do_not_leak(device: Place, words: dict[str, Any], dtype: str, value: float) -> None:
    """Keys that no query sees, in one block with keys that are seen: only the rows that pad the queries reach them."""
    arrays = case(dense(1, 2, 2, 33, 40, 64, dtype=dtype), 3)
    clean = device.both(arrays, deterministic=True, **words)
    for name in "kv":
        arrays[name][:, 35:] = value
    found = device.both(arrays, deterministic=True, **words)
    assert_equal_bits(found, clean)
    assert (found["dk"][:, 35:] == 0).all() and (found["dv"][:, 35:] == 0).all()
    fast = device.both(arrays, **words)
    assert all(np.isfinite(array).all() for array in fast.values())


@pytest.mark.parametrize("seqlen_k", [7, 300])
def test_every_score_far_below_zero(device: Place, seqlen_k: int) -> None:
    """Scores of -101368.9: a running maximum that starts at a finite sentinel would call these rows empty."""
    q = np.full((1, 4, 2, 128), 32.0).astype(normal((1,), "bfloat16", 0).dtype)
    k = np.full((1, seqlen_k, 1, 128), -280.0).astype(q.dtype)
    v = normal((1, seqlen_k, 1, 128), "bfloat16", 3)
    found = device.forward({"q": q, "k": k, "v": v})
    mean = v.astype(np.float64).mean(1, keepdims=True)
    np.testing.assert_allclose(found["out"].astype(np.float64), np.broadcast_to(mean, found["out"].shape), atol=1.6e-2)
    lse = -32.0 * 280.0 * 128 * default_scale(128) + math.log(seqlen_k)
    np.testing.assert_allclose(found["lse"], lse, rtol=1e-6)
    if seqlen_k == 7:
        np.testing.assert_allclose(found["lse"], -101368.88, rtol=1e-6)


LENGTHS = [64, 192, 320, 448, 704, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (832, 1088, 640, 768))]


@pytest.mark.parametrize("seqlen", LENGTHS)
def test_very_negative_lse_and_a_half_empty_last_tile(device: Place, seqlen: int) -> None:
    """Scores near -120: a padded column must have P = 0 before exp(0 - lse) overflows."""
    shape = (1, seqlen, 1, 64)
    arrays = {
        "q": normal(shape, "bfloat16", 1, std=0.01, mean=3.873),
        "k": normal(shape, "bfloat16", 2, std=0.01, mean=-3.873),
        "v": normal(shape, "bfloat16", 3),
        "d_out": normal(shape, "bfloat16", 4),
    }
    found = device.both(arrays)
    assert all(np.isfinite(array).all() for array in found.values())
    assert_right(found, arrays)


@pytest.mark.parametrize("seqlen", [1023, 1024, 1025, 1151])
def test_rising_position_term_under_a_causal_mask(device: Place, seqlen: int) -> None:
    """Slope -1: scores rise by i - j up to 1150; the tail tile's masked columns contribute exactly nothing."""
    arrays = {name: normal((1, seqlen, 1, 64), "bfloat16", i) for i, name in enumerate("qkv")}
    arrays["d_out"] = np.full((1, seqlen, 1, 64), 0.01 / (seqlen * 64)).astype(arrays["q"].dtype)
    arrays["alibi_slopes"] = np.array([-1.0], np.float32)
    found = device.both(arrays, causal=True)
    assert all(np.isfinite(array).all() for array in found.values())
    assert_right(found, arrays, causal=True)
    exact = expected(arrays, causal=True)
    assert np.abs(exact["out"][0, 200:, 0] - arrays["v"][0, 0, 0].astype(np.float64)).mean() < 1.0


def test_the_largest_float16_values(device: Place) -> None:
    """Sums of 90 values of 65504 overflow float16; their mean does not."""
    arrays = case(dense(1, 2, 2, 70, 90, 64, dtype="float16"), 4)
    arrays["v"][...] = 65504
    assert (device.forward(arrays)["out"] == 65504).all()
