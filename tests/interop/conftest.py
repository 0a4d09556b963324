"""What the tests of the doors share: eight fake CPU devices, the emulator as every library's CPU, and small arrays.

A test marked ``works(library, what)`` is a row of the table in docs/frameworks.md, which tests/interop/table.py writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

# Read when JAX opens its CPU backend, which collecting tests does not. Compiling takes most of the time: keep it cheap.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

Array = np.ndarray[Any, Any]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "works(library, what): a row of the table in docs/frameworks.md")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU arrays of JAX, torch and NumPy run the kernels on the emulator."""
    monkeypatch.setenv("CUFLASH_JAX_CPU", "emulator")
    monkeypatch.setenv("CUFLASH_TORCH_CPU", "emulator")
    monkeypatch.setenv("CUFLASH_NUMPY", "emulator")
    from cuflash.interop import numpy as door

    door._place.cache_clear()


@pytest.fixture(autouse=True)
def _numpy_door_decides_again() -> Iterator[None]:
    yield
    from cuflash.interop import numpy as door

    door._place.cache_clear()
