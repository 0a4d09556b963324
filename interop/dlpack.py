"""Any other array on a GPU or in host memory, by the DLPack protocol: numba, warp, and whatever comes.

Arrays come in as CuPy or NumPy views without a copy. CuPy passes its current stream to the producer, which orders its
own work before it. Results go back through ``from_dlpack`` of the producer's own package where it has one, and stay
CuPy or NumPy arrays where it has not. Inputs are never written: CuPy ignores the read-only mark of a capsule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash.eager import Gradients
from cuflash.errors import ArgumentError, ArgumentTypeError
from cuflash.plan import Plan
from cuflash.problem import Keywords

__all__ = ["DlpackDoor", "door", "from_dlpack", "to_like"]

_HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged


class DlpackDoor:
    """What ``cuflash.flash_attention`` opens for arrays of a library it does not know."""

    def forward(self, inputs: dict[str, Any], words: Keywords, out: Any = None) -> tuple[Any, Any]:
        """``(out, lse)`` in the caller's type where its library can import them."""
        views = {name: from_dlpack(name, array) for name, array in inputs.items()}
        if out is None:
            found, lse = _door_of(views).forward(views, words)
            return to_like(inputs["q"], found), to_like(inputs["q"], lse)
        raise ArgumentError("out", type(out).__name__, "is not written through DLPack", "pass out as a CuPy array")

    def backward(self, inputs: dict[str, Any], words: Keywords) -> Gradients:
        """The gradients."""
        views = {name: from_dlpack(name, array) for name, array in inputs.items()}
        return Gradients(*(to_like(inputs["q"], x) for x in _door_of(views).backward(views, words)))

    def explain(self, inputs: dict[str, Any], words: Keywords, backward: bool) -> Plan:
        """The plan of the views."""
        views = {name: from_dlpack(name, array) for name, array in inputs.items()}
        return _door_of(views).explain(views, words, backward)


door = DlpackDoor()


def from_dlpack(argument: str, array: Any) -> Any:
    """The array as a CuPy or NumPy view.

    Raises:
        ArgumentTypeError: another device, a dtype that has no DLPack or CuPy name, or a producer that refuses.
    """
    if isinstance(array, np.ndarray) or type(array).__module__.startswith("cupy."):
        return array  # a result of ours, in a dtype too that DLPack may not name
    try:
        return _view(argument, array)
    except ArgumentTypeError:
        raise
    except Exception as error:  # what a producer raises is its own affair; and CuPy or its GPU may be absent
        rule = f"cannot be exchanged ({type(error).__name__}: {error})"
        raise ArgumentTypeError(argument, type(array).__name__, rule, "view it as a CuPy array") from error


def _view(argument: str, array: Any) -> Any:
    if not hasattr(array, "__dlpack_device__"):
        import cupy

        return cupy.asarray(array)  # __cuda_array_interface__, whose stream CuPy honours
    kind, _ = array.__dlpack_device__()
    if kind in _HOST_DEVICES:
        return np.from_dlpack(array)
    if kind not in _CUDA_DEVICES:
        rule = "must be CUDA or host memory"
        raise ArgumentTypeError(argument, f"DLPack device type {int(kind)}", rule, "copy it to the host or to a GPU")
    import cupy

    return cupy.from_dlpack(array)


def to_like(like: Any, array: Any) -> Any:
    """A fresh result in the library of ``like``, without a copy, if that library imports DLPack."""
    importer: Callable[[Any], Any] | None = None
    package = sys.modules.get(type(like).__module__.partition(".")[0])
    for home in (package, getattr(package, "cuda", None)):
        importer = importer or getattr(home, "from_dlpack", None)
    if importer is None:
        return array
    try:
        return importer(array)
    except Exception:  # each library has its own error for a dtype that it lacks, such as bfloat16
        return array


def _door_of(views: dict[str, Any]) -> Any:
    hosts = {isinstance(view, np.ndarray) for view in views.values()}
    if len(hosts) > 1:
        raise ArgumentTypeError("arrays", sorted(views), "lie partly on a GPU and partly on the host", "move one side")
    if hosts == {True}:
        from cuflash.interop.numpy import door as numpy_door

        return numpy_door
    from cuflash.interop.cupy import eager

    return eager
