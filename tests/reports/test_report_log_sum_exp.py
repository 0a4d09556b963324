"""Reported faults: the sign of an empty row's lse, its base, and what merging two partial results gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from arrays import case, dense, stored
from oracle import expected
from places import Place

from cuflash import merge_states, reference
from cuflash.problem import Keywords


def test_rows_without_keys_have_minus_infinity(device: Place) -> None:
    found = device.forward(case(dense(2, 4, 2, 5, 0, 64, dtype="float16")))
    assert np.isneginf(found["lse"]).all() and (found["out"] == 0).all()
    found = device.forward(case(dense(2, 4, 2, 5, 2, 64, dtype="float16")), causal=True)
    assert np.isneginf(found["lse"][..., :3]).all() and np.isfinite(found["lse"][..., 3:]).all()
    assert (found["out"][:, :3] == 0).all() and found["out"][:, 3:].any()


def test_lse_is_a_natural_logarithm(device: Place) -> None:
    """1600 equal keys: ln 1600 = 7.377759 and not log2 1600 = 10.643856."""
    zeros = np.zeros((1, 1600, 1, 64), np.float32)
    v = np.random.default_rng(0).standard_normal(zeros.shape).astype(np.float32)
    whole = device.forward({"q": zeros[:, :1], "k": zeros, "v": v})
    assert whole["lse"].item() == pytest.approx(7.377759, abs=1e-5)
    halves = [device.forward({"q": zeros[:, :1], "k": zeros[:, s], "v": v[:, s]}) for s in HALVES]
    out, lse = merge_states(*(half[name] for half in halves for name in ("out", "lse")))
    np.testing.assert_allclose(out, whole["out"], atol=2e-5)
    np.testing.assert_allclose(lse, whole["lse"], atol=2e-5)


HALVES = (slice(0, 800), slice(800, 1600))


def test_lse_is_natural_with_softcap_and_with_alibi(device: Place) -> None:
    q = k = np.zeros((1, 1600, 1, 64), np.float32)
    capped = device.forward({"q": q[:, :1], "k": k, "v": k}, softcap=30.0)
    assert capped["lse"].item() == pytest.approx(math.log(1600), abs=1e-5)
    slope = np.array([0.01], np.float32)
    tilted = device.forward({"q": q[:, :1], "k": k, "v": k, "alibi_slopes": slope})
    right = math.log(np.exp(-0.01 * np.arange(1600)).sum())
    assert tilted["lse"].item() == pytest.approx(right, abs=2e-5)


def test_lse_has_the_documented_shape(device: Place) -> None:
    """[batch, num_q_heads, seqlen_q], float32, contiguous, whatever the storage of q."""
    arrays = case(dense(2, 3, 3, 70, 65, 64, dtype="float16"))
    arrays["q"] = stored(arrays["q"], "SBHD")
    placed = {name: device.put(arrays[name]) for name in "qkv"}
    _, lse = device.eager.forward(placed, Keywords())
    assert lse.shape == (2, 3, 70) and lse.dtype == np.float32 and lse.flags.c_contiguous
    rows = np.argsort(device.get(lse)[1, 2])
    assert np.array_equal(rows, np.argsort(expected(arrays)["lse"][1, 2]))


def test_pieces_merge_in_any_order() -> None:
    """Nine parts of the keys, shuffled, from scores whose sums differ by e^30; extremes stay in their places."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, rows, 2, 16)).astype(np.float32) for rows in (5, 90, 90))
    k *= np.repeat(rng.uniform(0, 12, 9), 10).astype(np.float32)[None, :, None, None]
    out, lse = reference.attention(q, k, v)
    parts = [reference.attention(q, k[:, i : i + 10], v[:, i : i + 10]) for i in rng.permutation(9) * 10]
    merged = tuple(x.astype(np.float32) for x in parts[0])
    for part in parts[1:]:
        merged = merge_states(*merged, *(x.astype(np.float32) for x in part))
    np.testing.assert_allclose(merged[0], out, atol=1e-5)
    np.testing.assert_allclose(merged[1], lse, rtol=1e-6)


@pytest.mark.parametrize(
    ("one", "other", "share"), [(1e30, -1e30, 1.0), (-1e30, -1e30, 0.5), (-1e5, -np.inf, 1.0), (-np.inf, -np.inf, 0.0)]
)
def test_extreme_sums_merge(one: float, other: float, share: float) -> None:
    """The same either way round, and never NaN."""
    a, b = (np.full((1, 1, 1, 1), value, np.float32) for value in (1, 3))
    lse_a, lse_b = (np.full((1, 1, 1), value, np.float32) for value in (one, other))
    out, lse = merge_states(a, lse_a, b, lse_b)
    assert out.item() == (0.0 if share == 0 else share + 3 * (1 - share))
    np.testing.assert_allclose(lse, max(one, other), rtol=1e-5)
    for found, again in zip(merge_states(b, lse_b, a, lse_a), (out, lse), strict=True):
        np.testing.assert_array_equal(found, again)
