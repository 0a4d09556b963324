"""Which library the arrays belong to, and the door to it. No framework is imported unless one of its arrays came in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


# Import statements, and not import_module by name, because torch.compile traces through this file.
def _cupy_door() -> Door:
    from cuflash.interop.cupy import eager

    return eager


def _numpy_door() -> Door:
    from cuflash.interop.numpy import door

    return door


def _jax_door() -> Door:
    from cuflash.interop.jax import door

    return door


def _torch_door() -> Door:
    from cuflash.interop.torch import door

    return door


def _dlpack_door() -> Door:
    from cuflash.interop.dlpack import door

    return door


# library -> (how to tell its arrays, how to open its door)
_LIBRARIES: dict[str, tuple[Callable[[Any], bool], Callable[[], Door]]] = {
    "cupy": (is_cupy_array, _cupy_door),
    "numpy": (is_numpy_array, _numpy_door),
    "jax": (is_jax_array, _jax_door),
    "torch": (is_torch_array, _torch_door),
}


# The answer for arrays of one type, for libraries whose own path is short enough to notice the question.
_REMEMBERED = ("cupy", "jax", "torch")
_doors: dict[type, Door] = {}
# A library that imports no DLPack gets results as arrays of these, and its gradients are asked for with them.
_RESULTS, _STAND_INS = ("out", "lse", "d_out", "d_lse"), ("cupy", "numpy")


def library_of(argument: str, array: Any) -> str:
    """Name of the array's library; "dlpack" for any other GPU array that can be exchanged.

    Raises:
        ArgumentTypeError: not an array.
    """
    if type(array).__module__ == "torch" and hasattr(array, "data_ptr"):
        return "torch"  # before the general question, which torch.compile cannot trace without complaint
    for name, (is_mine, _) in _LIBRARIES.items():
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
    kinds = {type(array) for array in arrays.values()}
    if len(kinds) == 1 and (known := _doors.get(next(iter(kinds)))):
        return known
    libraries = {argument: library_of(argument, array) for argument, array in arrays.items()}
    chosen = libraries["q"]
    for argument, library in libraries.items():
        if library != chosen and not (chosen == "dlpack" and argument in _RESULTS and library in _STAND_INS):
            rule = f"must be of the same array library as q ({chosen})"
            raise ArgumentTypeError(argument, library, rule, "convert one side, for instance with from_dlpack")
    door = _LIBRARIES[chosen][1]() if chosen in _LIBRARIES else _dlpack_door()
    if len(kinds) == 1 and chosen in _REMEMBERED:
        _doors[kinds.pop()] = door
    return door
