"""CuPy's backend without a GPU: its arrays hold made-up addresses, and the driver only writes down what it is told."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from driver_double import WritingDriver, drive
from test_launcher import needs_compiler
from test_words import plans

from cuflash.interop import launcher as launchers
from cuflash.interop.words import operand_names
from cuflash.plan import Plan

pytest.importorskip("cupy")
from cuflash import jit, launch
from cuflash.interop import cupy as door

DEVICE = 0


class Here:
    """What of CuPy the backend asks."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.allocated = 7, False, 0
        runtime = SimpleNamespace(getDevice=lambda: DEVICE, streamIsCapturing=lambda stream: self.capturing)
        self.cuda = SimpleNamespace(
            Device=contextlib.nullcontext, runtime=runtime, get_current_stream=lambda: SimpleNamespace(ptr=self.stream)
        )

    def ndarray(self, shape: Any, dtype: Any) -> Any:
        self.allocated += 1
        return SimpleNamespace(data=SimpleNamespace(ptr=0x1000 * self.allocated, device_id=DEVICE), shape=shape)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    found = Here()
    monkeypatch.setattr(launch, "cupy", found)
    monkeypatch.setattr(door, "cupy", found)
    monkeypatch.setattr(launch, "_scratches", {})
    return found


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[WritingDriver]:
    found = WritingDriver()
    chosen = launchers.CLauncher(launchers.build())
    drive(chosen.library, found)
    monkeypatch.setattr(door, "launcher", lambda: chosen)
    yield found
    drive(chosen.library, None)


def with_workspace(workspace_bytes: int) -> Plan:
    return replace(plans()[0], workspace_bytes=workspace_bytes)


def test_calls_of_one_thread_on_one_stream_share_a_small_workspace(here: Here) -> None:
    backend, like = launch.CupyBackend(), here.ndarray((1,), "float32")
    small = with_workspace(4096)
    first = backend.workspace(small, like)
    assert backend.workspace(with_workspace(launch._SCRATCH_BYTES), like) is first
    here.stream = 8
    assert backend.workspace(small, like) is not first
    here.stream = 7
    others: list[Any] = []
    thread = threading.Thread(target=lambda: others.append(backend.workspace(small, like)))
    thread.start()
    thread.join()
    assert others[0] is not first
    here.capturing = True
    assert backend.workspace(small, like) is not first, "a graph may be replayed beside anything"
    here.capturing = False
    assert backend.workspace(with_workspace(launch._SCRATCH_BYTES + 4), like) is not first
    assert backend.workspace(small, like) is first


@needs_compiler
def test_a_plan_goes_through_the_compiled_launcher(
    here: Here, driver: WritingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans()[1]
    handles = {step.variant: 0x2000 + number for number, step in enumerate(plan.launches)}
    driver.param_bytes = {handles[step.variant]: len(step.params) for step in plan.launches}

    def load_all(kernels: Iterable[tuple[Any, int]]) -> list[Any]:
        return [SimpleNamespace(kernel=SimpleNamespace(ptr=handles[variant])) for variant, _ in kernels]

    monkeypatch.setattr(jit, "load_all", load_all)
    operands = {name: here.ndarray((1,), "float32") for name in operand_names(plan)}
    door.LaunchedBackend().run(plan, operands)
    assert [handle for handle, _, _ in driver.launched] == [handles[step.variant] for step in plan.launches]
    for (_, (*_, stream), params), step in zip(driver.launched, plan.launches, strict=True):
        assert stream == 7
        for pointer in step.pointers:
            found = int.from_bytes(params[pointer.offset : pointer.offset + 8], "little")
            assert found == operands[pointer.operand].data.ptr + pointer.byte_offset
