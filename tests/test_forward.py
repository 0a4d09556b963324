"""Forward values: tails, masks against an explicit mask, scores, scales, head dimensions, storages, special values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import LAYOUTS, case, dense, nans, normal, slopes, sparse, stored, untouched_outside
from oracle import assert_equal_bits, assert_right, equal_bits
from places import Place

from cuflash.errors import ArgumentError
from cuflash.presets import Shape
from cuflash.problem import Keywords

LENGTHS = [(1, 1), (1, 200), (17, 63), (63, 17), (64, 64), (65, 129), (127, 128), (129, 65), (200, 1), (200, 127)]
EDGES = (1, 15, 16, 31, 33, 63, 64, 65, 96, 127, 128, 129, 193)
TILE_EDGES = [(q, k) for q in EDGES for k in (1, 32, 63, 65, 128, 191)]


def check(device: Place, shape: Shape, seed: int = 0, **more: Any) -> None:
    arrays = {name: array for name, array in case(shape, seed).items() if name != "d_out"}
    words = {**shape.keywords, **more}
    assert_right(device.forward(arrays, **words), arrays, **words)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_lengths(device: Place, dtype: str, causal: bool, seqlen_q: int, seqlen_k: int) -> None:
    check(device, dense(2, 2, 2, seqlen_q, seqlen_k, 64, dtype=dtype, causal=causal), seed=seqlen_q)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), TILE_EDGES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tile_edges(device: Place, dtype: str, causal: bool, head_dim: int, seqlen_q: int, seqlen_k: int) -> None:
    check(device, dense(1, 2, 1, seqlen_q, seqlen_k, head_dim, dtype=dtype, causal=causal), seed=seqlen_k)


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window (2, 0)": {"window": (2, 0)},
    "window (0, 0)": {"window": (0, 0)},
    "window (0, 3)": {"window": (0, 3)},
    "window (5, 1)": {"window": (5, 1)},
    "window (None, 2)": {"window": (None, 2)},
    "window (3, None)": {"window": (3, None)},
    "window (None, None)": {"window": (None, None)},
    "causal and window (4, 9)": {"causal": True, "window": (4, 9)},
    "window wider than any row": {"window": (10**9, 10**9)},
}


def visible(seqlen_q: int, seqlen_k: int, align: str | int, words: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The contract, pair by pair: which query sees which key."""
    shift = {"bottom-right": seqlen_k - seqlen_q, "top-left": 0}.get(align, align)  # type: ignore[call-overload]
    left, right = words.get("window", (None, None))
    keep = np.zeros((seqlen_q, seqlen_k), bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            sees = left is None or j >= i + shift - left
            sees = sees and (right is None or j <= i + shift + right)
            keep[i, j] = sees and not (words.get("causal") and j > i + shift)
    return keep


@pytest.mark.parametrize("align", ["bottom-right", "top-left", 7, -3], ids=str)
@pytest.mark.parametrize("words", MASKS.values(), ids=MASKS)
def test_masks_show_exactly_the_keys_they_promise(device: Place, words: dict[str, Any], align: str | int) -> None:
    """Equal scores and one-hot values: a row's nonzero channels are the keys it sees."""
    for seqlen_q, seqlen_k in ((9, 9), (5, 60), (60, 5), (64, 64), (33, 57)):
        keep = visible(seqlen_q, seqlen_k, align, words)
        q, k = (np.zeros((1, rows, 1, 64), np.float32) for rows in (seqlen_q, seqlen_k))
        v = np.eye(seqlen_k, 64, dtype=np.float32)[None, :, None, :]
        found = device.forward({"q": q, "k": k, "v": v}, align=align, **words)
        counts = keep.sum(1)
        assert np.array_equal(found["out"][0, :, 0, :seqlen_k] != 0, keep)
        share = np.where(keep, 1 / np.maximum(counts, 1)[:, None], 0)
        np.testing.assert_allclose(found["out"][0, :, 0, :seqlen_k], share, rtol=1e-5)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(found["lse"][0, 0], np.log(counts), atol=1e-5)


SCORES = [
    dense(1, 4, 2, 65, 70, 64, dtype="float16", softcap=3.0),
    dense(1, 4, 2, 65, 70, 64, dtype="float16", alibi=True),
    dense(1, 4, 2, 65, 70, 64, dtype="bfloat16", alibi=True, softcap=5.0, causal=True),
    dense(1, 4, 2, 65, 70, 64, dtype="float32", softcap=50.0, causal=True),
    dense(1, 4, 2, 70, 65, 64, dtype="float32", alibi=True, align="top-left", causal=True),
    dense(1, 4, 2, 65, 70, 64, dtype="float16", softcap=3.0, window=(20, 0)),
]


@pytest.mark.parametrize("shape", SCORES, ids=lambda s: f"{s.dtype} cap {s.softcap} alibi {s.alibi} {s.mask_name}")
def test_scores(device: Place, shape: Shape) -> None:
    check(device, shape, seed=1)


def test_slopes_of_every_batch(device: Place) -> None:
    shape = dense(3, 4, 2, 33, 40, 64, dtype="float16", alibi=True)
    arrays = case(shape, 2)
    del arrays["d_out"]
    arrays["alibi_slopes"] = np.stack([slopes(4) * factor for factor in (1, 0, -2)]).astype(np.float32)
    assert_right(device.forward(arrays), arrays)
    arrays["alibi_slopes"] = np.broadcast_to(slopes(4), (3, 4))
    together = device.forward(arrays)
    arrays["alibi_slopes"] = slopes(4)
    assert_equal_bits(together, device.forward(arrays))


@pytest.mark.parametrize("scale", [1.0, 0.01, 0.0, -0.3, 3, np.float32(0.25)], ids=str)
def test_scales(device: Place, scale: Any) -> None:
    check(device, dense(1, 2, 2, 65, 66, 64, dtype="float16"), seed=3, scale=scale)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "batch"), [(1, 1, 3), (2, 1, 2), (3, 3, 1), (6, 2, 2), (6, 3, 1), (8, 1, 1), (7, 7, 2)]
)
def test_heads(device: Place, q_heads: int, kv_heads: int, batch: int) -> None:
    check(device, dense(batch, q_heads, kv_heads, 33, 35, 64, dtype="float16", causal=True), seed=q_heads)


