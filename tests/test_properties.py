"""Properties that hold whatever the values are: symmetries, independence, consistency, repeatability."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import case, dense, normal
from oracle import assert_equal_bits, assert_right, equal_bits, expected
from places import Place

from cuflash import merge_states
from cuflash.check import compare

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
WORDS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}}
MASKS = pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)


def inputs(dtype: str, seed: int = 0, batch: int = 2, seqlen_q: int = 70, seqlen_k: int = 90) -> dict[str, Any]:
    return case(dense(batch, 4, 2, seqlen_q, seqlen_k, 64, dtype=dtype), seed)


@DTYPES
def test_the_order_of_keys_does_not_matter(device: Place, dtype: str) -> None:
    arrays = inputs(dtype, 1)
    order = np.random.default_rng(1).permutation(90)
    shuffled = {name: x[:, order] if name in "kv" else x for name, x in arrays.items()}
    found = device.both(shuffled)
    back = {name: x[:, np.argsort(order)] if name in ("dk", "dv") else x for name, x in found.items()}
    assert_right(back, arrays)


@DTYPES
@MASKS
def test_constant_values_return_themselves(device: Place, dtype: str, words: dict[str, Any]) -> None:
    arrays = inputs(dtype, 2)
    arrays["v"][...] = normal((2, 1, 2, 64), dtype, 3)
    found = device.forward(arrays, **words)
    right = np.repeat(arrays["v"][:, :1], 2, axis=2).astype(np.float64)
    error = np.abs(found["out"].astype(np.float64) - right) / np.maximum(np.abs(right), 1e-3)
    assert error.max() < 2 * {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-20}[dtype]


@DTYPES
@MASKS
def test_lse_is_the_logarithm_of_the_sum(device: Place, dtype: str, words: dict[str, Any]) -> None:
    """Twice the same keys: the same out, and lse greater by ln 2."""
    arrays = inputs(dtype, 3)
    doubled = {**arrays, **{name: np.concatenate([arrays[name]] * 2, axis=1) for name in "kv"}}
    once, twice = device.forward(arrays), device.forward(doubled)
    np.testing.assert_allclose(twice["lse"], once["lse"] + np.log(2), atol=2e-5)
    exact, unfused = expected(arrays), expected(arrays, dtype)
    assert compare("out", twice["out"], exact["out"], unfused["out"]).ok
    if words:  # a window cut at one key: lse is that key's score
        alone = device.forward(arrays, window=(0, 0))
        heads = np.repeat(arrays["k"][:, 20:], 2, axis=2).astype(np.float64)
        scores = (arrays["q"].astype(np.float64) * heads).sum(-1).swapaxes(1, 2) / 8
        np.testing.assert_allclose(alone["lse"], scores, atol=1e-4)


@DTYPES
@MASKS
def test_repeats_bit_for_bit_under_any_schedule(device: Place, dtype: str, words: dict[str, Any]) -> None:
    """Forward and deterministic backward: the order of threads, blocks and copies changes nothing."""
    arrays = inputs(dtype, 4, batch=1)
    first = device.both(arrays, deterministic=True, **words)
    assert_right(first, arrays, **words)
    for seed, options in enumerate(({"race": True}, {"timing": "late"}, {"timing": "eager", "workers": 2}), 20):
        with device.schedule(seed=seed, **options):
            assert_equal_bits(device.both(arrays, deterministic=True, **words), first)
            fast = device.both(arrays, **words)
            assert_right(fast, arrays, **words)
            assert_equal_bits({name: fast[name] for name in ("out", "lse")}, first)


@MASKS
def test_batches_do_not_depend_on_each_other(device: Place, words: dict[str, Any]) -> None:
    arrays = inputs("float16", 5, batch=3)
    words = {**words, "deterministic": True, "batch_invariant": True}
    together = device.both(arrays, **words)
    for batch in range(3):
        alone = device.both({name: x[batch : batch + 1] for name, x in arrays.items()}, **words)
        assert_equal_bits(alone, {name: x[batch : batch + 1] for name, x in together.items()})


def test_heads_do_not_depend_on_each_other(device: Place) -> None:
    arrays = inputs("float16", 6)
    together = device.both(arrays, deterministic=True)
    for kv_head in range(2):
        mine = slice(2 * kv_head, 2 * kv_head + 2)
        chosen = {n: x[:, :, kv_head : kv_head + 1] if n in "kv" else x[:, :, mine] for n, x in arrays.items()}
        alone = device.both(chosen, deterministic=True)
        right = {
            "out": together["out"][:, :, mine],
            "lse": together["lse"][:, mine],
            "dq": together["dq"][:, :, mine],
            **{name: together[name][:, :, kv_head : kv_head + 1] for name in ("dk", "dv")},
        }
        assert_equal_bits(alone, right)


@DTYPES
def test_repeated_key_heads_are_grouped_heads(device: Place, dtype: str) -> None:
    arrays = inputs(dtype, 7)
    repeated = {**arrays, **{name: np.repeat(arrays[name], 2, axis=2) for name in "kv"}}
    grouped, spread = device.both(arrays, deterministic=True), device.both(repeated, deterministic=True)
    assert_right(grouped, arrays)
    if device.same_kernels(arrays, repeated):
        assert_equal_bits({n: grouped[n] for n in ("out", "lse", "dq")}, {n: spread[n] for n in ("out", "lse", "dq")})
    for name in ("dk", "dv"):
        summed = spread[name].astype(np.float64).reshape(2, 90, 2, 2, 64).sum(3)
        np.testing.assert_allclose(grouped[name].astype(np.float64), summed, rtol=2e-2, atol=4e-2)


@DTYPES
def test_halves_merge_to_the_whole(device: Place, dtype: str) -> None:
    arrays = inputs(dtype, 8)
    whole = expected(arrays)
    parts = [device.forward({**arrays, **{n: arrays[n][:, s] for n in "kv"}}) for s in (slice(0, 37), slice(37, 90))]
    out, lse = merge_states(*(part[name] for part in parts for name in ("out", "lse")))
    unfused = expected(arrays, dtype)
    floor = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 0.0}[dtype]  # two roundings of out more than the whole
    deviation = compare("out", out, whole["out"], unfused["out"])
    assert deviation.error <= deviation.budget + floor
    assert compare("lse", lse, whole["lse"], unfused["lse"]).ok


def test_merging_with_nothing_changes_nothing(device: Place) -> None:
    arrays = inputs("float32", 9)
    part = device.forward(arrays)
    nothing = device.forward({**arrays, **{name: arrays[name][:, :0] for name in "kv"}})
    for one, other in ((part, nothing), (nothing, part)):
        out, lse = merge_states(one["out"], one["lse"], other["out"], other["lse"])
        assert np.array_equal(out, part["out"]) and np.array_equal(lse, part["lse"])
    out, lse = merge_states(nothing["out"], nothing["lse"], nothing["out"], nothing["lse"])
    assert (out == 0).all() and np.isneginf(lse).all()


@DTYPES
def test_out_is_linear_in_values_and_gradients_in_the_output_gradient(device: Place, dtype: str) -> None:
    """A factor of two passes through every rounding: twice the bits."""
    arrays = inputs(dtype, 10, batch=1)
    one = device.both(arrays, deterministic=True)
    louder = device.both({**arrays, "v": arrays["v"] * 2, "d_out": arrays["d_out"] / 2}, deterministic=True)
    normal_range = np.abs(one["out"]) > 2.0**-13  # below, float16 rounds to a fixed step
    assert equal_bits(louder["out"][normal_range], one["out"][normal_range] * 2)
    assert equal_bits(louder["lse"], one["lse"])
    assert_right({name: louder[name] for name in ("dq", "dk")}, arrays)
    np.testing.assert_allclose(louder["dv"].astype(np.float64), one["dv"].astype(np.float64) / 2, atol=1e-3)


def test_alignments_agree_on_squares(device: Place) -> None:
    arrays = inputs("float16", 11, seqlen_q=90)
    bottom = device.both(arrays, causal=True, deterministic=True)
    for align in ("top-left", 0):
        assert_equal_bits(bottom, device.both(arrays, causal=True, deterministic=True, align=align))


def test_a_window_wider_than_the_rows_is_no_window(device: Place) -> None:
    arrays = inputs("float16", 12)
    for window in ((90, 90), (10**6, 10**6), (89, 69)):
        assert_right(device.both(arrays, window=window), arrays)


def test_chunks_of_queries_equal_the_whole(device: Place) -> None:
    """An integer ``align`` places a chunk: causal attention, 32 queries at a time."""
    arrays = inputs("float16", 13, seqlen_q=96, seqlen_k=96)
    whole = device.forward(arrays, causal=True)
    for begin in range(0, 96, 32):
        chunk = {**arrays, "q": arrays["q"][:, begin : begin + 32]}
        found = device.forward(chunk, causal=True, align=begin)
        np.testing.assert_allclose(
            found["out"].astype(np.float64), whole["out"][:, begin : begin + 32].astype(np.float64), atol=2e-3
        )
        np.testing.assert_allclose(found["lse"], whole["lse"][..., begin : begin + 32], atol=1e-5)


def test_probabilities_sum_to_one_in_the_value_gradient(device: Place) -> None:
    """The columns of dv sum to those of d_out, and the rows of dq vanish when all keys are equal."""
    arrays = inputs("float32", 14)
    found = device.both(arrays)
    summed = arrays["d_out"].reshape(2, 70, 2, 2, 64).sum((1, 3))
    np.testing.assert_allclose(found["dv"].sum(1), summed, atol=1e-4)
    arrays["k"][...] = arrays["k"][:, :1]
    assert np.abs(device.both(arrays)["dq"]).max() < 1e-5
