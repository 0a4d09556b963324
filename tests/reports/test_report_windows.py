"""Reported faults: inclusive bounds taken as sizes, negative bounds that mean unlimited, cost of a narrow window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import case, dense
from oracle import assert_right
from places import Place

from cuflash.errors import ArgumentError
from cuflash.problem import Keywords, Problem, spec_of_contiguous


@pytest.mark.parametrize("window", [(2, 0), (0, 0), (2, 1), (0, 2)], ids=str)
def test_bounds_are_inclusive(device: Place, window: tuple[int, int]) -> None:
    """Row i sees exactly i - left to i + right, clipped: the nonzero channels of one-hot values."""
    zeros = np.zeros((1, 8, 1, 32), np.float32)
    found = device.forward({"q": zeros, "k": zeros, "v": np.eye(8, 32, dtype=np.float32)[None, :, None]}, window=window)
    left, right = window
    for row in range(8):
        seen = set(np.flatnonzero(found["out"][0, row, 0]))
        assert seen == set(range(max(row - left, 0), min(row + right, 7) + 1)), row


@pytest.mark.parametrize("window", [(-4096, 0), (-2, 0), (-1, 0), (0, -1)], ids=str)
def test_negative_bounds_are_refused(window: tuple[int, int]) -> None:
    spec = spec_of_contiguous((1, 64, 1, 32), "bfloat16")
    with pytest.raises(ArgumentError, match="window"):
        Problem.forward(spec, spec, spec, Keywords(window=window))


def test_none_is_the_only_unlimited_bound(device: Place) -> None:
    arrays = case(dense(1, 1, 1, 64, 64, 32), 1)
    words: dict[str, Any] = {"window": (None, 0)}
    assert_right(device.both(arrays, **words), arrays, causal=True)


@pytest.mark.parametrize("align", [2**30 - 1, 1 - 2**30])
@pytest.mark.parametrize("window", [(0, None), (None, 1), (2**40, 0), (0, 2**63)], ids=str)
def test_open_sides_stay_open_far_from_the_diagonal(
    device: Place, window: tuple[int | None, int | None], align: int
) -> None:
    """An open side as a large number of keys would close again where the queries stand far from them."""
    arrays = case(dense(1, 1, 1, 33, 50, 32), 6)
    assert_right(device.both(arrays, window=window, align=align), arrays, window=window, align=align)


@pytest.mark.parametrize("left", [1024, 1023, 1025, 127, 128, 129])
@pytest.mark.exhaustive
def test_windows_of_a_long_sequence(gpu: Place, left: int) -> None:
    arrays = case(dense(1, 64, 64, 2048, 2048, 64, dtype="float16"), 2)
    del arrays["d_out"]
    words: dict[str, Any] = {"window": (left, 0), "scale": 1.0}
    assert_right(gpu.forward(arrays, **words), arrays, **words)


@pytest.mark.parametrize("left", [63, 64, 65, 127, 128, 129])
def test_windows_next_to_tile_edges(device: Place, left: int) -> None:
    arrays = case(dense(1, 1, 1, 260, 260, 64, dtype="float16"), 3)
    words: dict[str, Any] = {"window": (left, 0), "scale": 1.0}
    assert_right(device.both(arrays, **words), arrays, **words)


@pytest.mark.exhaustive
def test_time_of_a_narrow_window_grows_with_the_length(gpu: Place) -> None:
    import cupy

    medians = []
    for seqlen in (4096, 16384):
        host = case(dense(1, 8, 8, seqlen, seqlen, 64), 4)
        arrays = {name: gpu.put(host[name]) for name in "qkv"}
        times = []
        for _ in range(20):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            gpu.eager.forward(arrays, Keywords(window=(64, 64)))
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end))
        medians.append(float(np.median(times[5:])))
    assert medians[1] < 5 * medians[0], medians


def test_work_of_a_narrow_window_grows_with_the_length(emulator: Place) -> None:
    """Four times the rows, at most five times the matrix products; without a window it would be sixteen."""
    counts = []
    for seqlen in (512, 2048):
        arrays = case(dense(1, 1, 1, seqlen, seqlen, 64, dtype="float16"), 4)
        with emulator.schedule() as statistics:
            emulator.both(arrays, window=(16, 16))
        counts.append(sum(launch.mma + launch.wgmma for launch in statistics))
    assert counts[0] > 0 and counts[1] < 5 * counts[0], counts


def test_keys_outside_the_window_are_never_read(emulator: Place) -> None:
    """Two key blocks in ten are seen: the other eight hold NaN, which a walk over every block would multiply."""
    arrays = case(dense(1, 1, 1, 64, 1280, 64, dtype="float16"), 5)
    hidden = np.arange(1280) < 1280 - 64 - 64
    arrays["k"][:, hidden] = arrays["v"][:, hidden] = 0
    words: dict[str, Any] = {"window": (64, 0), "deterministic": True}
    clean = emulator.both(arrays, **words)
    arrays["k"][:, hidden] = arrays["v"][:, hidden] = np.nan
    found = emulator.both(arrays, **words)
    assert all(np.array_equal(found[name], clean[name]) for name in clean)
