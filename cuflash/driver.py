"""The CUDA driver's library, opened on first use: for tensor maps and for launches, which it makes faster than CuPy."""

from __future__ import annotations

import ctypes
from functools import cache

from cuflash.errors import DeviceError

__all__ = ["check", "libcuda"]


@cache
def libcuda() -> ctypes.CDLL:
    """The driver.

    Raises:
        DeviceError: there is none.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError("libcuda.so.1", str(error), "must be loadable", "install an NVIDIA driver") from error
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[unsigned] * 7, *[pointer] * 3]
    library.cuTensorMapEncodeTiled.restype = ctypes.c_int
    return library


def check(what: str, status: int) -> None:
    """Raises DeviceError when a driver call failed."""
    if status:
        text = ctypes.c_char_p()
        libcuda().cuGetErrorString(status, ctypes.byref(text))
        raise DeviceError(what, (text.value or b"unknown").decode(), f"failed in the driver with status {status}")
