"""NumPy arrays on the CPU emulator: the backend that needs no GPU and runs the same kernel sources."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.architectures import Device, capability_from_environment
from cuflash.dtypes import DTYPES, dtype_of
from cuflash.eager import Eager, element_strides
from cuflash.overlap import shares_memory
from cuflash.plan import Plan
from cuflash.problem import ArraySpec

__all__ = ["NumpyBackend", "eager"]


class NumpyBackend:
    """NumPy arrays; the emulator is dressed as ``device``, by default an A100-like sm_80."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or _device_from_environment()

    def key(self, array: Any) -> Any:
        return (array.shape, array.strides, array.dtype, array.ctypes.data & 15)

    def spec(self, argument: str, array: Any) -> ArraySpec:
        dtype = dtype_of(argument, array.dtype)
        address = array.ctypes.data
        alignment = min(address & -address, 16) if address else 16
        return ArraySpec(array.shape, element_strides(argument, array.strides, dtype), dtype.name, alignment)

    def device(self, arrays: dict[str, Any]) -> Device:
        return self._device

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Filled with NaN bits: an element that no kernel writes shows itself."""
        dtype_numpy = DTYPES[dtype].numpy
        array = np.empty(shape, dtype_numpy)
        array.view(np.uint8).fill(0xFF) if array.size else None
        return array

    def workspace(self, plan: Plan, like: Any) -> Any:
        words = -(-plan.workspace_bytes // 4)
        return np.zeros(words, np.float32) if plan.zeroed else self.empty((words,), "float32", like)

    def contiguous(self, array: Any) -> Any:
        return np.ascontiguousarray(array)

    def overlaps(self, one: Any, other: Any) -> bool:
        return shares_memory(_extent(one), _extent(other))

    def writable(self, array: Any) -> bool:
        return bool(array.flags.writeable)

    def run(self, plan: Plan, operands: dict[str, Any]) -> None:
        from cuflash import emulator

        emulator.execute(plan, operands)


def _extent(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    return array.ctypes.data, array.shape, array.strides, array.dtype.itemsize


def _device_from_environment() -> Device:
    """CUFLASH_EMULATOR_CAPABILITY, such as "9.0", dresses the emulator as another GPU."""
    return Device.emulated(capability_from_environment("CUFLASH_EMULATOR_CAPABILITY", "8.0"))


eager = Eager(NumpyBackend())
