"""Plans of the Hopper forward without a GPU: what it refuses, and that every row of its table compiles clean."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from arrays import stored
from sm90 import H200, Array, arrays_of, plan

from cuflash import plan_sm90, tuning
from cuflash.plan import Plan
from cuflash.problem import Keywords, Problem, spec_of_contiguous
from cuflash.tiling_sm90 import FEW_QUERIES, ROWS, TileSm90
from cuflash.variant import Variant

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


def decode(batch: int, heads: tuple[int, int] = (32, 8), alibi: bool = False, **words: Any) -> Plan:
    """One query against 8192 keys."""
    specs = [
        spec_of_contiguous((batch, rows, count, 128), "bfloat16")
        for rows, count in ((1, heads[0]), (8192, heads[1]), (8192, heads[1]))
    ]
    slopes = spec_of_contiguous(heads[:1], "float32") if alibi else None
    made = plan_sm90.forward(Problem.forward(*specs, Keywords(**words), alibi_slopes=slopes), H200)
    assert isinstance(made, Plan)
    return made


def test_keys_are_split_while_multiprocessors_are_idle() -> None:
    alone = decode(1)
    assert [launch.grid for launch in alone.launches] == [8 * 16, 8]
    assert alone.workspace_bytes == 16 * 32 * (128 + 1) * 4
    assert not alone.zeroed
    assert len(decode(16).launches) == 1


def test_the_parts_are_put_together_by_a_kernel_that_starts_early_and_waits() -> None:
    assert [launch.overlap for launch in decode(1).launches] == [False, True]


def test_keys_that_are_read_once_are_fetched_in_smaller_pieces() -> None:
    """Neither by several tiles of queries, nor by several heads that are not packed into one."""
    many = plan(arrays_of(300, heads=2))
    assert isinstance(many, Plan)
    unpacked = decode(1, alibi=True)
    found = [made.launches[0].tensor_maps for made in (decode(1), decode(16), many, unpacked)]
    assert [[slot.l2_promotion for slot in maps[:3]] for maps in found] == [[128] * 3] * 2 + [[256] * 3] * 2


def test_batch_invariant_never_splits() -> None:
    assert len(decode(1, batch_invariant=True).launches) == 1


def test_heads_are_packed_where_queries_are_few() -> None:
    assert decode(16).launches[0].grid == 16 * 8
    assert decode(16, heads=(24, 8)).launches[0].grid == H200.sm_count  # three heads do not divide a tile


def test_a_dynamic_order_asks_for_a_zero_and_a_static_one_does_not() -> None:
    specs = [spec_of_contiguous((4, 4096, 16, 128), "bfloat16")] * 3
    causal, full = (
        plan_sm90.forward(Problem.forward(*specs, Keywords(causal=causal)), H200) for causal in (True, False)
    )
    assert isinstance(causal, Plan) and isinstance(full, Plan)
    assert causal.zeroed and causal.workspace_bytes
    assert not full.zeroed and not full.workspace_bytes


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"d{row.head_dim}-{'full' if row.uniform else 'causal'}-{row.seqlen_k}"
)
@pytest.mark.parametrize("softcap", [None, 20.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_every_row_of_the_table_compiles_clean(row: Any, dtype: str, softcap: float | None) -> None:
    """No spills, no wgmma that is serialised, no setmaxnreg that is ignored."""
    rows = min(row.seqlen_k, 16384)
    specs = [spec_of_contiguous((16, rows, 8, dim), dtype) for dim in (row.head_dim, row.head_dim, row.head_dim_v)]
    made = plan_sm90.forward(Problem.forward(*specs, Keywords(causal=not row.uniform, softcap=softcap)), H200)
    assert isinstance(made, Plan)
    check_compiles_clean(made)


@pytest.mark.parametrize("line", FEW_QUERIES, ids=lambda line: f"d{line[0]}-v{line[1]}")
def test_every_tile_for_few_queries_compiles_clean(line: tuple[int, int, TileSm90]) -> None:
    head_dim, head_dim_v, _ = line
    specs = [
        spec_of_contiguous((1, rows, heads, dim), "bfloat16")
        for rows, heads, dim in ((1, 8, head_dim), (9000, 2, head_dim), (9000, 2, head_dim_v))
    ]
    made = plan_sm90.forward(Problem.forward(*specs, Keywords(causal=True)), H200)
    assert isinstance(made, Plan)
    assert len(made.launches) == 2
    check_compiles_clean(made)


@cache
def compiler_log(variant: Variant) -> str:
    """Rows that differ in the order of tiles alone are one kernel."""
    return pytest.importorskip("cuflash.jit").compile_cubin(variant, "sm_90a").log


def check_compiles_clean(made: Plan) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    for launch in made.launches:
        log = compiler_log(launch.variant)
        spills = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
        assert spills and not any(spills), log
        assert "C75" not in log, log


def test_the_tuner_climbs_to_the_fastest_neighbour() -> None:
    """On a clock that likes 80 keys and dislikes turns it ends there, and every trial is a plan that fits."""
    specs = [spec_of_contiguous((4, 4096, 16, 128), "bfloat16")] * 3
    problem = Problem.forward(*specs, Keywords(causal=True))
    asked: list[TileSm90] = []

    def time(tiles: Any) -> list[float]:
        asked.extend(tiles)
        return [1 + abs(tile.block_k - 80) + tile.turns for tile in tiles]

    trials = tuning.climb(problem, H200, time, steps=5)
    assert (trials[0].tile.block_k, trials[0].tile.turns) == (80, False)
    assert sum(trial.is_table for trial in trials) == 1
    assert len(set(asked)) == len(asked)
    assert all(isinstance(plan_sm90.forward_with_tile(problem, H200, tile), Plan) for tile in asked)
