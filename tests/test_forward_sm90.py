"""The Hopper forward: every schedule and base under the race detector, and inputs that break a careless softmax."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from arrays import case, nans, stored, untouched_outside
from oracle import equal_bits, expected, faults

from cuflash import emulator, plan_sm90
from cuflash.architectures import Device
from cuflash.host import NumpyBackend
from cuflash.plan import Plan
from cuflash.presets import Shape
from cuflash.problem import Keywords, Problem, spec_of_contiguous
from cuflash.tiling_sm90 import ROWS, Base, Schedule, TileSm90

Array = np.ndarray[Any, Any]
H200 = Device("NVIDIA H200", (9, 0), 132, 227 * 1024, ("sm90",))


def tile(warpgroups: int = 2, block_k: int = 64, **more: Any) -> TileSm90:
    """A small tile with the table's other choices."""
    plain = TileSm90(warpgroups, block_k, 2, 1, Base.FIXED, Schedule.DYNAMIC, warpgroups > 1, True, 64, "for a test")
    return replace(plain, **more)


def plan(arrays: dict[str, Array], chosen: TileSm90 | None = None, sm_count: int = 3, **words: Any) -> Plan | str:
    """The plan on a small GPU, so that a block serves several tiles."""
    spec = NumpyBackend().spec
    specs = {name: spec(name, array) for name, array in arrays.items() if name in ("alibi_slopes", "out")}
    problem = Problem.forward(*(spec(name, arrays[name]) for name in "qkv"), Keywords(**words), **specs)
    device = replace(H200, sm_count=sm_count)
    return plan_sm90.forward_with_tile(problem, device, chosen) if chosen else plan_sm90.forward(problem, device)


def run(arrays: dict[str, Array], chosen: TileSm90 | None = None, seed: int = 0, **words: Any) -> dict[str, Array]:
    """out and lse from the emulator, with race detection, into arrays of NaN."""
    made = plan(arrays, chosen, **words)
    assert isinstance(made, Plan), made
    found = {
        output.name: nans(output.shape, arrays["q"].dtype if output.name == "out" else "f4") for output in made.outputs
    }
    found.update({name: arrays[name] for name in ("out",) if name in arrays})
    emulator.execute(made, {**arrays, **found}, seed=seed, race=True)
    return found


def check(arrays: dict[str, Array], chosen: TileSm90 | None = None, **words: Any) -> None:
    assert faults(run(arrays, chosen, **words), arrays, **words) == []


def arrays_of(seqlen_q: int, seqlen_k: int = 0, heads: int = 2, head_dim: int = 64, **more: Any) -> dict[str, Array]:
    shape = Shape(
        name="case",
        batch=more.pop("batch", 1),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k or seqlen_q,
        num_q_heads=heads,
        num_kv_heads=more.pop("kv_heads", heads),
        head_dim=head_dim,
        head_dim_v=more.pop("head_dim_v", head_dim),
        **more,
    )
    return {name: array for name, array in case(shape, seed=seqlen_q).items() if name != "d_out"}


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"seqlen_q": 200}, {}),
    "causal": ({"seqlen_q": 200}, {"causal": True}),
    "causal, more keys": ({"seqlen_q": 100, "seqlen_k": 260}, {"causal": True}),
    "causal, fewer keys": ({"seqlen_q": 260, "seqlen_k": 100}, {"causal": True}),
    "causal, top-left": ({"seqlen_q": 150, "seqlen_k": 90}, {"causal": True, "align": "top-left"}),
    "window": ({"seqlen_q": 300}, {"window": (70, 30)}),
    "window, rows without keys": ({"seqlen_q": 300, "seqlen_k": 60}, {"window": (20, 0)}),
    "one row": ({"seqlen_q": 1, "seqlen_k": 130}, {}),
    "one key": ({"seqlen_q": 130, "seqlen_k": 1}, {"causal": True}),
    "grouped heads": ({"seqlen_q": 130, "heads": 6, "kv_heads": 2}, {"causal": True}),
    "float16": ({"seqlen_q": 200, "dtype": "float16"}, {"causal": True}),
    "softcap": ({"seqlen_q": 130}, {"softcap": 5.0}),
    "softcap and ALiBi": ({"seqlen_q": 130, "alibi": True}, {"softcap": 5.0, "causal": True}),
    "negative scale": ({"seqlen_q": 130}, {"scale": -0.2}),
    "zero scale": ({"seqlen_q": 70}, {"scale": 0.0}),
    "head_dim 8": ({"seqlen_q": 70, "head_dim": 8}, {"causal": True}),
    "head_dim 72": ({"seqlen_q": 130, "head_dim": 72}, {}),
    "head_dim 96 and 40": ({"seqlen_q": 130, "head_dim": 96, "head_dim_v": 40}, {"causal": True}),
    "head_dim 192 and 128": ({"seqlen_q": 130, "head_dim": 192, "head_dim_v": 128}, {"causal": True}),
    "head_dim 64 and 256": ({"seqlen_q": 130, "head_dim": 64, "head_dim_v": 256}, {}),
    "head_dim 256": ({"seqlen_q": 130, "head_dim": 256}, {"causal": True}),
}


