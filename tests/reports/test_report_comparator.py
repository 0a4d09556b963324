"""Reported fault: a comparator that passes where one side is NaN. Ours is fed faults and must name each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from arrays import case, dense
from oracle import expected, faults

from cuflash.check import compare

PAIRS = {  # reference, result, what may stand in both, verdict
    "NaN against 0": (math.nan, 0.0, (), False),
    "0 against NaN": (0.0, math.nan, (), False),
    "NaN against NaN": (math.nan, math.nan, (), False),
    "inf against inf": (math.inf, math.inf, (), False),
    "-inf against -inf": (-math.inf, -math.inf, (), False),
    "-inf against inf": (-math.inf, math.inf, ("+inf", "-inf"), False),
    "expected NaN against NaN": (math.nan, math.nan, ("NaN",), True),
    "expected inf against inf": (math.inf, math.inf, ("+inf",), True),
    "expected -inf against -inf": (-math.inf, -math.inf, ("-inf",), True),
    "expected NaN against 0": (math.nan, 0.0, ("NaN",), False),
    "0 against inf": (0.0, math.inf, ("+inf",), False),
    "1 against 1": (1.0, 1.0, (), True),
    "1 against 1.1": (1.0, 1.1, (), False),
}


@pytest.mark.parametrize(("exact", "got", "special", "passes"), PAIRS.values(), ids=PAIRS)
def test_special_values_are_compared_before_values(exact: float, got: float, special: Any, passes: bool) -> None:
    with np.errstate(invalid="ignore"):
        sides = [np.array([0.5, value], np.float32) for value in (got, exact, exact)]
        assert compare("out", sides[0], sides[1].astype(np.float64), sides[2], special=special).ok is passes


def test_shape_and_dtype_are_compared() -> None:
    row = np.zeros((1, 3))
    assert not compare("out", row[0].astype(np.float32), row, row).ok
    arrays = case(dense(1, 2, 1, 5, 6, 8, dtype="float16"))
    right = {name: array.astype(np.float16) for name, array in expected(arrays).items() if name != "lse"}
    assert faults(right, arrays) == []
    assert any("dtype" in line for line in faults({"out": right["out"].astype(np.float32)}, arrays))


def test_an_unfused_overflow_does_not_widen_the_budget() -> None:
    """Infinity in the unfused result says nothing of the kernel: the budget comes from what is finite."""
    exact, unfused = np.array([1.0, 2.0]), np.array([np.inf, 2.0], np.float32)
    assert not compare("out", np.array([9.0, 2.0], np.float32), exact, unfused).ok


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_one_wrong_element_is_enough(name: str) -> None:
    arrays = case(dense(1, 2, 1, 40, 41, 16, dtype="float16"))
    right = expected(arrays, "float16")
    found = {n: a.astype(np.float32 if n == "lse" else np.float16) for n, a in right.items()}
    assert faults(found, arrays) == []
    for wrong in (0.2, math.nan, math.inf):
        spoiled = {**found, name: found[name].copy()}
        spoiled[name].reshape(-1)[-1] += np.float16(wrong)
        assert [line.split(":")[0] for line in faults(spoiled, arrays)] == [name]
