"""Primitives that work on registers, against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import primitives
import pytest
from harness import run
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import mma_registers
from primitive_case import Case
from primitives import awkward_floats, to_element


def case(name: str) -> Case:
    return next(c for c in (*primitives.lean(), *primitives.hopper()) if c.name == name)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["float16", "bfloat16", "float"]), st.integers(0, 2**32 - 1))
def test_mma(element: str, seed: int) -> None:
    """c + a b with the fragments in the documented places."""
    random = np.random.default_rng(seed)
    depth = 8 if element == "float" else 16
    a, b = (random.integers(-64, 65, shape).astype(np.float32) for shape in ((16, depth), (depth, 8)))
    c = random.integers(-99, 100, (16, 8)).astype(np.float32)
    halves = (a, b) if element == "float" else (to_element(a, element), to_element(b, element))
    inputs = tuple(np.ascontiguousarray(x) for x in mma_registers(*halves, c))
    out = run(Case("mma", "registers", f"multiply<{element}>", inputs, np.zeros((32, 4), np.float32)))
    np.testing.assert_array_equal(out, mma_registers(*halves, c + a @ b)[2])


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_conversions(element: str) -> None:
    """Every exponent and every tie, against NumPy and ml_dtypes."""
    values = awkward_floats()
    out = run(case(f"convert_{element}"))
    dtype = np.dtype(np.float16 if element == "float16" else ml_dtypes.bfloat16)
    with np.errstate(over="ignore", invalid="ignore"):
        want = values.astype(dtype)
    bits = want.view(np.uint16).astype(np.uint32)
    bits[np.isnan(values)] = 0x7FFF
    np.testing.assert_array_equal(out[:, 0], bits | np.roll(bits, -1) << 16)
    with np.errstate(invalid="ignore"):
        widened = bits.astype(np.uint16).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(out[:, 2].view(np.float32), widened)


def test_tf32() -> None:
    """Round to nearest, ties away, to ten bits of mantissa."""
    values = awkward_floats()
    bits = run(case("convert_float16"))[:, 1]
    finite = np.isfinite(values)
    want = (values.view(np.uint32)[finite].astype(np.uint64) + 0x1000 & 0xFFFFE000).astype(np.uint32)
    np.testing.assert_array_equal(bits[finite], want)


def test_approximations() -> None:
    """Within two units of the last place, with results and operands below the normal range flushed."""
    one = case("approximate")
    x = one.inputs[0].astype(np.float64)
    out = run(one)
    tiny = np.finfo(np.float32).tiny
    flushed = np.where(np.abs(x) < tiny, np.copysign(0.0, x), x)
    with np.errstate(all="ignore"):
        wants = (np.exp2(x), np.log2(flushed), 1 / flushed, x * x + 1)
        for got, want in zip(out.T, wants, strict=True):
            want32 = np.where(np.abs(want) < tiny, 0.0, want).astype(np.float32)
            np.testing.assert_allclose(got, want32, rtol=2.5e-7, atol=1e-38)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 31), st.integers(0, 31), st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
def test_exchange(mask: int, source: int, words: list[int]) -> None:
    x = np.array(words, np.uint32)
    out = run(Case("exchange", "registers", "exchange", (x,), np.zeros((64, 4), np.uint32), (mask, source), (), 64))
    lanes = np.arange(32)
    for warp in range(2):
        mine, got = x[warp * 32 :][:32], out[warp * 32 :][:32]
        odd = mine % 2 != 0
        np.testing.assert_array_equal(got[:, 0], mine[lanes ^ mask])
        np.testing.assert_array_equal(got[:, 1], mine[(source + lanes) % 32])
        assert (got[:, 2] == (odd.astype(np.uint64) << lanes.astype(np.uint64)).sum()).all()
        assert (got[:, 3] == 2 * odd.any() + odd.all()).all()


def test_identity() -> None:
    out = run(case("identify"))
    t, block = np.arange(3 * 64) % 64, np.arange(3 * 64) // 64
    full = np.full(3 * 64, 0)
    want = np.stack([t, full + 64, block, full + 3, t % 32, t // 32, full, full], 1)
    np.testing.assert_array_equal(out, want)


def test_maximum_ignores_nan() -> None:
    one = case("compare")
    x, y = one.inputs[0], np.roll(one.inputs[0], -1)
    want = np.stack([np.fmax(x, y), np.fmin(x, y), np.abs(x), np.full(32, np.inf, np.float32)], 1)
    np.testing.assert_array_equal(run(one), want)
