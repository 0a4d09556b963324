"""The benchmark's parts that need no GPU: FLOPs, ratios, recorded peers, refusals, picture; and check's verdicts."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cuflash import accuracy, benchmark, peers, peers_base, plotting, reference, tables, timing
from cuflash.backends import eager_on
from cuflash.check import FLOOR, compare
from cuflash.errors import UnsupportedError
from cuflash.presets import PRESETS, Shape, fa_grid, odd_grid, preset_shapes

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "recorded_ratios.json"


def row(shape: Shape, mode: str, ms: float, **others: float) -> benchmark.Row:
    figures = {
        name: benchmark.Figure(value, timing.flops(shape, mode) / value / 1e9, 1.0) for name, value in others.items()
    }
    mine = benchmark.Figure(ms, timing.flops(shape, mode) / ms / 1e9, 1.0)
    best, best_ms = benchmark._best(shape, mode, figures, benchmark.read_recorded(RECORDED))
    return benchmark.Row(shape, mode, mine, ("k",), figures, {}, best, best_ms, best_ms / ms)


def test_the_grid_is_the_published_one() -> None:
    grid = fa_grid()
    assert len(grid) == 36
    assert all(shape.batch * shape.seqlen_q == 16384 and shape.num_q_heads * shape.head_dim == 2048 for shape in grid)


def test_flops_follow_the_convention() -> None:
    full, causal = (shape for shape in fa_grid((1024,)) if shape.head_dim == 128)
    assert timing.flops(full, "fwd") == 4 * 16 * 16 * 1024**2 * 128
    assert timing.flops(full, "bwd") == 2.5 * timing.flops(full, "fwd")
    assert timing.flops(causal, "fwd") == timing.flops(full, "fwd") / 2
    assert timing.flops(full, "fwdbwd") == 3.5 * timing.flops(full, "fwd")


def test_windows_count_visible_pairs() -> None:
    shape = Shape("w", 1, 1, 64, 10, 10, causal=True, window=(2, 0))
    assert shape.visible_pairs() == 1 + 2 + 3 * 8


def test_every_point_of_the_grid_has_a_recorded_ratio() -> None:
    points = benchmark.read_recorded(RECORDED)
    wanted = {f"{mode}/{s.head_dim}/{s.mask_name}/{s.seqlen_k}" for s in fa_grid() for mode in ("fwd", "bwd")}
    assert wanted == set(points)
    assert "H200" in json.loads(RECORDED.read_text())["how"]


def test_a_recorded_ratio_stands_for_an_absent_peer_only() -> None:
    shape = next(s for s in fa_grid() if (s.head_dim, s.mask_name, s.seqlen_k) == (128, "causal", 16384))
    absent = row(shape, "fwd", 1.0, cudnn=1.3)
    assert absent.best_peer == "fa3*"
    assert absent.recorded
    assert absent.ratio == pytest.approx(1.3 / 1.3, rel=0.01)
    present = row(shape, "fwd", 1.0, cudnn=1.3, fa3=1.2)
    assert present.best_peer == "fa3"
    assert present.ratio == pytest.approx(1.2)
    behind_jax = row(shape, "bwd", 1.0, cudnn=1.3, **{"fa3-jax": 1.2})
    assert behind_jax.best_peer == "fa3-jax"
    assert math.isnan(row(shape, "fwd", 1.0).ratio)


def test_summary_is_a_geometric_mean() -> None:
    shape = Shape("s", 1, 1, 64, 100, 100)
    numbers = benchmark.summary([row(shape, "fwd", 1.0, fa2=2.0), row(shape, "fwd", 1.0, fa2=0.5)])["fwd"]
    assert numbers == {"points": 2, "geomean": pytest.approx(1.0), "min": 0.5, "max": 2.0}


def test_table_record_and_picture(tmp_path: Path) -> None:
    rows = [row(shape, mode, 1.0, cudnn=1.1) for shape in fa_grid() for mode in ("fwd", "bwd")]
    json.dumps([one.as_dict() for one in rows])
    console = Console(width=200, record=True, file=(tmp_path / "text").open("w"))
    console.print(tables.bench_table(rows, 780.0, "title"))
    assert "d128 causal 16384" in console.export_text()
    pytest.importorskip("matplotlib")
    plotting.plot(rows, tmp_path / "new" / "picture.png", "title", 780.0)
    assert (tmp_path / "new" / "picture.png").stat().st_size > 10_000


def test_a_row_that_failed_stays_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal by cuflash itself is told, is no ratio, and does not end the session."""

    def refuse(*_: object) -> benchmark.Row:
        raise UnsupportedError("q", 1, "has no kernel")

    monkeypatch.setattr(benchmark, "_measure_row", refuse)
    monkeypatch.setattr(benchmark, "load_ahead", lambda *_: None)
    monkeypatch.setattr(benchmark, "_arrays", lambda *_: {})
    monkeypatch.setattr(benchmark, "eager_on", lambda *_: None)
    rows = list(benchmark.measure(fa_grid((512,)), {}, benchmark.Settings()))
    assert len(rows) == 12
    assert all("has no kernel" in one.failure and one.as_dict()["cuflash"] is None for one in rows)
    assert benchmark.summary(rows) == {}
    assert json.loads(json.dumps([one.as_dict() for one in rows], allow_nan=False))


