"""Mesh axes as JAX's types see them: the manual ones of jax.shard_map, and explicit ones.

Manual: a foreign call returns arrays that forget the axes its operands vary over, which ``check_vma=True`` notices in
reverse mode. Operands are therefore cast to a common set first and results are cast back to it.

Explicit: types carry shardings there, and neither a foreign call nor the folding of axes can state them. Such code runs
with those axes switched to automatic, and its results are given the sharding that their names imply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = ["Axis", "automatic", "away_from_the_mesh", "vary", "vary_alike", "vary_like", "varying_axes"]

Axis = tuple[Any, int]  # an array and the number of one of its axes


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


def vary_alike(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays (or None), all varying over the axes that any of them varies over.

    Done outside a function with a derivative of its own, so that JAX itself sums the gradient of what was the same on
    every shard over the shards: the derivative rule gets and gives arrays of one kind.
    """
    axes = varying_axes([x for x in arrays if x is not None])
    return tuple(None if x is None else vary(x, axes) for x in arrays) if axes else tuple(arrays)


def automatic(function: Callable[..., Any], arrays: Sequence[Any], results: Sequence[Sequence[Axis | None]]) -> Any:
    """``function(*arrays)`` with explicit mesh axes made automatic inside.

    ``results`` says for each axis of each result whose sharding it takes; None means it is not split.
    """
    mesh = next((m for m in map(_explicit_mesh, arrays) if m is not None), None)
    if mesh is None:
        return function(*arrays)
    places = tuple(NamedSharding(mesh, PartitionSpec(*map(_split_of, axes))) for axes in results)
    return jax.sharding.auto_axes(function, out_sharding=places)(*arrays)


def away_from_the_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for the arrays of one shard, traced as on one device.

    The partitioner calls back while the program's mesh is still the current one. With explicit axes JAX would state
    shardings of that mesh on every constant inside, and nothing is left that resolves them.
    """

    def local(*arrays: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return function(*arrays)

    return local


def _explicit_mesh(array: Any) -> Any:
    """The mesh of an array whose type states its sharding, or None."""
    mesh = getattr(getattr(jax.typeof(array), "sharding", None), "mesh", None)
    return mesh if mesh is not None and AxisType.Explicit in mesh.axis_types else None


def _split_of(axis: Axis | None) -> Any:
    if axis is None:
        return None
    array, number = axis
    spec = jax.typeof(array).sharding.spec
    return spec[number] if number < len(spec) else None
