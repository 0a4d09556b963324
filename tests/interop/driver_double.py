"""A CUDA driver that only writes down what it is told."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cuflash.interop.driver import LaunchConfig

ENTRY_POINTS = (
    "cuLaunchKernelEx",
    "cuCtxGetDevice",
    "cuTensorMapEncodeTiled",
    "cuMemsetD32Async",
    "cuStreamIsCapturing",
)
Launched = tuple[int, tuple[int, ...], bytes]  # handle, (grid, block, shared bytes, stream), parameters


class WritingDriver:
    """Entry points as the driver has them; what they are asked is kept in order."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.attributes: list[list[tuple[int, list[int]]]] = []
        self.cleared: list[tuple[int, int, int]] = []
        self.param_bytes: dict[int, int] = {}
        self.device = 0
        pointer = ctypes.c_void_p
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 4)(self._run)
        self.cuCtxGetDevice = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(self._current)
        shape = (pointer, ctypes.c_int, ctypes.c_uint32, *[pointer] * 5, *[ctypes.c_int] * 4)
        self.cuTensorMapEncodeTiled = ctypes.CFUNCTYPE(ctypes.c_int, *shape)(self._encode)
        clear = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_uint, ctypes.c_size_t, pointer)
        self.cuMemsetD32Async = clear(self._clear)

        self.captured: set[int] = set()  # streams
        state = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.POINTER(ctypes.c_int))
        self.cuStreamIsCapturing = state(self._is_capturing)
        self.contexts: list[int] = []
        self.current: int | None = 0xC0
        self.cuCtxGetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(pointer))(self._current_context)
        self.cuDevicePrimaryCtxRetain = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(pointer), ctypes.c_int)(
            self._retain
        )
        self.cuCtxSetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(self._set)

    def _current_context(self, context: Any) -> int:
        context[0] = self.current
        return 0

    def _is_capturing(self, stream: int | None, status: Any) -> int:
        status[0] = int((stream or 0) in self.captured)
        return 0

    def _retain(self, context: Any, device: int) -> int:
        context[0] = 0xC0 + device
        return 0

    def _set(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _run(self, config: int, handle: int, arguments: int, _: Any) -> int:
        c = LaunchConfig.from_address(config)
        used = [c.attributes[i] for i in range(c.num_attributes)]
        self.attributes.append([(a.id, list(a.value[:3])) for a in used])
        params = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        sizes = (c.grid[0], c.block[0], c.shared_bytes, c.stream or 0)
        assert (c.grid[1], c.grid[2], c.block[1], c.block[2]) == (1, 1, 1, 1)
        assert params is not None and params % 64 == 0
        self.launched.append((handle, sizes, ctypes.string_at(params, self.param_bytes[handle])))
        return 700 if handle == 0xBAD else 0

    def _current(self, device: Any) -> int:
        device[0] = self.device
        return 0

    def _encode(self, place: int, dtype: int, rank: int, address: int, dims: int, *rest: Any) -> int:
        ctypes.memmove(place, np.array([dtype, rank, address, rest[-2]], np.int64).tobytes(), 32)
        return 0

    def _clear(self, address: int, value: int, count: int, stream: int) -> int:
        self.cleared.append((address, count, stream or 0))
        return 0


def drive(library: Any, driver: Any | None) -> None:
    """Puts the double where the compiled launcher has the CUDA driver; None takes it away."""
    points = (getattr(driver, name, None) for name in ENTRY_POINTS)
    library.cuflash_set_driver(*(point and ctypes.cast(point, ctypes.c_void_p) for point in points))