def test_unknown_peers_are_named() -> None:
    with pytest.raises(KeyError, match="no peer fa9; there are: auto, none, cudnn"):
        peers.chosen("fa9")
    assert peers.chosen("none") == ({}, {})


def test_a_peer_that_refuses_leaves_its_reason() -> None:
    class Grumpy(peers_base.Peer):
        name = "grumpy"

        def prepare(self, arrays: object, shape: Shape, mode: str) -> peers_base.Contestant:
            peers_base.refuse(shape, softcap=True)
            return peers_base.Contestant(self.name, lambda: None)

    capped, plain = Shape("a", 1, 1, 64, 8, 8, softcap=5.0), Shape("b", 1, 1, 64, 8, 8)
    assert peers.contestants({"grumpy": Grumpy()}, {}, capped, "fwd") == ([], {"grumpy": "ValueError: has no softcap"})
    assert [one.name for one in peers.contestants({"grumpy": Grumpy()}, {}, plain, "fwd")[0]] == ["grumpy"]


@pytest.mark.parametrize("count", range(1, 9))
def test_everyone_is_timed_after_everyone_equally_often(count: int) -> None:
    """A contestant heats or cools the card for whoever comes next."""
    orders = benchmark.balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    places = Counter((number, place) for order in orders for place, number in enumerate(order))
    followers = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == count * count
    assert len(followers) == count * (count - 1)
    assert len(set(places.values())) == 1
    assert len(set(followers.values())) <= 1


def test_a_time_that_no_tensor_core_can_reach_does_not_compete() -> None:
    figures = {name: benchmark.Figure(1.0, tflops, 1.0) for name, tflops in (("cuflash", 800.0), ("fa3", 1167.0))}
    assert benchmark.drop_impossible(figures, None) == {}
    refused = benchmark.drop_impossible(figures, 1070.0)
    assert list(figures) == ["cuflash"]
    assert list(refused) == ["fa3"]
    assert refused["fa3"].startswith("1167 TFLOP/s: the tensor cores have 1070 at the highest clock")


def test_a_peer_is_named_with_its_package_and_version() -> None:
    class Numpy(peers_base.Peer):
        module = "numpy.linalg"

        def prepare(self, arrays: object, shape: Shape, mode: str) -> peers_base.Contestant:
            raise ValueError

    assert Numpy().version() == f"numpy {np.__version__}"


def test_a_peer_cannot_live_on_what_another_one_left() -> None:
    """Its memory is poisoned before it is asked: what it does not write is NaN and not somebody else's answer."""

    class Lazy(peers_base.Peer):
        name = "lazy"
        memory = np.ones(4)

        def poison(self, results: Any) -> None:
            self.memory[:] = np.nan

        def prepare(self, arrays: object, shape: Shape, mode: str) -> peers_base.Contestant:
            return peers_base.Contestant(self.name, lambda: self.memory)

    ready, refused = peers.contestants({"lazy": Lazy()}, {}, Shape("a", 1, 1, 64, 8, 8), "fwd", [np.ones(4)])
    assert ready == []
    assert "computes something else" in refused["lazy"]


