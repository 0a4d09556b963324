"""Planted faults: each must be reported, by name, place and seed; the same kernels without the fault must not."""

from __future__ import annotations

import re

import numpy as np
import pytest
from gemms import expected, gemm_sm80, gemm_sm90
from harness import run, traced
from primitive_case import Case

from cuflash.emulator import EmulatorOptions
from cuflash.errors import EmulatorError

SEEDS = range(4)
NAIVE = EmulatorOptions(random_order=False, timing="eager", poison=False, watchdog=10.0)


def small(entry: str, shared_bytes: int = 4096) -> Case:
    data = np.zeros(1024, np.uint8)
    return Case("fault", "faults", entry, (data,), np.zeros(128, np.uint32), (1000,), (), 128, 1, shared_bytes)


def report_of(case: Case, **options: object) -> str:
    with pytest.raises(EmulatorError) as caught:
        run(case, **options)
    return str(caught.value)


# --- small kernels ---------------------------------------------------------------------------------------------------

SMALL = {
    "read_neighbour<false, false>": r"shared-memory race at smem\+\d+: (read|write) by thread \d+ is not ordered after",
    "read_neighbour<true, false>": r"shared-memory race",  # a shuffle is no barrier
    "read_copy_early": r"read of 4 bytes at smem\+\d+ while an asynchronous copy into it has not been waited for",
    "diverge": r"divergent warp collective: lane \d+ calls (shuffle|sync_warp) while \d+ lanes",
    "leave_early": r"deadlock.*\n.*127 threads .* at .*:\d+ on barrier 0 \(127 of 128 arrived\)\n.*1 thread .* exited",
    "wait_on_two_barriers": r"32 threads \[0\.\.31\] wait at .*:\d+ on barrier 2 \(32 of 64 arrived\)",
    "wait_by_warps": r"barrier 1 for 48 threads: needs a multiple of 32",
    "misalign_shared": r"misaligned shared read of 4 bytes at smem\+2",
    "overrun_global": r"out-of-bounds global read of 4 bytes at byte \d+ of in0 \(nearest array, 1024 bytes\)",
    "write_input": r"write into the read-only array in0",
}


@pytest.mark.parametrize("entry", SMALL)
@pytest.mark.parametrize("seed", SEEDS)
def test_small_fault(entry: str, seed: int) -> None:
    report = report_of(small(entry), seed=seed)
    assert re.search(SMALL[entry], report), report
    assert f"[seed {seed}]" in report


def test_warp_barrier_orders_neighbours() -> None:
    for seed in SEEDS:
        np.testing.assert_array_equal(run(small("read_neighbour<false, true>"), seed=seed), np.arange(128) ^ 1)


def test_shared_overrun() -> None:
    report = report_of(small("overrun_shared", shared_bytes=1024))
    assert re.search(r"out-of-bounds shared read of 4 bytes at smem\+\d+ \(the block has 1024 bytes\)", report)


def test_pointer_overrun_needs_the_instrumented_build() -> None:
    run(small("overrun_pointer"))
    report = report_of(small("overrun_pointer"), instrument=True)
    assert re.search(r"out-of-bounds global read through a pointer \[\S+\] of 4 bytes at byte \d+ of in0", report)


def test_watchdog_ends_a_kernel_that_spins() -> None:
    report = report_of(small("spin"), options=EmulatorOptions(watchdog=0.2))
    assert "watchdog: the launch ran longer than 0.2 seconds" in report


def test_emulator_goes_on_after_a_fault() -> None:
    report_of(small("leave_early"))
    np.testing.assert_array_equal(run(small("read_neighbour<false, true>")), np.arange(128) ^ 1)


# --- sm_80 product ---------------------------------------------------------------------------------------------------

SM80 = {
    "missing_barrier": r"shared-memory race|while an asynchronous copy into it has not been waited for",
    "missing_wait": r"while an asynchronous copy into it has not been waited for",
    # Named after whichever array lies nearest.
    "past_the_tail": r"out-of-bounds global read by cp.async of 16 bytes at byte -?\d+ of (in\d|out) ",
}


