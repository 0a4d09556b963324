"""NumPy's door: host arrays in, host arrays out, through the GPU when there is one, else through the emulator.

The emulator runs the same kernels on the CPU and is slow; the first call that needs it says so in one line of the
``cuflash`` log. ``CUFLASH_NUMPY=gpu`` or ``emulator`` chooses by hand.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import numpy as np

from cuflash.backends import DEVICES, why_no_gpu
from cuflash.dtypes import dtype_of
from cuflash.eager import Eager, Gradients
from cuflash.errors import ArgumentError, ArgumentTypeError
from cuflash.host import NumpyBackend
from cuflash.plan import Plan
from cuflash.problem import Keywords

__all__ = ["NumpyDoor", "door"]

logger = logging.getLogger("cuflash")


class NumpyDoor:
    """What ``cuflash.flash_attention`` opens for NumPy arrays."""

    def forward(self, inputs: dict[str, Any], words: Keywords, out: Any = None) -> tuple[Any, Any]:
        """``(out, lse)``, writable and owning their memory."""
        _admit(inputs if out is None else {**inputs, "out": out})
        if _place() == "emulator":
            return _emulator().forward(inputs, words, out)
        if out is not None and not out.flags.writeable:
            raise ArgumentError("out", "a read-only array", "must be writable", "pass a copy")
        found, lse = _gpu().forward(_to_gpu(inputs), words)
        if out is None:
            return found.get(), lse.get()
        if (out.shape, out.dtype) != (found.shape, found.dtype):
            raise ArgumentError("out", (out.shape, str(out.dtype)), f"must be {found.shape} of {found.dtype}")
        out[...] = found.get()
        return out, lse.get()

    def backward(self, inputs: dict[str, Any], words: Keywords) -> Gradients:
        """The gradients."""
        _admit(inputs)
        if _place() == "emulator":
            return _emulator().backward(inputs, words)
        return Gradients(*(gradient.get() for gradient in _gpu().backward(_to_gpu(inputs), words)))

    def explain(self, inputs: dict[str, Any], words: Keywords, backward: bool) -> Plan:
        """The plan for the place where the arrays would run."""
        _admit(inputs)
        if _place() == "emulator":
            return _emulator().explain(inputs, words, backward)
        return _gpu().explain(_to_gpu(inputs), words, backward)


door = NumpyDoor()


def _admit(arrays: dict[str, Any]) -> None:
    """Refuses what has NumPy's interface and more meaning than its bytes.

    Raises:
        ArgumentTypeError: a scalar, a masked array, or a dtype without a kernel, such as another order of bytes.
    """
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ArgumentTypeError(name, type(array).__name__, "must be an array and not a scalar of NumPy")
        if isinstance(array, np.ma.MaskedArray):
            remedy = "pass .filled(), and say with causal=, window= or mask= what is visible"
            raise ArgumentTypeError(name, type(array).__name__, "hides elements that kernels would read", remedy)
        dtype_of(name, array.dtype)


@cache
def _place() -> str:
    """gpu or emulator; decided once a process, and announced when it is the emulator by default."""
    chosen = os.environ.get("CUFLASH_NUMPY", "auto")
    if chosen in DEVICES:
        return chosen
    if chosen != "auto":
        raise ArgumentError("CUFLASH_NUMPY", chosen, f"must be auto, {' or '.join(DEVICES)}")
    reason = why_no_gpu()
    if not reason:
        return "gpu"
    logger.warning("NumPy arrays run on the CPU emulator, exact and slow: %s", reason)
    return "emulator"


@cache
def _emulator() -> Eager:
    return Eager(NumpyBackend())


def _gpu() -> Eager:
    from cuflash.interop.cupy import eager

    return eager


def _to_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    import cupy

    return {name: cupy.asarray(np.ascontiguousarray(array)) for name, array in inputs.items()}