@pytest.mark.parametrize(("shape", "words"), FEATURES.values(), ids=FEATURES)
def test_features(shape: dict[str, Any], words: dict[str, Any]) -> None:
    check(arrays_of(**shape), **words)


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
@pytest.mark.parametrize("words", [{}, {"causal": True}, {"window": (90, 0)}], ids=["full", "causal", "window"])
def test_tiles(chosen: TileSm90, words: dict[str, Any]) -> None:
    check(arrays_of(330, heads=3), chosen, **words)


def grown(keys: Array) -> None:
    """Later blocks hold ever larger scores: the first base is outgrown again and again."""
    keys *= np.linspace(60, 1, keys.shape[1])[None, :, None, None]


def one_huge(keys: Array) -> None:
    """One score beyond the exponent range, in the block visited last."""
    keys[:, 3] *= 300


EXTREMES: dict[str, Callable[[dict[str, Array]], None]] = {
    "large queries": lambda arrays: np.multiply(arrays["q"], 30, out=arrays["q"]),
    "growing keys": lambda arrays: grown(arrays["k"]),
    "one huge key": lambda arrays: one_huge(arrays["k"]),
    "equal keys": lambda arrays: np.copyto(arrays["k"], arrays["k"][:, :1]),
    "zero queries": lambda arrays: np.multiply(arrays["q"], 0, out=arrays["q"]),
    "very negative scores": lambda arrays: np.multiply(
        np.abs(arrays["k"]), -30 * np.sign(arrays["q"][:, :1]), out=arrays["k"]
    ),
    "large values": lambda arrays: np.multiply(arrays["v"], 3e3, out=arrays["v"]),
}


@pytest.mark.parametrize("edit", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("base", [Base.FIXED, Base.OPTIMISTIC], ids=["fixed", "optimistic"])
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


def test_a_batch_changes_nothing() -> None:
    together = arrays_of(150, batch=3)
    alone = {name: array[1:2] for name, array in together.items()}
    assert equal_bits(run(together, tile(2), causal=True)["out"][1:2], run(alone, tile(2), causal=True)["out"])


@pytest.mark.parametrize("layout", ["BHSD", "SBHD", "padded rows", "guard rows", "row step 2", "offset 8"])
def test_strided_inputs_and_outputs(layout: str) -> None:
    arrays = arrays_of(130)
    where = "BSHD" if layout == "offset 8" else layout
    held = {name: stored(array, where) for name, array in arrays.items()}
    out = stored(np.zeros_like(arrays["q"]), where)
    out[...] = np.nan
    found = run({**held, "out": out}, tile(2), causal=True)
    assert faults(found, arrays, causal=True) == []
    assert where == "BSHD" or untouched_outside(out)


REFUSED: dict[str, Callable[[dict[str, Array]], dict[str, Array]]] = {
    "float32": lambda arrays: {name: array.astype(np.float32) for name, array in arrays.items()},
    "head_dim=60": lambda arrays: {name: np.ascontiguousarray(array[..., :60]) for name, array in arrays.items()},
    "row stride of 130 bytes": lambda arrays: {**arrays, "k": stored(arrays["k"][:, :, :1], "odd rows")},
    "address": lambda arrays: {**arrays, "q": stored(arrays["q"], "offset 1")},
    "along head_dim": lambda arrays: {**arrays, "v": stored(arrays["v"], "dim step 2")},
    "no keys": lambda arrays: {**arrays, "k": arrays["k"][:, :0], "v": arrays["v"][:, :0]},
}


@pytest.mark.parametrize(("reason", "edit"), REFUSED.items(), ids=REFUSED)
def test_what_it_does_not_take_it_says(reason: str, edit: Callable[[dict[str, Array]], dict[str, Array]]) -> None:
    arrays = arrays_of(20, heads=1 if "row stride" in reason else 2)
    answer = plan(edit(arrays))
    assert isinstance(answer, str)
    assert reason in answer


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"d{row.head_dim}-{'full' if row.uniform else 'causal'}-{row.seqlen_k}"
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_every_row_of_the_table_compiles_clean(row: Any, dtype: str) -> None:
    """No spills, no wgmma that is serialised, no setmaxnreg that is ignored."""
    jit = pytest.importorskip("cuflash.jit")
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    rows = min(row.seqlen_k, 16384)
    specs = [spec_of_contiguous((16, rows, 8, dim), dtype) for dim in (row.head_dim, row.head_dim, row.head_dim_v)]
    made = plan_sm90.forward(Problem.forward(*specs, Keywords(causal=not row.uniform)), H200)
    assert isinstance(made, Plan)
    log = jit.compile_cubin(made.launches[0].variant, "sm_90a").log
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    assert spills and not any(spills), log
    assert "C75" not in log, log
