"""Special values and extremes: NaN and infinity stay where they are seen, rows without keys give nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from arrays import case, dense, normal
from oracle import assert_right, equal_bits, expected
from places import Place

from cuflash.architectures import Device

FORMS = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_special_values_stay_where_they_are_seen(device: Place, dtype: str, where: str, value: float) -> None:
    """A NaN or infinity in one row reaches the rows that see it, as in the reference, and no other of its block."""
    arrays = {name: normal((1, 70, 2, 64), dtype, seed) for seed, name in enumerate("qkv")}
    row = 40
    arrays[where][0, row, 1] = value
    found, right = device.forward(arrays, causal=True), expected(arrays, causal=True)
    for name in ("out", "lse"):
        assert np.array_equal(np.isnan(found[name]), np.isnan(right[name])), name
    arrays[where][0, row, 1] = 0
    clean = device.forward(arrays, causal=True)
    assert equal_bits(found["out"][:, :, 0], clean["out"][:, :, 0])
    found["out"][:, row:] = clean["out"][:, row:]
    found["lse"][:, :, row:] = clean["lse"][:, :, row:]
    assert_right(found, arrays, causal=True)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 3e38, -1e36], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_huge_values_without_a_mask(device: Place, where: str, value: float) -> None:
    """float32 products are sums of parts, which must not turn an infinite or very large result into NaN."""
    arrays = {name: abs(normal((1, 140, 2, 64), "float32", seed)) for seed, name in enumerate("qkv")}
    arrays[where][0, 100, 1] = 0
    arrays[where][0, 100, 1, 3] = value
    if where != "v" and math.isfinite(value):  # scores of ordinary size
        arrays["k" if where == "q" else "q"][..., 3] *= np.float32(1 / abs(value))
    found, right = device.forward(arrays), expected(arrays)
    for name in ("out", "lse"):
        assert np.array_equal(np.isnan(found[name]), np.isnan(right[name])), name
        assert np.array_equal(np.isinf(found[name]), np.isinf(right[name])), name
    finite = np.isfinite(right["out"])
    assert np.allclose(found["out"][finite], right["out"][finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_large_and_tiny_logits(device: Place, dtype: str) -> None:
    for std, seed in ((10.0, 10), (1e-3, 11)):
        arrays = {name: normal((1, 66, 2, 64), dtype, seed + i, std) for i, name in enumerate("qkv")}
        assert_right(device.forward(arrays, causal=True), arrays, causal=True)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float16", 5e4), *((d, x) for d in ("bfloat16", "float32") for x in (3e4, 1e5, 1e8))]
)
def test_scores_in_the_billions(device: Place, dtype: str, size: float) -> None:
    """The largest score wins, and its rounding, thousands of units by itself, makes no row vanish or overflow."""
    q = np.full((1, 70, 2, 64), size).astype(normal((1,), dtype, 0).dtype)
    arrays = {"q": q, "k": q * q.dtype.type(0.5), "v": normal(q.shape, dtype, 1)}
    arrays["k"][0, 33] = q[0, 0]
    for words, first in (({}, 0), ({"causal": True}, 33), ({"window": (40, None)}, 0)):
        found = device.forward(arrays, **words)
        rows = slice(first, 70)
        score = 64 * float(q[0, 0, 0, 0]) ** 2 / 8
        np.testing.assert_allclose(found["lse"][:, :, rows], score, rtol=1e-6)
        wanted = np.broadcast_to(arrays["v"][0, 33], found["out"].shape)[:, rows]
        np.testing.assert_allclose(found["out"][:, rows].astype("f8"), wanted.astype("f8"), rtol=1e-6)
    assert np.isfinite(found["out"].astype("f8")).all()


@FORMS
def test_rows_without_keys_have_no_gradient(device: Place, deterministic: bool) -> None:
    """130 queries on 40 keys, bottom-right: 90 rows see nothing; top-left: 90 keys are seen by nobody."""
    arrays = case(dense(1, 2, 2, 130, 40, 64, dtype="float16"), 2, d_lse=True)
    found = device.both(arrays, causal=True, deterministic=deterministic)
    assert (found["dq"][:, :90] == 0).all() and (found["out"][:, :90] == 0).all()
    arrays = case(dense(1, 2, 2, 40, 130, 64, dtype="float16"), 3)
    found = device.both(arrays, causal=True, align="top-left", deterministic=deterministic)
    assert (found["dk"][:, 40:] == 0).all() and (found["dv"][:, 40:] == 0).all()


def test_gradients_of_special_values_stay_where_they_are_seen(device: Place) -> None:
    """NaN in one query's output gradient: that query's dq, and the keys that it sees, and no more."""
    arrays = case(dense(1, 2, 2, 70, 70, 64, dtype="float16", causal=True), 12)
    arrays["d_out"][0, 40, 1] = np.nan
    found = device.both(arrays, causal=True, deterministic=True)
    right = expected(arrays, causal=True)
    assert np.array_equal(np.isnan(found["dq"]), np.isnan(right["dq"]))
    assert np.isnan(found["dk"][:, :41, 1]).all() and np.isnan(found["dv"][:, :41, 1]).all()
    assert not np.isnan(found["dk"][:, 41:]).any() and not np.isnan(found["dv"][:, 41:]).any()
    assert not np.isnan(found["dk"][:, :, 0]).any()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@FORMS
def test_gradients_of_special_inputs_stay_where_they_are_seen(device: Place, deterministic: bool, where: str) -> None:
    """Causal, NaN in row 40 of one head: queries before it and keys behind a NaN query keep clean gradients."""
    clean_arrays = case(dense(1, 2, 2, 70, 70, 64, dtype="float16", causal=True), 13)
    arrays = {name: array.copy() for name, array in clean_arrays.items()}
    arrays[where][0, 40, 1] = np.nan
    found = device.both(arrays, causal=True, deterministic=deterministic)
    assert np.isfinite(found["dq"][:, :40]).all() and np.isfinite(found["dq"][:, :, 0]).all()
    if where == "q":
        assert np.isfinite(found["dk"][:, 41:]).all() and np.isfinite(found["dv"][:, 41:]).all()
        assert np.isfinite(found["dq"][:, 41:]).all()
    assert np.isnan(found["dq"][:, 40, 1]).all()
    clean = device.both(clean_arrays, causal=True, deterministic=deterministic)
    clean["dq"][:, :40] = found["dq"][:, :40]
    assert_right(clean, clean_arrays, causal=True)


@FORMS
def test_long_float32_sums_do_not_drift(device: Place, deterministic: bool) -> None:
    """Sums of one sign over many steps: rounding toward zero, as the tensor core does, would add up."""
    arrays = case(dense(1, 1, 1, 400, 400, 16, dtype="float32"), 4)
    for name in ("v", "d_out"):
        arrays[name] = abs(arrays[name]) + np.float32(1)
    assert_right(device.both(arrays, deterministic=deterministic), arrays)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (12, 0)], ids=str)
@pytest.mark.parametrize("words", [{}, {"causal": True}, {"window": (20, 3)}], ids=str)
def test_float32_values_on_every_tile_for_wide_heads(capability: tuple[int, int], words: dict[str, object]) -> None:
    """With an infinite value and without: tiles that split in haste and then with care, and tiles of care alone."""
    place = Place("emulator", device=Device.emulated(capability))
    arrays = {name: normal((1, 70, 1, 256), "float32", seed) for seed, name in enumerate("qkv")}
    assert_right(place.forward(arrays, **words), arrays, **words)
    arrays["v"][0, 50, 0, 100] = math.inf
    found, right = place.forward(arrays, **words), expected(arrays, **words)
    assert np.array_equal(np.isinf(found["out"]), np.isinf(right["out"]))
    assert not np.isnan(found["out"]).any()