@pytest.mark.parametrize(
    "answer", [np.ones((2, 3)), np.full((2, 3), np.nan), np.zeros((3, 2))], ids=["values", "NaN", "shape"]
)
def test_a_peer_that_computes_something_else_does_not_compete(answer: np.ndarray[Any, Any]) -> None:
    class Hasty(peers_base.Peer):
        name = "hasty"

        def prepare(self, arrays: object, shape: Shape, mode: str) -> peers_base.Contestant:
            return peers_base.Contestant(self.name, lambda: answer)

    shape, right = Shape("a", 1, 1, 64, 8, 8), np.full((2, 3), 2.0, np.float32)
    ready, refused = peers.contestants({"hasty": Hasty()}, {}, shape, "fwd", [right])
    assert ready == [] and "something else" in refused["hasty"]
    answer = right * np.float32(1.01)
    assert len(peers.contestants({"hasty": Hasty()}, {}, shape, "fwd", [right])[0]) == 1


def test_presets_reduce_without_changing_what_they_are() -> None:
    for name in PRESETS:
        for shape in preset_shapes(name):
            small = shape.reduced(64, 2)
            kept = ("head_dim", "head_dim_v", "dtype", "causal", "softcap", "alibi", "scale")
            assert all(getattr(small, field) == getattr(shape, field) for field in kept)
            assert small.num_q_heads % small.num_kv_heads == 0
            assert max(small.seqlen_q, small.seqlen_k) <= 64
            assert (small.num_kv_heads < small.num_q_heads) == (shape.num_kv_heads < shape.num_q_heads)


def test_compare_looks_at_special_values_first() -> None:
    exact = np.array([1.0, -np.inf, 2.0])
    assert compare("x", exact.astype(np.float32), exact, exact, ("-inf",)).ok
    assert "expects none" in compare("x", exact.astype(np.float32), exact, exact).why
    assert "NaN misplaced" in compare("x", np.array([1.0, -np.inf, np.nan]), exact, exact).why
    assert "-inf misplaced" in compare("x", np.array([1.0, 0.0, 2.0]), exact, exact).why
    assert "shape" in compare("x", np.zeros(2), exact, exact).why


def test_compare_allows_twice_the_unfused_error() -> None:
    exact, unfused = np.zeros(2), np.array([0.0, 1e-3])
    assert compare("x", np.array([2e-3, 0.0]), exact, unfused).ok
    assert not compare("x", np.array([2e-3 + 2 * FLOOR, 0.0]), exact, unfused).ok


@pytest.mark.parametrize("shape", odd_grid(), ids=lambda shape: shape.name)
def test_every_odd_shape_has_plans_on_hopper(shape: Shape) -> None:
    from cuflash.catalog import device_here, plans

    kinds = [plan.kind for plan in plans(shape, device_here("sm_90a", "auto"))]
    assert kinds == ["forward", "backward"]


def test_accuracy_is_a_distance_from_float64_on_the_same_inputs() -> None:
    """On the emulator, beside a peer that rounds every step: cuflash's own error, and the peer's, of every result."""

    class Unfused(peers_base.Peer):
        name = "unfused"

        def prepare(self, arrays: Any, shape: Shape, mode: str) -> peers_base.Contestant:
            q, k, v, d_out = (arrays[name] for name in ("q", "k", "v", "d_out"))
            words = {**shape.keywords, "precision": shape.dtype}
            if mode == "fwd":
                return peers_base.Contestant(self.name, lambda: reference.attention(q, k, v, **words)[0])
            return peers_base.Contestant(self.name, lambda: reference.attention_backward(d_out, q, k, v, **words))

    shapes = [shape.reduced(64, 1) for shape in accuracy.accuracy_shapes() if shape.head_dim == 64 and shape.causal]
    rows = list(accuracy.measure(shapes, {"unfused": Unfused()}, eager_on("emulator"), np.asarray, draws=2))
    assert [row.result for row in rows] == ["out", "dq", "dk", "dv"] * 4
    assert all(0 < row.cuflash < 2 * row.peers["unfused"] and row.ratio for row in rows)
    assert all(row.uncertainty and row.uncertainty < 1 and len(row.squares["cuflash"]) == 2 for row in rows)
    record = {"card": "none", "peer_versions": {"unfused": "0"}, "rows": [row.as_dict() for row in rows]}
    assert json.loads(json.dumps(record)) == record
    assert tables.accuracy_table(record).row_count == len(rows)
