"""Primitives that move data on every GPU since sm_80, against NumPy."""

from __future__ import annotations

import numpy as np
import primitives
import pytest
from harness import run
from hypothesis import given, settings
from hypothesis import strategies as st
from primitive_case import Case

LEAN = {one.name: one for one in primitives.lean()}
HOPPER = {one.name: one for one in primitives.hopper()}


def tiles_of(image: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """[4, 8, 8]: the rows that the lanes point at."""
    return image[lanes[:, None] // 2 + np.arange(8)].reshape(4, 8, 8)


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_ldmatrix(tiles: int, transposed: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    image = random.integers(0, 65536, 512).astype(np.uint16)
    lanes = (random.permutation(64)[:32] * 16).astype(np.uint32)
    entry = f"load_matrix<{tiles}, {str(transposed).lower()}>"
    out = run(Case("x", "memory", entry, (image, lanes), np.zeros((32, tiles), np.uint32), (1024,), (), 32, 1, 1024))
    loaded = tiles_of(image, lanes)[:tiles].astype(np.uint32)
    loaded = loaded.transpose(0, 2, 1) if transposed else loaded
    lane = np.arange(32)
    want = loaded[:, lane // 4, lane % 4 * 2] | loaded[:, lane // 4, lane % 4 * 2 + 1] << 16
    np.testing.assert_array_equal(out, want.T)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_undoes_ldmatrix(transposed: bool) -> None:
    one = HOPPER[f"stmatrix_x4_{str(transposed).lower()}"]
    image, lanes, registers = one.inputs
    after = tiles_of(run(one), lanes).astype(np.uint32)
    after = after.transpose(0, 2, 1) if transposed else after
    lane = np.arange(32)
    np.testing.assert_array_equal(
        (after[:, lane // 4, lane % 4 * 2] | after[:, lane // 4, lane % 4 * 2 + 1] << 16).T, registers
    )
    untouched = np.setdiff1d(np.arange(64), lanes // 16)
    np.testing.assert_array_equal(run(one).reshape(64, 8)[untouched], image.reshape(64, 8)[untouched])


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_fills_with_zeros(size: int) -> None:
    one = LEAN[f"cp_async_{size}"]
    data, valid = one.inputs
    want = np.where(np.arange(size) < valid[:, None], data.reshape(64, size), 0)
    np.testing.assert_array_equal(run(one).reshape(64, size), want)


@pytest.mark.parametrize("name", [name for name in LEAN if name.startswith(("round_trip", "cp_async_groups"))])
def test_round_trips(name: str) -> None:
    np.testing.assert_array_equal(run(LEAN[name]), LEAN[name].inputs[0])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_reductions(width: int) -> None:
    one = LEAN[f"reduce_{width}"]
    out = run(one)
    factors = np.arange(1, 5) * (np.arange(4) < width)
    np.testing.assert_array_equal(out[:4], one.inputs[0].sum() * factors)
    np.testing.assert_array_equal(out[4:6].view(np.int32), [64, 7])


def test_reductions_from_several_workers() -> None:
    """Atomics hold when blocks run on several operating-system threads."""
    x = np.ones(64, np.float32)
    out = run(Case("x", "memory", "reduce<4>", (x,), np.zeros(8, np.float32), (), (), 64, 200), workers=3)
    np.testing.assert_array_equal(out[:4], 64 * 200 * np.arange(1, 5))


@pytest.mark.parametrize("workers", [1, 3])
def test_blocks_take_turns(workers: int) -> None:
    """Whoever holds a ticket waits for those who drew before: in any order of blocks, on several threads too."""
    out = run(Case("x", "memory", "relay", (), np.zeros(3, np.uint32), (), (), 32, 9), workers=workers, seed=5)
    want = 0
    for ticket in range(9):
        want = 3 * want + ticket
    np.testing.assert_array_equal(out, [9, 9, want])


def test_block_barrier() -> None:
    out = run(LEAN["reverse"])
    np.testing.assert_array_equal(out[:, 0], np.arange(96))
    assert (out[:, 1] == 1).all()


@pytest.mark.parametrize("seed", range(4))
def test_named_barriers(seed: int) -> None:
    one = LEAN["hand_over"]
    np.testing.assert_array_equal(run(one, seed=seed), one.inputs[0])
