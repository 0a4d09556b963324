"""Array factories: one logical array in many storages, with NaN in every gap and guard row around its elements.

A read beyond a row's end then shows as NaN in a result, and a write beyond it as a changed byte.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.dtypes import DTYPES
from cuflash.presets import Shape

Array = np.ndarray[Any, Any]
GUARD = 256  # elements of NaN on both sides of a storage; keeps the 16-byte alignment of what lies between


@dataclass(frozen=True)
class Layout:
    """How the logical axes [batch, row, head, dim] lie in memory."""

    order: tuple[int, int, int, int] = (0, 1, 2, 3)  # storage order of the logical axes, slowest first
    step: tuple[int, int, int, int] = (1, 1, 1, 1)  # elements stand at every step-th position of their axis
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)  # positions after the last element of the axis
    offset: int = 0  # elements before the first
    reversed_axes: tuple[int, ...] = ()  # axes that run backwards: a negative stride


LAYOUTS: Mapping[str, Layout] = {
    "BSHD": Layout(),
    "BHSD": Layout(order=(0, 2, 1, 3)),
    "SBHD": Layout(order=(1, 0, 2, 3)),
    "padded rows": Layout(pad=(0, 0, 0, 8)),
    "guard rows": Layout(order=(0, 2, 1, 3), pad=(1, 3, 1, 0)),
    "row step 2": Layout(step=(1, 2, 1, 1)),
    "odd rows": Layout(pad=(0, 0, 0, 1)),
    "offset 1": Layout(offset=1),
    "offset 2": Layout(offset=2),
    "offset 4": Layout(offset=4),
    "transposed": Layout(order=(0, 2, 3, 1)),
    "dim step 2": Layout(step=(1, 1, 1, 2)),
    "backwards": Layout(reversed_axes=(1,)),
}


def stored(values: Array, layout: Layout | str = "BSHD") -> Array:
    """``values`` [batch, row, head, dim] in another storage; the view's base is one flat buffer, NaN elsewhere."""
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    strides, step = [0] * values.ndim, 1
    for axis in reversed(layout.order):
        strides[axis] = step * layout.step[axis]
        step *= max(values.shape[axis] * layout.step[axis] + layout.pad[axis], 1)
    storage = nans((2 * GUARD + layout.offset + step,), values.dtype).view(np.uint8)
    in_bytes = [stride * values.itemsize for stride in strides]
    view: Array = np.ndarray(
        values.shape, values.dtype, storage.data, (GUARD + layout.offset) * values.itemsize, in_bytes
    )
    for axis in layout.reversed_axes:
        view = np.flip(view, axis)
    view[...] = values
    return view


def restrided(array: Array, strides: list[int]) -> Array:
    """The same storage and first element under other strides, in bytes."""
    storage = storage_of(array)
    return np.ndarray(array.shape, array.dtype, storage.data, distance(storage, array), strides)


def storage_of(array: Array) -> Array:
    """The bytes behind a view: one flat buffer."""
    owner: Any = array
    while (base := getattr(owner, "base", None)) is not None:
        owner = base.obj if isinstance(base, memoryview) else base
    storage: Array = owner.reshape(-1).view(np.uint8)
    return storage


def distance(storage: Array, array: Array) -> int:
    """Bytes from the start of a storage to the first element of a view of it."""
    return int(array.__array_interface__["data"][0] - storage.__array_interface__["data"][0])


def nans(shape: tuple[int, ...], dtype: Any) -> Array:
    """NaN everywhere, with every bit set: also recognisable as bytes."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8).fill(0xFF)
    return array


def untouched_outside(view: Array) -> bool:
    """Whether the storage of ``view`` still has every bit set wherever ``view`` has no element."""
    storage = storage_of(view)
    copy = storage.copy()
    twin: Array = np.ndarray(view.shape, f"u{view.itemsize}", copy.data, distance(storage, view), view.strides)
    twin[...] = np.iinfo(twin.dtype).max
    return storage.size > view.nbytes and bool((copy == 0xFF).all())


def sparse(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Array:
    """Zeros with huge strides (in elements) over untouched pages: gigabytes of addresses that cost no memory."""
    itemsize = np.dtype(dtype).itemsize
    elements = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which the mmap module names only in newer Pythons
    pages = mmap.mmap(-1, elements * itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.ndarray(shape, dtype, pages, 0, [stride * itemsize for stride in strides])


def normal(shape: tuple[int, ...], dtype: str, seed: int, std: float = 1.0, mean: float = 0.0) -> Array:
    """Seeded normal values, rounded to the dtype."""
    values: Array = (np.random.default_rng(seed).standard_normal(shape) * std + mean).astype(DTYPES[dtype].numpy)
    return values


def case(shape: Shape, seed: int = 0, std: float = 1.0, d_lse: bool = False) -> dict[str, Array]:
    """q, k, v, d_out (and slopes, d_lse) of a case: normal, a little off-centre, with a few outliers."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for name, extents in shape.shapes.items():
        values = rng.standard_normal(extents) + 0.1
        values[rng.random(extents) < 1e-3] *= 5
        arrays[name] = (values * (1 if name == "d_out" else std)).astype(DTYPES[shape.dtype].numpy)
    if shape.alibi:
        arrays["alibi_slopes"] = slopes(shape.num_q_heads)
    if d_lse:
        extents = (shape.batch, shape.num_q_heads, shape.seqlen_q)
        arrays["d_lse"] = rng.standard_normal(extents).astype(np.float32)
    return arrays


def slopes(heads: int) -> Array:
    """The ALiBi paper's slopes for a power of two of heads, and its geometric series for any other number."""
    return (2.0 ** (-8.0 * np.arange(1, heads + 1) / max(heads, 1))).astype(np.float32)


def dense(
    batch: int,
    q_heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int = 0,
    dtype: str = "bfloat16",
    **words: Any,
) -> Shape:
    """A case in the order in which reports state them: B, Hq, Hkv, Sq, Sk, D, Dv."""
    return Shape("", q_heads, kv_heads, head_dim, seqlen_q, seqlen_k, head_dim_v, batch, dtype, **words)


def default_scale(head_dim: int) -> float:
    return 1 / math.sqrt(head_dim)