FEW_DIMS = [(64, 72), pytest.param(256, 256, marks=pytest.mark.exhaustive)]
ALL_DIMS = [(dim, dim) for dim in range(1, 257)] + [(192, 128), (128, 192), (1, 256), (256, 1), (7, 100), (100, 7)]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), FEW_DIMS)
def test_head_dims(device: Place, head_dim: int, head_dim_v: int) -> None:
    check(device, dense(1, 2, 1, 50, 66, head_dim, head_dim_v, dtype="float16"), seed=head_dim)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), ALL_DIMS)
def test_every_head_dim(device: Place, head_dim: int, head_dim_v: int, dtype: str) -> None:
    check(device, dense(1, 2, 1, 35, 70, head_dim, head_dim_v, dtype=dtype, causal=True), seed=head_dim)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_layouts(device: Place, layout: str, which: str) -> None:
    """Any strides, any gaps: the same values as contiguous arrays, and gaps of NaN never read."""
    shape = dense(2, 4, 2, 33, 37, 64, dtype="float16", causal=True)
    plain = {name: array for name, array in case(shape, 4).items() if name != "d_out"}
    arrays = {name: stored(array, layout) if name in which else array for name, array in plain.items()}
    found = device.forward(arrays, causal=True)
    assert_right(found, plain, causal=True)
    wide = layout in ("BSHD", "BHSD", "SBHD", "padded rows", "guard rows", "row step 2", "backwards")
    if wide and device.same_kernels(arrays, plain, causal=True):
        assert_equal_bits(found, device.forward(plain, causal=True))
    assert all(untouched_outside(arrays[name]) for name in which)


