"""Primitives of sm_90, against NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import primitives
import pytest
from harness import run, traced
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import box, wgmma_rows
from primitive_case import Case
from primitives import SWIZZLES, box_load, box_store, from_element, halves, warpgroup_product

from cuflash.errors import EmulatorError

CASES = {one.name: one for one in primitives.hopper()}


def start_of(one: Case, rank: int) -> tuple[int, ...]:
    return tuple(one.numbers[1 : 1 + rank])[::-1]


def expected_load(one: Case, tensor: np.ndarray) -> np.ndarray:
    sides = one.maps[0].box[::-1]
    wanted = box(tensor, start_of(one, tensor.ndim), sides)
    return lines_in_shared(wanted.reshape(-1, sides[-1]), one.maps[0].swizzle)


def lines_in_shared(rows: np.ndarray, span: int) -> np.ndarray:
    """Rows as they lie in shared memory: one span apart, swizzled; 0xFF between them if they are narrower."""
    raw = np.ascontiguousarray(rows).view(np.uint8)
    if span == 0:
        return raw.ravel()
    image = np.full(len(rows) * span, 0xFF, np.uint8)
    row, byte = np.indices(raw.shape)
    offset = row * span + byte
    image[offset ^ ((offset >> 7 & (span // 16 - 1)) << 4)] = raw
    return image


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("tma_load")])
def test_tensor_load(name: str) -> None:
    one = CASES[name]
    np.testing.assert_array_equal(run(one), expected_load(one, one.inputs[0]))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_tensor_load_anywhere(data: st.DataObject) -> None:
    """Boxes inside, overhanging and outside tensors of every rank."""
    rank = data.draw(st.integers(2, 5))
    span = data.draw(st.sampled_from(SWIZZLES))
    shape = (
        *data.draw(st.lists(st.integers(1, 6), min_size=rank - 1, max_size=rank - 1)),
        8 * data.draw(st.integers(1, 9)),
    )
    sides = (*data.draw(st.lists(st.integers(1, 4), min_size=rank - 1, max_size=rank - 1)), (span or 64) // 2)
    start = (*(data.draw(st.integers(-5, n + 3)) for n in shape[:-1]), 8 * data.draw(st.integers(-2, 10)))
    tensor = np.arange(1, 1 + np.prod(shape)).reshape(shape).astype(np.uint16)
    one = box_load("anywhere", tensor, start, sides, span)
    np.testing.assert_array_equal(run(one), expected_load(one, tensor))


@pytest.mark.parametrize(("span", "width"), [(128, 16), (128, 48), (64, 16), (32, 8)])
def test_narrow_boxes_keep_the_pitch_of_their_swizzle(span: int, width: int) -> None:
    """As an H200 lays them out; the bytes that arrive are the box's."""
    tensor = np.arange(40 * 72).reshape(40, 72).astype(np.uint16)
    one = box_load("narrow", tensor, (3, 8), (16, width), span)
    footprint = 16 * span
    numbers = (footprint, *one.numbers[1:])
    out = np.zeros(footprint, np.uint8)
    wide = dataclasses.replace(one, out=out, numbers=numbers, shared_bytes=footprint + 1024)
    np.testing.assert_array_equal(run(wide), expected_load(wide, tensor))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t, d: box_load("x", t, (3, 9), (16, 32), 64), "innermost coordinate 9: .* multiple of 16 bytes"),
        (lambda t, d: box_load("x", t, (3, -4), (16, 32), 64), "innermost coordinate -4"),
        (lambda t, d: box_store("x", t, d, (-3, 0), 64, False), "coordinate -3 of dimension 1: only loads may begin"),
        (lambda t, d: box_store("x", t, d, (2, -8), 64, False), "coordinate -8 of dimension 0: only loads may begin"),
    ],
)
def test_what_hopper_refuses_is_refused(make: Callable[..., Case], words: str) -> None:
    """Each of these was an illegal instruction on an H200."""
    tensor, data = np.zeros((20, 72), np.uint16), np.zeros((16, 32), np.uint16)
    with pytest.raises(EmulatorError, match=words):
        run(make(tensor, data))