@pytest.mark.parametrize("fault", SM80)
@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_sm80_fault(fault: str, race: bool, seed: int) -> None:
    report = report_of(gemm_sm80(130, 70, 192, fault), race=race, seed=seed)
    assert re.search(SM80[fault], report), report


def test_swapped_fragment_gives_wrong_values() -> None:
    case = gemm_sm80(64, 64, 64, "swapped_fragment")
    assert np.abs(run(case) - expected(case)).max() > 1


def test_bank_conflicts_are_counted() -> None:
    plain, swizzled = (traced(gemm_sm80(64, 64, 64, f)).statistics for f in ("no_swizzle", "none"))
    assert swizzled.matrix_conflicts == 0
    assert plain.matrix_conflicts == 7 * plain.matrix_phases


# --- sm_90 product ---------------------------------------------------------------------------------------------------

SM90 = {
    "early_release": r"(copy into smem\+\d+ while an asynchronous read of it has not been waited for|race)",
    "missing_fence": r"missing fence.proxy.async: thread 0 reads smem\+\d+, which thread \d+ wrote as ordinary memory",
    "wrong_bytes": r"deadlock.*\n(.*\n)*.*on mbarrier smem\+\d+ for parity \d \(.* 0 of 1 .* and 16 bytes missing\)",
    "no_slot_wait": r"(too many arrivals|bulk copy into smem\+\d+ while|race|phases while this thread waited)",
    "no_store_wait": r"the thread exits while this store may still read shared memory",
    "no_init_fence": r"lacks mbarrier_init_fence",
    "lonely_wait": r"wgmma_wait where another warp of the warpgroup passes the one at \S+:\d+",
}


@pytest.mark.parametrize("fault", SM90)
@pytest.mark.parametrize("seed", SEEDS)
def test_sm90_fault(fault: str, seed: int) -> None:
    report = report_of(gemm_sm90(64, 128, 320, fault), seed=seed)
    assert re.search(SM90[fault], report), report


@pytest.mark.parametrize("fault", ["early_release", "no_slot_wait"])
def test_sm90_fault_without_the_race_detector(fault: str) -> None:
    """Marks on memory in flight catch these in most schedules."""
    caught = 0
    for seed in range(8):
        try:
            run(gemm_sm90(64, 64, 320, fault), seed=seed, race=False)
        except EmulatorError:
            caught += 1
    assert caught >= 4


def test_reading_accumulators_early_gives_nan() -> None:
    out = run(gemm_sm90(64, 64, 128, "read_before_wait"), race=False)
    assert np.isnan(out).all()


def test_wrong_stride_gives_wrong_values() -> None:
    case = gemm_sm90(64, 64, 64, "wrong_stride")
    assert np.abs(run(case) - expected(case)).max() > 1


# --- without faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gemm_sm80, gemm_sm90])
@pytest.mark.parametrize("shape", [(64, 64, 64), (130, 72, 192), (1, 8, 320)])
def test_correct_kernels_are_not_accused(make: object, shape: tuple[int, int, int]) -> None:
    """No report over seeds and modes, right values, and the same bits whatever the schedule."""
    case = make(*shape)  # type: ignore[operator]
    first = run(case, options=NAIVE, race=False)
    np.testing.assert_allclose(first, expected(case), atol=1e-3)
    for seed in SEEDS:
        for options in ({"race": False}, {"race": True}, {"instrument": True}, {"workers": 2}):
            np.testing.assert_array_equal(run(case, seed=seed, **options), first)


@pytest.mark.parametrize("make", [gemm_sm80, gemm_sm90])
def test_bfloat16(make: object) -> None:
    case = make(70, 64, 128, element="bfloat16")  # type: ignore[operator]
    np.testing.assert_allclose(run(case), expected(case), atol=1e-3)
