"""Features by pairs: a sweep in which every two values of every two features meet, against the one reference.

Most silent faults of attention kernels are an untested pair. What costs a compilation (dtype, mask, score, width of
loads, head dimensions) is covered by few kernels; what costs nothing (lengths, heads, layouts, alignment) varies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from arrays import Layout, case, dense, slopes, stored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import faults
from places import Place

from cuflash import eager
from cuflash.problem import ArraySpec, Problem
from cuflash.scores import Softcap

Choice = Mapping[str, Any]

KERNELS: dict[str, Sequence[Any]] = {
    "dtype": ("float16", "bfloat16", "float32"),
    "mask": ("full", "causal", "window"),
    "score": ("plain", "softcap", "alibi", "both"),
    "dims": ((64, 64), (100, 33)),
    "width": ("vector", "scalar"),
    "deterministic": (False, True),
}
CALLS: dict[str, Sequence[Any]] = {
    "align": ("bottom-right", "top-left", 11),
    "heads": ((2, 2), (4, 2), (3, 1), (1, 1)),
    "batch": (1, 2),
    "lengths": ((64, 64), (70, 33), (33, 70), (1, 65), (65, 1), (130, 129), (17, 140)),
    "bounds": ((3, 0), (0, 5), (70, 1), (None, 2), (9, None)),
    "layout": ("BSHD", "BHSD", "SBHD", "padded rows", "row step 2"),
    "d_lse": (False, True),
    "scale": (None, 1.0, 0.05),
}


def covering(factors: Mapping[str, Sequence[Any]], seed: int) -> list[Choice]:
    """Few choices in which every pair of values of every two factors stands at least once (greedy, seeded)."""
    rng = np.random.default_rng(seed)
    names = list(factors)
    pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while pairs:
        candidates = [{n: int(rng.integers(len(factors[n]))) for n in names} for _ in range(60)]
        a, i, b, j = min(pairs, key=str)
        for candidate in candidates:
            candidate[a], candidate[b] = i, j
        best = max(candidates, key=lambda row: len(met(row, pairs)))
        pairs -= met(best, pairs)
        rows.append({n: factors[n][best[n]] for n in names})
    return rows


def met(row: dict[str, int], pairs: set[tuple[str, int, str, int]]) -> set[tuple[str, int, str, int]]:
    return pairs & {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}


def prepared(choice: Choice, seed: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Arrays in their storages, the same arrays contiguous, and the keywords."""
    (q_heads, kv_heads), (seqlen_q, seqlen_k) = choice["heads"], choice["lengths"]
    shape = dense(choice["batch"], q_heads, kv_heads, seqlen_q, seqlen_k, *choice["dims"], dtype=choice["dtype"])
    words: dict[str, Any] = {name: choice[name] for name in ("align", "deterministic", "scale")}
    if choice["mask"] != "full":
        words |= {"causal": True} if choice["mask"] == "causal" else {"window": choice["bounds"]}
    if choice["score"] in ("softcap", "both"):
        words["softcap"] = 4.0
    plain = case(shape, seed, d_lse=choice["d_lse"])
    if choice["score"] in ("alibi", "both"):
        plain["alibi_slopes"] = slopes(q_heads)
    layout: Any = choice["layout"] if choice["width"] == "vector" else Layout(pad=(0, 0, 0, 1), offset=1)
    arrays = {name: stored(x, layout) if x.ndim == 4 else x for name, x in plain.items()}
    return arrays, plain, words


def check(device: Place, choice: Choice, seed: int) -> None:
    arrays, plain, words = prepared(choice, seed)
    found = device.both(arrays, **words)
    wrong = faults(found, plain, **{name: value for name, value in words.items() if name != "deterministic"})
    assert wrong == [], choice


KERNEL_ROWS = covering(KERNELS, 1)
CALL_ROWS = covering(CALLS, 2)


