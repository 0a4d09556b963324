"""The Hopper forward: every schedule and base under the race detector, and inputs that break a careless softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import nans, stored, untouched_outside
from oracle import equal_bits, expected, faults
from places import Place
from sm90 import EXTREMES, FEATURES, MORE_FEATURES, Array, arrays_of, check, grown, run, tile

from cuflash.problem import Keywords
from cuflash.tiling_sm90 import Base, Schedule, TileSm90


@pytest.mark.parametrize(("shape", "words"), FEATURES.values(), ids=FEATURES)
def test_features(shape: dict[str, Any], words: dict[str, Any]) -> None:
    check(arrays_of(**shape), **words)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("shape", "words"), MORE_FEATURES.values(), ids=MORE_FEATURES)
def test_more_features(shape: dict[str, Any], words: dict[str, Any]) -> None:
    check(arrays_of(**shape), **words)


ALL_FEATURES = {**FEATURES, **MORE_FEATURES}


@pytest.mark.parametrize(("shape", "words"), ALL_FEATURES.values(), ids=ALL_FEATURES)
def test_features_on_a_gpu(gpu: Place, shape: dict[str, Any], words: dict[str, Any]) -> None:
    """The same cases at three times the lengths: a GPU has more blocks to hand tiles to."""
    longer = {name: 3 * value if "seqlen" in name else value for name, value in shape.items()}
    arrays = arrays_of(**longer)
    assert faults(gpu.forward(arrays, **words), arrays, **words) == []


TILES = {
    "one warpgroup": tile(1, schedule=Schedule.STATIC),
    "two, dynamic": tile(2),
    "two, one tile a block": tile(2, schedule=Schedule.ONE_TILE),
    "two, optimistic": tile(2, base=Base.OPTIMISTIC),
    "two, plain": tile(2, base=Base.PLAIN, schedule=Schedule.STATIC),
    "two, no turns": tile(2, turns=False, q_stages=2),
    "three, deep rings": tile(3, 80, stages=3, q_stages=2),
    "four, every block": tile(4, skips=False),
}


@pytest.mark.parametrize("chosen", TILES.values(), ids=TILES)
@pytest.mark.parametrize(
    "words",
    [
        {"causal": True},
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"window": (90, 0)}, marks=pytest.mark.exhaustive),
    ],
    ids=["causal", "full", "window"],
)
def test_tiles(chosen: TileSm90, words: dict[str, Any]) -> None:
    check(arrays_of(330, heads=3), chosen, **words)


@pytest.mark.parametrize("edit", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "base", [Base.FIXED, pytest.param(Base.OPTIMISTIC, marks=pytest.mark.exhaustive)], ids=["fixed", "optimistic"]
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_any_input_is_exact(edit: Callable[[dict[str, Array]], None], dtype: str, base: Base, causal: bool) -> None:
    arrays = arrays_of(200, heads=1, batch=2, dtype=dtype)
    edit(arrays)
    check(arrays, tile(2, base=base), causal=causal)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("words", [{"causal": True}, {"window": (40, 0)}], ids=["causal", "window"])
def test_hidden_rubbish_reaches_no_row(words: dict[str, Any], rubbish: float, name: str) -> None:
    """Rows that do not see the key keep their values; the others are as lost as arithmetic says."""
    arrays = arrays_of(200, heads=1)
    clean = expected(arrays, **words)["out"]
    arrays[name][0, 100] = rubbish
    found = run(arrays, tile(2), **words)["out"].astype(np.float64)
    keep = Keywords(**words)
    sees = np.arange(200) >= 100
    if keep.window:
        sees &= np.arange(200) <= 140
    assert np.isfinite(found[:, ~sees]).all()
    assert np.abs(found[:, ~sees] - clean[:, ~sees]).max() < 0.03
    if name == "v":
        assert not np.isfinite(found[:, sees]).any()


def test_rows_without_keys() -> None:
    arrays = arrays_of(200, 60)
    arrays["v"][:] = np.nan
    found = run(arrays, tile(2), causal=True)
    assert (found["out"][:, :140].astype(np.float32) == 0).all()
    assert (found["lse"][:, :, :140] == -np.inf).all()


@pytest.mark.parametrize("words", [{}, {"causal": True}], ids=["full", "causal"])
def test_every_schedule_of_threads_gives_the_same_bits(words: dict[str, Any]) -> None:
    arrays = arrays_of(200, heads=4)
    grown(arrays["k"])  # some tiles are redone
    first = run(arrays, tile(2), seed=1, **words)
    for seed in (2, 3):
        other = run(arrays, tile(2), seed=seed, **words)
        assert all(equal_bits(first[name], other[name]) for name in first)


@pytest.mark.parametrize("words", [{"causal": True}, {"window": (40, 20)}], ids=["causal", "window"])
@pytest.mark.parametrize("turns", [True, False], ids=["turns", "no turns"])
def test_no_warp_overtakes_the_one_that_leaves_blocks_out(turns: bool, words: dict[str, Any]) -> None:
    """More blocks left out than the ring has stages: a barrier a round behind looks full to who did not wait."""
    chosen = tile(3, 32, turns=turns, schedule=Schedule.STATIC)
    for seed in (1, 2):
        run(arrays_of(200, 300, head_dim=128), chosen, seed=seed, **words)
    check(arrays_of(200, 300, head_dim=128), chosen, **words)


def test_a_batch_changes_nothing() -> None:
    together = arrays_of(150, batch=3)
    alone = {name: array[1:2] for name, array in together.items()}
    assert equal_bits(run(together, tile(2), causal=True)["out"][1:2], run(alone, tile(2), causal=True)["out"])


@pytest.mark.parametrize("layout", ["BHSD", "SBHD", "padded rows", "guard rows", "row step 2"])
def test_strided_inputs_and_outputs(layout: str) -> None:
    arrays = arrays_of(130)
    held = {name: stored(array, layout) for name, array in arrays.items()}
    out = stored(nans(arrays["q"].shape, arrays["q"].dtype), layout)
    found = run({**held, "out": out}, tile(2), causal=True)
    assert faults(found, arrays, causal=True) == []
    assert untouched_outside(out)


@pytest.mark.parametrize("layout", ["offset 1", "odd rows", "transposed", "dim step 2", "backwards"])
@pytest.mark.parametrize("seqlen_k", [130, 1700], ids=["whole", "split"])
def test_outputs_that_16_bytes_do_not_fit(layout: str, seqlen_k: int) -> None:
    arrays = arrays_of(3, seqlen_k, heads=1)
    out = stored(nans(arrays["q"].shape, arrays["q"].dtype), layout)
    found = run({**arrays, "out": out}, tile(1))
    assert faults(found, arrays) == []
    assert untouched_outside(out)


@pytest.mark.parametrize("edit", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_any_input_is_exact_on_a_gpu(
    gpu: Place, edit: Callable[[dict[str, Array]], None], dtype: str, head_dim: int, causal: bool
) -> None:
    arrays = arrays_of(1000, heads=2, head_dim=head_dim, dtype=dtype)
    edit(arrays)
    assert faults(gpu.forward(arrays, causal=causal), arrays, causal=causal) == []