@pytest.mark.parametrize("layout", ["BHSD", "odd rows", "offset 1", "transposed", "row step 2"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_out_in_any_storage(device: Place, dtype: str, layout: str) -> None:
    """``out=`` is filled completely and nothing beside it is touched."""
    shape = dense(2, 2, 2, 33, 37, 64, dtype=dtype)
    arrays = {name: array for name, array in case(shape, 5).items() if name != "d_out"}
    out = stored(nans((2, 33, 2, 64), arrays["q"].dtype), layout)
    placed = device.put(out)
    found = device.forward(arrays, out=placed)
    assert_right(found, arrays)
    assert_equal_bits(found, device.forward(arrays))
    if not device.is_gpu:
        assert untouched_outside(out)


def test_out_may_not_overlap_an_input(device: Place) -> None:
    placed = device.put(stored(normal((1, 8, 4, 64), "float16", 6)))
    q, beside = placed[:, :, :2], placed[:, :, 2:]
    inputs = {"q": q, "k": q, "v": q}
    device.eager.forward(inputs, Keywords(), beside)
    for out in (q, placed[:, :, 1:3]):
        with pytest.raises(ArgumentError, match="out"):
            device.eager.forward(inputs, Keywords(), out)


def test_inputs_broadcast_by_stride_zero(device: Place) -> None:
    one = normal((2, 1, 1, 64), "float16", 7)
    arrays = {
        "q": np.broadcast_to(one, (2, 40, 4, 64)),
        "k": np.broadcast_to(normal((1, 33, 1, 64), "float16", 8), (2, 33, 2, 64)),
        "v": np.broadcast_to(normal((2, 33, 1, 1), "float16", 9), (2, 33, 2, 64)),
    }
    assert_right(device.forward(arrays), arrays)


def test_strides_beyond_32_bits(emulator: Place) -> None:
    """Batch, row and head strides of gigabytes: offsets are 64-bit, in elements and in bytes."""
    for strides in ((2**31 + 64, 64, 2**20, 1), (2**20, 2**26 + 64, 64, 1), (64 * 64, 64, 2**31 - 64, 1)):
        shape = (2, 40, 2, 64)
        arrays = {name: sparse(shape, strides, np.float16) for name in "qkv"}
        out = sparse(shape, strides, np.float16)
        for seed, array in enumerate(arrays.values()):
            array[...] = normal(shape, "float16", seed)
        found = emulator.forward(arrays, out=out)
        plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        assert_right(found, plain)
        assert_equal_bits(found, emulator.forward(plain))


@pytest.mark.parametrize(
    "empty", [(0, 2, 2, 5, 6), (2, 0, 0, 5, 6), (2, 2, 2, 0, 6), (2, 4, 2, 5, 0), (0, 0, 0, 0, 0)], ids=str
)
def test_empty_axes(device: Place, empty: tuple[int, ...]) -> None:
    shape = dense(*empty, 64, dtype="float16")  # type: ignore[arg-type]
    arrays = {name: array for name, array in case(shape).items() if name != "d_out"}
    for words in ({}, {"causal": True}):
        found = device.forward(arrays, **words)
        assert found["out"].shape == (shape.batch, shape.seqlen_q, shape.num_q_heads, 64)
        assert found["lse"].shape == (shape.batch, shape.num_q_heads, shape.seqlen_q)
        assert (found["out"] == 0).all() and np.isneginf(found["lse"]).all()


def test_inputs_are_never_written(device: Place) -> None:
    shape = dense(1, 4, 2, 33, 37, 64, dtype="float16", alibi=True)
    arrays = {name: stored(x) if x.ndim == 4 else x for name, x in case(shape, 12).items()}
    if device.is_gpu:
        placed = {name: device.put(array) for name, array in arrays.items()}
        del placed["d_out"]
        device.eager.forward(placed, Keywords())
        assert all(equal_bits(device.get(placed[name]), np.asarray(arrays[name])) for name in placed)
        return
    before = {name: array.copy() for name, array in arrays.items()}
    device.both(arrays)
    assert all(equal_bits(np.asarray(arrays[name]), before[name]) for name in arrays)
    assert all(untouched_outside(arrays[name]) for name in ("q", "k", "v", "d_out"))
