"""The Python side: options, builds, arrays with gaps, tensor maps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import plan_of, run
from primitive_case import Case

from cuflash import emulator, emulator_build, emulator_tensor_map
from cuflash.emulator_options import EmulatorOptions
from cuflash.emulator_structs import describe
from cuflash.errors import EmulatorError
from cuflash.plan import TensorMapSlot


def round_trip(data: np.ndarray[Any, Any]) -> Case:
    """64 threads copy 4 bytes each."""
    return Case("x", "memory", "round_trip<float>", (data,), np.zeros(64, np.float32), (), (), 64, 1, 256)


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("SEED", "41"), ("RACE", "1"), ("TIMING", "late"), ("WATCHDOG", "2.5")):
        monkeypatch.setenv(f"CUFLASH_EMULATOR_{name}", text)
    options = EmulatorOptions.from_environment()
    assert options == EmulatorOptions(seed=41, race=True, timing="late", watchdog=2.5)


def test_a_bad_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_EMULATOR_RACE", "perhaps")
    with pytest.raises(EmulatorError, match="CUFLASH_EMULATOR_RACE='perhaps'"):
        EmulatorOptions.from_environment()


# --- builds ----------------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EmulatorError, match=r"apt-get install g\+\+.*conda install.*xcode-select"):
        emulator_build._compiler.__wrapped__()


def test_libraries_are_built_once() -> None:
    source = round_trip(np.zeros(64, np.float32)).source()
    path = emulator_build.kernel_library(source, False)
    stamp = path.stat().st_mtime_ns
    emulator_build.kernel_library.cache_clear()
    assert emulator_build.kernel_library(source, False) == path
    assert path.stat().st_mtime_ns == stamp
    assert emulator_build.kernel_library(source, True) != path


def test_a_kernel_that_does_not_compile_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUFLASH_EMULATOR_CACHE", str(tmp_path))
    with pytest.raises(EmulatorError, match=r"does not compile[\s\S]*no_such_thing[\s\S]*command: "):
        emulator_build.kernel_library("int x = no_such_thing;", False)
    assert not list(tmp_path.glob("*.so"))


# --- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "run_bytes", "extents", "strides"),
    [
        (np.s_[:, :, :], 4 * 5 * 6 * 7, [], []),
        (np.s_[:, :, :3], 4 * 3, [30], [28]),
        (np.s_[:, 1:3, :], 4 * 14, [5], [168]),
        (np.s_[::2, :, :3], 12, [3, 6], [336, 28]),
        (np.s_[::-1, :, ::2], 4, [30, 4], [28, 8]),
        (np.s_[2:3, 3:4, 4:5], 4, [], []),
    ],
)
def test_arrays_are_described_by_their_runs(view: Any, run_bytes: int, extents: list[int], strides: list[int]) -> None:
    array = np.arange(210, dtype=np.float32).reshape(5, 6, 7)[view]
    entry = describe("x", array, False)
    assert (entry.run_bytes, list(entry.extents[: entry.dims]), list(entry.strides[: entry.dims])) == (
        run_bytes,
        extents,
        strides,
    )
    places = np.indices(array.shape).reshape(3, -1).T @ np.array(array.strides) + array.ctypes.data
    assert (entry.base, entry.bytes) == (places.min(), places.max() + 4 - places.min())


def test_reading_between_rows_is_out_of_bounds() -> None:
    """Rows of 64 bytes, 128 apart: 64 threads that read 4 bytes each leave the first row."""
    rows = np.zeros((4, 32), np.float32)[:, :16]
    with pytest.raises(
        EmulatorError, match=r"out-of-bounds global read of 4 bytes: byte \d+ of in0 is between its rows"
    ):
        run(round_trip(rows))


def test_the_last_row_has_no_gap_behind_it() -> None:
    rows = np.zeros((4, 32), np.float32)[:, :16]
    with pytest.raises(EmulatorError, match="of in0"):
        run(round_trip(rows[3:]))


def test_broadcast_arrays_are_known_by_their_extent() -> None:
    entry = describe("x", np.broadcast_to(np.float32(3), (8, 8)), False)
    assert (entry.bytes, entry.dims) == (4, 0)


# --- launches --------------------------------------------------------------------------------------------------------


def test_parameter_size_and_threads_are_compared() -> None:
    plan = plan_of(round_trip(np.zeros(64, np.float32)))
    arrays = round_trip(np.zeros(64, np.float32)).operands()
    launch = plan.launches[0]
    for changed, words in (
        (dataclasses.replace(launch, params=launch.params[:-8]), "504 parameter bytes, the kernel has 512"),
        (dataclasses.replace(launch, block=96), "96 threads must be a multiple of 32 up to the declared 64"),
        (dataclasses.replace(launch, block=40), "40 threads must be"),
    ):
        with pytest.raises(EmulatorError, match=words):
            emulator.execute(dataclasses.replace(plan, launches=(changed,)), arrays)


def test_workspace_is_allocated_and_poisoned() -> None:
    plan = plan_of(round_trip(np.zeros(64, np.float32)))
    launch = plan.launches[0]
    pointers = tuple(dataclasses.replace(p, operand="workspace") if p.operand == "in0" else p for p in launch.pointers)
    arrays = {"out": np.zeros(64, np.float32)}
    changed = dataclasses.replace(plan, launches=(dataclasses.replace(launch, pointers=pointers),), workspace_bytes=256)
    emulator.execute(changed, arrays)
    assert np.isnan(arrays["out"]).all()


# --- tensor maps -----------------------------------------------------------------------------------------------------

SLOT = TensorMapSlot(0, "x", "float16", (64, 10), (128,), (32, 8), 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strides_bytes": (120,)}, "multiples of 16"),
        ({"box": (64, 8)}, "exceeds the swizzle's span"),
        ({"box": (4, 8), "swizzle": 0}, "inner side of 8 bytes"),
        ({"box": (32, 257)}, "1 to 256"),
        ({"dims": (64, 0)}, "every dimension"),
        ({"dims": (64,)}, "one stride less"),
    ],
)
def test_tensor_maps_follow_the_drivers_rules(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EmulatorError, match=words):
        emulator_tensor_map.encode(dataclasses.replace(SLOT, **change), 4096)


def test_tensor_map_address() -> None:
    assert len(emulator_tensor_map.encode(SLOT, 4096)) == 128
    with pytest.raises(EmulatorError, match="address 0x1008 must be a multiple of 16"):
        emulator_tensor_map.encode(SLOT, 4104)
