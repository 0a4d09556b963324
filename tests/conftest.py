"""The device fixture: every test of values runs on the emulator and, where there is one, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from places import Place

from cuflash.architectures import Device
from cuflash.backends import why_no_gpu

HOPPER = "emulator-sm90"  # dressed as an H200: 132 multiprocessors and the kernels of the sm_90 family first
_places: dict[str, Place] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--family", default="auto", help="kernel family to test: auto, sm80, sm90")


def place(name: str, config: pytest.Config) -> Place:
    """One device for the whole session: its plans and kernels are worth keeping."""
    if name not in _places:
        if name == HOPPER:
            _places[name] = Place("emulator", device=Device.emulated((9, 0), 132))
        else:
            _places[name] = Place(name, config.getoption("--family"))
    return _places[name]


@pytest.fixture(params=["emulator", HOPPER, pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The emulator as an Ampere and as a Hopper GPU, then the GPU."""
    yield from _chosen(request.param, request)


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The GPU alone: for cases that need its size, its streams or its speed."""
    yield from _chosen(request.param, request)


@pytest.fixture
def hopper(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The emulator dressed as an H200 alone."""
    yield from _chosen(HOPPER, request)


@pytest.fixture
def emulator(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The emulator alone: for faults that only it can show."""
    yield from _chosen("emulator", request)


def _chosen(name: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    if name == "gpu" and (reason := why_no_gpu()):
        pytest.skip(f"no GPU: {reason}")
    yield place(name, request.config)
    if name == "gpu":
        import cupy

        cupy.cuda.Device().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
