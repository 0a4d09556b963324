"""The CUDA driver's library, opened on first use: for tensor maps and for launches, which it makes faster than CuPy."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from cuflash.errors import DeviceError

__all__ = ["CLUSTER", "OVERLAP", "LaunchAttribute", "LaunchConfig", "check", "is_captured", "libcuda"]

CLUSTER, OVERLAP = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int32), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


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
    if hasattr(library, "cuLaunchKernelEx"):  # since CUDA 11.8
        library.cuLaunchKernelEx.argtypes = [pointer] * 4
    library.cuTensorMapEncodeTiled.restype = ctypes.c_int
    return library


def is_captured(driver: Any, stream: int) -> bool:
    """Whether launches on the stream become nodes of a graph.

    A graph gets plain edges: whoever owns it (XLA, say) may copy or update it, and knows of no other kind.
    """
    status = ctypes.c_int()
    return bool(driver.cuStreamIsCapturing(ctypes.c_void_p(stream or None), ctypes.byref(status)) or status.value)


def check(what: str, status: int) -> None:
    """Raises DeviceError when a driver call failed."""
    if status:
        text = ctypes.c_char_p()
        libcuda().cuGetErrorString(status, ctypes.byref(text))
        raise DeviceError(what, (text.value or b"unknown").decode(), f"failed in the driver with status {status}")
