"""Which library the arrays belong to, and the door to it. No framework is imported unless one of its arrays came in."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from array_api_compat import is_cupy_array, is_jax_array, is_numpy_array, is_torch_array

from cuflash.eager import Gradients
from cuflash.errors import ArgumentTypeError
from cuflash.plan import Plan
from cuflash.problem import Keywords

__all__ = ["Door", "door_of", "library_of"]


class Door(Protocol):
    """One array library's way in."""

    def forward(self, inputs: dict[str, Any], words: Keywords, out: Any = None) -> tuple[Any, Any]:
        """``(out, lse)``."""

    def backward(self, inputs: dict[str, Any], words: Keywords) -> Gradients:
        """The gradients."""

    def explain(self, inputs: dict[str, Any], words: Keywords, backward: bool) -> Plan:
        """The plan, not run."""


# library -> (how to tell its arrays, module and attribute of its door)
_LIBRARIES = {
    "cupy": (is_cupy_array, "cuflash.launch", "eager"),
    "numpy": (is_numpy_array, "cuflash.interop.numpy", "door"),
    "jax": (is_jax_array, "cuflash.interop.jax", "door"),
    "torch": (is_torch_array, "cuflash.interop.torch", "door"),
}
_ANY_GPU_ARRAY = ("cuflash.interop.dlpack", "door")


def library_of(argument: str, array: Any) -> str:
    """Name of the array's library; "dlpack" for any other GPU array that can be exchanged.

    Raises:
        ArgumentTypeError: not an array.
    """
    for name, (is_mine, _, _) in _LIBRARIES.items():
        if is_mine(array):
            return name
    if hasattr(array, "__dlpack_device__") or hasattr(array, "__cuda_array_interface__"):
        return "dlpack"
    rule = "must be an array: CuPy, NumPy, JAX, torch or anything with __dlpack__"
    raise ArgumentTypeError(argument, type(array).__name__, rule, "wrap the data with cupy.asarray")


def door_of(arrays: Mapping[str, Any]) -> Door:
    """The door that serves these arrays.

    Raises:
        ArgumentTypeError: something is not an array, or two libraries are mixed.
    """
    chosen = ""
    for argument, array in arrays.items():
        library = library_of(argument, array)
        if chosen and library != chosen:
            rule = f"must be of the same array library as {next(iter(arrays))} ({chosen})"
            raise ArgumentTypeError(argument, library, rule, "convert one side, for instance with from_dlpack")
        chosen = library
    module, attribute = _LIBRARIES[chosen][1:] if chosen in _LIBRARIES else _ANY_GPU_ARRAY
    door: Door = getattr(import_module(module), attribute)
    return door