def expected_store(one: Case, data: np.ndarray, start: tuple[int, ...], combine: object) -> np.ndarray:
    want = one.out.copy()
    for place in np.ndindex(*data.shape):
        target = tuple(s + p for s, p in zip(start, place, strict=True))
        if all(0 <= t < n for t, n in zip(target, want.shape, strict=True)):
            want[target] = combine(want[target], data[place])  # type: ignore[operator]
    return want


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_tensor_store_anywhere(data: st.DataObject) -> None:
    """Stores and reductions touch the part of the box that is inside, and nothing else."""
    rank = data.draw(st.integers(2, 5))
    reduce = data.draw(st.booleans())
    span = data.draw(st.sampled_from(SWIZZLES))
    dtype = np.float32 if reduce else np.uint16
    unit = 16 // np.dtype(dtype).itemsize
    shape = (
        *data.draw(st.lists(st.integers(1, 5), min_size=rank - 1, max_size=rank - 1)),
        unit * data.draw(st.integers(1, 9)),
    )
    sides = (
        *data.draw(st.lists(st.integers(1, 3), min_size=rank - 1, max_size=rank - 1)),
        (span or 64) // np.dtype(dtype).itemsize,
    )
    start = (*(data.draw(st.integers(0, n + 2)) for n in shape[:-1]), unit * data.draw(st.integers(0, 10)))
    tensor = np.full(shape, 3, dtype)
    source = np.arange(1, 1 + np.prod(sides)).reshape(sides).astype(dtype)
    one = box_store("anywhere", tensor, source, start, span, reduce)
    want = expected_store(one, source, start, (lambda x, y: x + y) if reduce else (lambda x, y: y))
    np.testing.assert_array_equal(run(one), want)


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_tensor_reduction_in_16_bits(element: str) -> None:
    name = f"tma_reduce_{element}"
    one = CASES[name]
    want = from_element(one.out.copy())
    want[6:, 16:] += from_element(halves(name, (8, 32), element))[: 12 - 6, : 40 - 16]
    np.testing.assert_array_equal(from_element(run(one)), want)


def test_lines() -> None:
    for name, factor in (("bulk_false", 1), ("bulk_true", 2)):
        np.testing.assert_array_equal(run(CASES[name]), CASES[name].inputs[0] * factor)


def test_phases() -> None:
    """A fresh barrier is past parity 1 and not past 0; one phase later the other way round."""
    out = run(CASES["phases"])
    assert out[0] == 0b0110
    assert (out[1:] == 0).all()


def test_registers_and_election() -> None:
    np.testing.assert_array_equal(run(CASES["trade_registers"]), np.arange(1, 13))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("wgmma")])
def test_wgmma(name: str) -> None:
    """Every swizzle and majorness, from shared memory and from registers."""
    one = CASES[name]
    _, element, n, span, _ = name.split("_")
    n, depth = int(n[1:]), (int(span) or 64) // 2
    a, b = (from_element(halves(name + x, (rows, depth), element)) for x, rows in (("a", 64), ("b", n)))
    rows, columns = wgmma_rows(n)
    result = traced(one)
    np.testing.assert_array_equal(result.out, (a @ b.T)[rows, columns])
    assert result.statistics.wgmma == depth // 16


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", range(8, 257, 8))
@pytest.mark.parametrize("registers", [False, True])
def test_wgmma_of_every_width(n: int, registers: bool) -> None:
    one = warpgroup_product("float16", n, 128, 0, 0, registers)
    a, b = (halves(one.name + x, (rows, 64)).astype(np.float32) for x, rows in (("a", 64), ("b", n)))
    np.testing.assert_array_equal(run(one), (a @ b.T)[wgmma_rows(n)])
