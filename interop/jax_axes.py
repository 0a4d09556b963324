"""Manual mesh axes inside jax.shard_map: what an array varies over, and how to make arrays agree.

A foreign call returns arrays that forget the axes its operands vary over, which ``check_vma=True`` notices in reverse
mode. Operands are therefore cast to a common set first and results are cast back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

__all__ = ["varying_axes", "vary", "vary_like"]


def varying_axes(arrays: Sequence[Any]) -> frozenset[str]:
    """Every manual axis that one of the arrays varies over."""
    axes: set[str] = set()
    for array in arrays:
        kind = jax.typeof(array)
        manual = getattr(kind, "manual_axis_type", None)  # jax 0.10 and newer; before: vma
        axes |= set(manual.varying if manual is not None else getattr(kind, "vma", ()))
    return frozenset(axes)


def vary(array: Any, axes: frozenset[str]) -> Any:
    """The array, varying over ``axes`` too."""
    missing = tuple(sorted(axes - varying_axes((array,))))
    if not missing:
        return array
    if hasattr(lax, "pcast"):
        return lax.pcast(array, missing, to="varying")
    return lax.pvary(array, missing)


def vary_like(arrays: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays, varying over all the axes that ``others`` vary over."""
    axes = varying_axes(others)
    return tuple(vary(array, axes) for array in arrays)