@pytest.mark.parametrize("row", KERNEL_ROWS, ids=lambda row: " ".join(str(value) for value in row.values()))
def test_pairs_of_kernel_features(device: Place, row: Choice) -> None:
    """Each kernel with several calls, so that call features meet kernel features too."""
    index = KERNEL_ROWS.index(row)
    for turn in range(4):
        call = CALL_ROWS[(4 * index + turn) % len(CALL_ROWS)]
        check(device, {**row, **call}, seed=100 * index + turn)


@pytest.mark.parametrize("kernel", [("float16", "causal", "plain"), ("bfloat16", "window", "both")], ids=" ".join)
def test_pairs_of_call_features(device: Place, kernel: tuple[str, str, str]) -> None:
    for seed, row in enumerate(CALL_ROWS):
        features = dict(zip(KERNELS, (*kernel, (64, 64), "vector", seed % 2 == 0), strict=True))
        check(device, {**row, **features}, seed)


def test_every_pair_is_met() -> None:
    for factors, rows in ((KERNELS, KERNEL_ROWS), (CALLS, CALL_ROWS)):
        for a, b in itertools.combinations(factors, 2):
            for x, y in itertools.product(factors[a], factors[b]):
                assert any(row[a] == x and row[b] == y for row in rows), (a, x, b, y)


choices = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in (KERNELS | CALLS).items()})


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    choices,
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(1, 128),
    st.integers(1, 128),
    st.integers(0, 2**20),
)
def test_random_features(
    device: Place, choice: Choice, seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int, seed: int
) -> None:
    """Everything at once, shrunk by hypothesis to the smallest choice that fails."""
    check(device, {**choice, "lengths": (seqlen_q, seqlen_k), "dims": (head_dim, head_dim_v)}, seed)


# The sweep must notice a wrong kernel: a kernel with these parameters is one that misreads the right ones.
FAULTS: dict[str, Callable[[Problem], Problem]] = {
    "scale 5 per cent off": lambda problem: replace(problem, scale=problem.scale * 1.05),
    "mask one key late": lambda problem: replace(problem, shift=problem.shift + 1),
    "mask one key early": lambda problem: replace(problem, shift=problem.shift - 1),
    "every head reads key head 0": lambda problem: replace(problem, k=without_stride(problem.k, 2)),
    "every head reads value head 0": lambda problem: replace(problem, v=without_stride(problem.v, 2)),
    "every batch reads queries of batch 0": lambda problem: replace(problem, q=without_stride(problem.q, 0)),
    "softcap 10 per cent off": lambda problem: replace(problem, score=Softcap(3.3)),
}


FAULTY = {
    **dict(zip(KERNELS, ("float16", "causal", "softcap", (64, 64), "vector", False), strict=True)),
    **dict(zip(CALLS, ("bottom-right", (4, 2), 2, (70, 90), (0, 0), "BSHD", True, None), strict=True)),
}


def forget(device: Place) -> None:
    """Plans are cached by the call, which does not change here."""
    device.eager._plans.clear()


def without_stride(spec: ArraySpec, axis: int) -> ArraySpec:
    return spec._replace(strides=tuple(0 if i == axis else s for i, s in enumerate(spec.strides)))


@pytest.mark.parametrize("only", ["forward_plan", "backward_plan"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_kernel_fails_the_sweep(
    device: Place, fault: Callable[[Problem], Problem], only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, plain, words = prepared(FAULTY, 1)
    words["softcap"] = 3.0
    right = {name: value for name, value in words.items() if name != "deterministic"}
    forget(device)
    assert faults(device.both(arrays, **words), plain, **right) == []
    forget(device)
    planner = getattr(eager, only)
    monkeypatch.setattr(eager, only, lambda problem, target: planner(fault(problem), target))
    wrong = faults(device.both(arrays, **words), plain, **right)
    forget(device)
    assert wrong != []
    if only == "backward_plan":
        assert all(line.startswith("d") for line in wrong)
