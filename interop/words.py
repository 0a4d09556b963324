"""The flat form of a plan: 64-bit words that travel inside a compiled program and that launcher.c executes.

Layout, all words signed and 64 bits wide:

    version · operands · launches · 32-bit words of the workspace to clear first, then for each launch
        key · grid · block · shared bytes · cluster · overlap · param bytes · pointers · tensor maps
        the parameter bytes, padded to whole words
        pointer:     offset · operand · byte offset
        tensor map:  offset · operand · byte offset · dtype · rank · swizzle · L2 promotion
                     dims[5] · strides in bytes[5] · box[5]

An operand is a position in ``operand_names``: inputs, then outputs, then the workspace. A kernel is named by a hash
of its source and target, never by an address: a program may be cached or exported and run by another process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from cuflash.plan import Launch, Plan, TensorMapSlot

__all__ = ["VERSION", "FlatLaunch", "FlatPlan", "decode", "encode", "kernel_key", "operand_names"]

VERSION = 2
_AXES = 5  # the most a tensor map has
_MAP_DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CU_TENSOR_MAP_SWIZZLE_*
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # bytes -> CU_TENSOR_MAP_L2_PROMOTION_*


class FlatLaunch(NamedTuple):
    """One launch as read back from words."""

    key: int
    grid: int
    block: int
    shared_bytes: int
    cluster: int
    overlap: int
    params: bytes
    pointers: tuple[tuple[int, int, int], ...]
    tensor_maps: tuple[tuple[int, ...], ...]


def operand_names(plan: Plan) -> tuple[str, ...]:
    """The operands of a plan in the order its words number them."""
    workspace = ("workspace",) if plan.workspace_bytes else ()
    return (*plan.inputs, *(output.name for output in plan.outputs), *workspace)


@lru_cache(maxsize=4096)
def kernel_key(variant: Any, target: str) -> int:
    """63-bit name of a kernel: what is compiled, and for which GPU."""
    text = f"{target}\0{variant.symbol}\0{variant.source()}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def encode(plan: Plan, target: str, clears: bool = True) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The words of a plan whose kernels are compiled for ``target``.

    ``clears`` says that a workspace which must start at zero is cleared by the launcher and not by its caller.
    """
    names = {name: position for position, name in enumerate(operand_names(plan))}
    cleared = -(-plan.workspace_bytes // 4) if clears and plan.zeroed else 0
    words: list[int] = [VERSION, len(names), len(plan.launches), cleared]
    for launch in plan.launches:
        words += _launch_words(launch, names, kernel_key(launch.variant, target))
    return np.asarray(words, np.int64)


def _launch_words(launch: Launch, names: dict[str, int], key: int) -> list[int]:
    params = launch.params
    padded = params + bytes(-len(params) % 8)
    words = [key, launch.grid, launch.block, launch.shared_bytes]
    words += [getattr(launch, "cluster", 1), int(launch.overlap), len(params)]
    words += [len(launch.pointers), len(launch.tensor_maps)]
    words += np.frombuffer(padded, np.int64).tolist()
    for pointer in launch.pointers:
        words += (pointer.offset, names[pointer.operand], pointer.byte_offset)
    for slot in launch.tensor_maps:
        words += (slot.offset, names[slot.operand], slot.byte_offset, *_map_words(slot))
    return words


def _map_words(slot: TensorMapSlot) -> list[int]:
    rank = len(slot.dims)
    strides = slot.strides_bytes[-(rank - 1) :] if rank > 1 else ()  # the driver takes no stride for the first axis
    words = [_MAP_DTYPES[slot.dtype], rank, _SWIZZLES[slot.swizzle], _L2_PROMOTIONS[slot.l2_promotion]]
    for row in (slot.dims, strides, slot.box):
        words += [*row, *[0] * (_AXES - len(row))]
    return words


class FlatPlan(NamedTuple):
    """A plan as read back from words; the workspace is the last operand."""

    num_operands: int
    cleared_words: int
    launches: tuple[FlatLaunch, ...]


def decode(words: Sequence[int]) -> FlatPlan:
    """The inverse of ``encode``, for the executors written in Python.

    Raises:
        ValueError: the words are of another version or cut short.
    """
    if len(words) < 4 or words[0] != VERSION:
        raise ValueError(f"plan of version {words[0] if len(words) else None} is not understood")
    launches, at = [], 4
    for _ in range(words[2]):
        launch, at = _read_launch(words, at)
        launches.append(launch)
    if at != len(words):
        raise ValueError("the words of the plan do not end with its last launch")
    return FlatPlan(words[1], words[3], tuple(launches))


def _read_launch(words: Sequence[int], at: int) -> tuple[FlatLaunch, int]:
    if at + 9 > len(words):
        raise ValueError("the words of the plan are cut short")
    key, grid, block, shared_bytes, cluster, overlap, param_bytes, num_pointers, num_maps = words[at : at + 9]
    at += 9
    param_words = -(-param_bytes // 8)
    params = np.asarray(words[at : at + param_words], np.int64).tobytes()[:param_bytes]
    at += param_words
    pointers, at = _rows(words, at, num_pointers, 3)
    tensor_maps, at = _rows(words, at, num_maps, 7 + 3 * _AXES)
    return FlatLaunch(key, grid, block, shared_bytes, cluster, overlap, params, pointers, tensor_maps), at


def _rows(words: Sequence[int], at: int, count: int, width: int) -> tuple[tuple[Any, ...], int]:
    end = at + count * width
    if end > len(words):
        raise ValueError("the words of the plan are cut short")
    return tuple(tuple(words[i : i + width]) for i in range(at, end, width)), end
