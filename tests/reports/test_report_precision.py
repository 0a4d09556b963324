"""Reported faults: float32 inputs that silently ran at TF32's ten bits; outliers that cost 16-bit inputs accuracy."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import Array, normal
from oracle import assert_right, expected
from places import Place


def test_float32_is_float32(device: Place) -> None:
    """Mean 0.4, standard deviation 0.2: 2e-6 relative to the largest value, forward and backward."""
    names = ("q", "k", "v", "d_out")
    arrays = {name: normal((1, 256, 2, 64), "float32", seed, 0.2, 0.4) for seed, name in enumerate(names)}
    found = device.both(arrays)
    assert_right(found, arrays)
    exact = expected(arrays)
    for name in ("out", "lse"):
        error = np.abs(found[name] - exact[name]).max() / np.abs(exact[name]).max()
        assert error < 2e-6, (name, error)
    for name in ("dq", "dk", "dv"):
        error = np.abs(found[name] - exact[name]).max() / np.abs(exact[name]).max()
        # dq and dk are differences of nearly equal sums here: their own size is a hundredth of what is summed
        assert error < (2e-6 if name == "dv" else 2e-4), (name, error)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_outliers_cost_no_accuracy(device: Place, dtype: str, causal: bool) -> None:
    """N(0, 1) + N(0, 100) in one of a thousand places: root mean square error near that of a running maximum."""
    arrays = {name: with_outliers((1, 512, 2, 64), dtype, seed) for seed, name in enumerate("qkv")}
    found = device.forward(arrays, causal=causal)["out"]
    exact, rounded = of_running_maximum(arrays, causal)
    assert root_mean_square(found - exact) < 1.15 * root_mean_square(rounded - exact)


def with_outliers(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    outliers = 10 * rng.standard_normal(shape) * (rng.random(shape) < 1e-3)
    return (rng.standard_normal(shape) + outliers).astype(normal((1,), dtype, 0).dtype)


def of_running_maximum(arrays: dict[str, Array], causal: bool) -> tuple[Array, Array]:
    """out in float64, and with probabilities relative to the row's maximum and results rounded to the dtype."""
    q, k, v = (arrays[name].astype(np.float64).transpose(0, 2, 1, 3) for name in "qkv")
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    total, dtype = probs.sum(-1, keepdims=True), arrays["q"].dtype
    exact, rounded = probs @ v / total, probs.astype(dtype).astype(np.float64) @ v / total
    return exact.transpose(0, 2, 1, 3), rounded.astype(dtype).astype(np.float64).transpose(0, 2, 1, 3)


def root_mean_square(error: Array) -> float:
    return float(np.sqrt(np.mean(error.astype(np.float64) ** 2)))
