"""Gradients: tails, masks, scores, lse's gradient, the deterministic form, storages of every input, special rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import LAYOUTS, Layout, case, dense, normal, slopes, sparse, stored, untouched_outside
from oracle import assert_equal_bits, assert_right
from places import Place

from cuflash import reference
from cuflash.presets import Shape

LENGTHS = [(1, 1), (1, 130), (17, 63), (64, 64), (65, 129), (129, 65), (130, 1), (200, 127)]
FORMS = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])


def check(device: Place, shape: Shape, seed: int = 0, d_lse: bool = False, **more: Any) -> None:
    arrays = case(shape, seed, d_lse=d_lse)
    words = {**shape.keywords, **more}
    assert_right(device.both(arrays, **words), arrays, **words)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_lengths(device: Place, dtype: str, causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    check(device, dense(1, 2, 2, seqlen_q, seqlen_k, 64, dtype=dtype, causal=causal), seed=seqlen_q)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seqlen_q", (1, 16, 31, 33, 63, 64, 65, 127, 128, 129, 193))
@pytest.mark.parametrize("seqlen_k", (1, 32, 63, 64, 65, 128, 129, 191))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@FORMS
def test_tile_edges(
    device: Place, deterministic: bool, dtype: str, causal: bool, head_dim: int, seqlen_q: int, seqlen_k: int
) -> None:
    shape = dense(1, 2, 1, seqlen_q, seqlen_k, head_dim, dtype=dtype, causal=causal)
    check(device, shape, seed=seqlen_k, deterministic=deterministic)


MASKS: dict[str, dict[str, Any]] = {
    "causal top-left": {"causal": True, "align": "top-left"},
    "causal from 9": {"causal": True, "align": 9},
    "window (2, 0)": {"window": (2, 0)},
    "window (40, 3)": {"window": (40, 3)},
    "window (None, 2)": {"window": (None, 2)},
    "window (3, None)": {"window": (3, None), "align": "top-left"},
}


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(67, 67), (40, 130), (130, 40)])
@pytest.mark.parametrize("words", MASKS.values(), ids=MASKS)
def test_masks(device: Place, words: dict[str, Any], seqlen_q: int, seqlen_k: int) -> None:
    arrays = case(dense(1, 2, 1, seqlen_q, seqlen_k, 64, dtype="float16"), 1)
    assert_right(device.both(arrays, **words), arrays, **words)


SCORES = [
    dense(1, 4, 2, 65, 70, 64, dtype="float16", softcap=3.0),
    dense(1, 4, 2, 65, 70, 64, dtype="float16", alibi=True),
    dense(1, 4, 2, 65, 70, 64, dtype="bfloat16", alibi=True, softcap=5.0, causal=True),
    dense(1, 4, 2, 65, 70, 64, dtype="float32", softcap=2.0, causal=True),
    dense(1, 4, 2, 65, 70, 64, dtype="float16", softcap=3.0, window=(20, 0)),
]


@pytest.mark.parametrize("shape", SCORES, ids=lambda s: f"{s.dtype} cap {s.softcap} alibi {s.alibi} {s.mask_name}")
def test_scores(device: Place, shape: Shape) -> None:
    check(device, shape, seed=4, d_lse=True)


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.3], ids=str)
def test_scales(device: Place, scale: float) -> None:
    check(device, dense(1, 2, 2, 65, 66, 64, dtype="float16"), seed=5, scale=scale)


@FORMS
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradient_through_lse(device: Place, dtype: str, deterministic: bool) -> None:
    shape = dense(2, 4, 2, 65, 40, 64, dtype=dtype, causal=True)
    check(device, shape, seed=6, d_lse=True, deterministic=deterministic)
    arrays = case(shape, 7, d_lse=True)
    arrays["d_out"] = np.zeros_like(arrays["d_out"])  # lse's own gradient alone
    found = device.both(arrays, causal=True, deterministic=deterministic)
    assert_right(found, arrays, causal=True)
    assert (found["dv"] == 0).all() and found["dq"].any()


@FORMS
@pytest.mark.parametrize(("q_heads", "kv_heads", "batch"), [(2, 1, 2), (6, 2, 1), (6, 3, 2), (8, 1, 1)])
def test_heads(device: Place, deterministic: bool, q_heads: int, kv_heads: int, batch: int) -> None:
    shape = dense(batch, q_heads, kv_heads, 33, 35, 64, dtype="float16", causal=True)
    check(device, shape, seed=q_heads, deterministic=deterministic)


FEW_DIMS = [(64, 72), pytest.param(256, 256, marks=pytest.mark.exhaustive)]
ALL_DIMS = [(dim, dim) for dim in range(1, 257)] + [(192, 128), (128, 192), (1, 256), (256, 1), (7, 100), (100, 7)]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), FEW_DIMS)
def test_head_dims(device: Place, head_dim: int, head_dim_v: int) -> None:
    check(device, dense(1, 2, 1, 50, 66, head_dim, head_dim_v, dtype="float16"), seed=head_dim)


@pytest.mark.exhaustive
@FORMS
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), ALL_DIMS)
def test_every_head_dim(device: Place, head_dim: int, head_dim_v: int, dtype: str, deterministic: bool) -> None:
    shape = dense(1, 2, 1, 35, 70, head_dim, head_dim_v, dtype=dtype, causal=True)
    check(device, shape, seed=head_dim, deterministic=deterministic)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["d_out", "out", "k", "all"])
def test_layouts(device: Place, layout: str, which: str) -> None:
    """Every 4-axis input in every storage: same values, no gap read, nothing written."""
    shape = dense(2, 4, 2, 33, 37, 64, dtype="float16", causal=True)
    plain = case(shape, 8)
    plain |= device.forward(plain, causal=True)
    names = ("q", "k", "v", "out", "d_out") if which == "all" else (which,)
    arrays = {name: stored(array, layout) if name in names else array for name, array in plain.items()}
    found = device.backward(arrays, causal=True, deterministic=True)
    assert_right(found, plain, causal=True)
    wide = layout in ("BSHD", "BHSD", "SBHD", "padded rows", "guard rows", "row step 2", "backwards")
    if wide and device.same_kernels(arrays, plain, causal=True, deterministic=True):
        assert_equal_bits(found, device.backward(plain, causal=True, deterministic=True))
    assert all(untouched_outside(arrays[name]) for name in names)


@pytest.mark.parametrize("pad", [1, 2, 4], ids=lambda pad: f"rows padded by {pad}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("softcap", [None, 4.0], ids=["plain", "softcap"])
def test_narrow_copies_of_many_steps(device: Place, softcap: float | None, dtype: str, pad: int) -> None:
    """Rows that allow narrow copies only, and more of them than one step takes: copies in a loop inside a loop."""
    arrays = case(dense(1, 2, 1, 130, 129, 64, dtype=dtype), seed=9)
    placed = {n: stored(x, Layout(pad=(0, 0, 0, pad), offset=pad)) if x.ndim == 4 else x for n, x in arrays.items()}
    assert_right(device.both(placed, softcap=softcap), arrays, softcap=softcap)


def test_output_gradient_broadcast_by_stride_zero(device: Place) -> None:
    """What the gradient of a plain sum looks like."""
    arrays = case(dense(2, 4, 2, 40, 33, 64, dtype="float16"), 9)
    arrays["d_out"] = np.broadcast_to(np.float16(1), arrays["d_out"].shape)
    assert_right(device.both(arrays), arrays)


def test_strides_beyond_32_bits(emulator: Place) -> None:
    for strides in ((2**31 + 64, 64, 2**20, 1), (2**20, 2**26 + 64, 64, 1)):
        shape = (2, 40, 2, 64)
        plain = case(dense(2, 2, 2, 40, 40, 64, dtype="float16"), 10)
        arrays = {name: sparse(shape, strides, np.float16) for name in plain}
        for name, array in plain.items():
            arrays[name][...] = array
        found, right = (emulator.both(x, deterministic=True) for x in (arrays, plain))
        assert_right(found, plain)
        assert_equal_bits(found, right)


@pytest.mark.parametrize(
    "empty", [(0, 2, 2, 5, 6), (2, 0, 0, 5, 6), (2, 2, 2, 0, 6), (2, 4, 2, 5, 0), (0, 0, 0, 0, 0)], ids=str
)
@FORMS
def test_empty_axes(device: Place, deterministic: bool, empty: tuple[int, ...]) -> None:
    arrays = case(dense(*empty, 64, dtype="float16"))  # type: ignore[arg-type]
    found = device.both(arrays, deterministic=deterministic)
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        assert found[name].shape == arrays[like].shape and (found[name] == 0).all()


def test_slopes_of_every_batch(device: Place) -> None:
    arrays = case(dense(3, 4, 2, 33, 40, 64, dtype="float16", alibi=True), 11)
    arrays["alibi_slopes"] = np.stack([slopes(4) * factor for factor in (1, 0, -2)]).astype(np.float32)
    assert_right(device.both(arrays), arrays)


DIFFERENCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1), "align": "top-left"},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.7},
    "ALiBi after softcap": {"softcap": 1.5, "alibi_slopes": np.array([0.3, -0.2], np.float32), "causal": True},
}


@pytest.mark.parametrize("words", DIFFERENCES.values(), ids=DIFFERENCES)
def test_the_reference_agrees_with_finite_differences(words: dict[str, Any]) -> None:
    """The oracle itself: its gradients are the slopes of its own forward, lse's part included."""
    q, d_out = (normal((1, 4, 2, 3), "float32", seed).astype(np.float64) for seed in (1, 2))
    k, v = (normal((1, 5, 1, 3), "float32", seed).astype(np.float64) for seed in (3, 4))
    d_lse = normal((1, 2, 4), "float32", 5).astype(np.float64)

    def loss(*arrays: Any) -> float:
        out, lse = reference.attention(*arrays, **words)
        return float((out * d_out).sum() + (np.where(np.isneginf(lse), 0, lse) * d_lse).sum())

    gradients = reference.attention_backward(d_out, q, k, v, d_lse=d_lse, **words)
    for position, (array, gradient) in enumerate(zip((q, k, v), gradients, strict=True)):
        for index in np.ndindex(array.shape):
            moved = []
            for step in (1e-5, -1e-5):
                arrays = [q, k, v]
                arrays[position] = array.copy()
                arrays[position][index] += step
                moved.append(loss(*arrays))
            assert abs((moved[0] - moved[1]) / 2e-5 - gradient[index]) < 1e-6
