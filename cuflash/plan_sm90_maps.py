"""What the copy engine is told of arrays: tensor maps of the sm_90 kernels, and which arrays have none."""

from __future__ import annotations

from dataclasses import replace

from cuflash.plan import MAP_BYTES, TensorMapSlot
from cuflash.plan_sm90_split import Division
from cuflash.problem import Problem
from cuflash.specs import ArraySpec, spec_of_contiguous
from cuflash.tiling_sm90 import SLAB, STORE_ROWS, TileSm90

__all__ = ["forward_tensor_maps", "seen_keys", "tensor_map_slot", "unaddressable"]

TMA_GRAIN = 16  # bytes: addresses and strides of tensor maps, and the width of a store
TMA_STRIDE_LIMIT = 2**40  # bytes


def unaddressable(name: str, spec: ArraySpec, itemsize: int) -> str | None:
    """Why the copy engine, or 16-byte stores, cannot walk an array."""
    if spec.alignment % TMA_GRAIN:
        return f"{name} starts at an address that is not a multiple of {TMA_GRAIN} bytes"
    if spec.strides[3] != 1 and spec.shape[3] > 1:
        return f"{name} has a stride of {spec.strides[3]} elements along head_dim, not 1"
    for axis, stride, extent in zip(("batch", "row", "head"), spec.strides[:3], spec.shape[:3], strict=True):
        step = stride * itemsize
        if extent > 1 and (step <= 0 or step % TMA_GRAIN or step >= TMA_STRIDE_LIMIT):
            return f"{name} has a {axis} stride of {step} bytes, not a positive multiple of {TMA_GRAIN}"
    return None


def seen_keys(problem: Problem) -> tuple[int, int]:
    """The first key that any query sees, and how many follow: the copy engine is told of no others.

    So whatever stands in keys that nobody sees, a NaN say, is never touched. The kernel counts from the first it sees.
    """
    mask, shift = problem.mask, problem.shift
    first = 0 if mask.left is None else min(max(shift - mask.left, 0), problem.seqlen_k - 1)
    last = problem.seqlen_k if mask.right is None else problem.seqlen_q + shift + mask.right
    return first, max(min(last, problem.seqlen_k) - first, 1)


def forward_tensor_maps(problem: Problem, tile: TileSm90, division: Division, sends: bool) -> tuple[TensorMapSlot, ...]:
    """Of q, k, v and, where the copy engine writes it, out."""
    dtype, itemsize = problem.dtype.name, problem.dtype.itemsize
    q = tensor_map_slot(0, "q", problem.q, tile.box_q, dtype, itemsize)
    first_key, num_keys = seen_keys(problem)
    maps = [_with_packed_heads(q, division.group) if division.group > 1 else q]
    for index, (operand, spec) in enumerate((("k", problem.k), ("v", problem.v)), start=1):
        batch, _, heads, dim = spec.shape
        seen = spec._replace(shape=(batch, num_keys, heads, dim))
        slot = tensor_map_slot(MAP_BYTES * index, operand, seen, tile.block_k, dtype, itemsize)
        maps.append(replace(slot, byte_offset=first_key * spec.strides[1] * itemsize))
    maps = [replace(slot, l2_promotion=_l2_promotion(problem, division)) for slot in maps]
    if sends:
        out = problem.out or spec_of_contiguous(problem.out_shape, dtype)
        maps.append(tensor_map_slot(MAP_BYTES * len(maps), "out", out, STORE_ROWS, dtype, itemsize))
    return tuple(maps)


def _l2_promotion(problem: Problem, division: Division) -> int:
    """Bytes a fetch. Keys that one tile of queries reads come from memory: 122 us, 136 with 256 bytes (one query, 16 x
    8k keys). What many tiles read comes from the second-level cache: at 16k 1% slower with 128 bytes."""
    readers = division.num_q_blocks * division.tile_heads // max(problem.num_kv_heads, 1)
    return 128 if readers == 1 else 256


def _with_packed_heads(q: TensorMapSlot, group: int) -> TensorMapSlot:
    """Dimensions (column, head of the group, row, group, batch): a box is the whole group at several rows."""
    columns, rows, heads, batch = q.dims
    row_bytes, head_bytes, batch_bytes = q.strides_bytes
    return replace(
        q,
        dims=(columns, group, rows, heads // group, batch),
        strides_bytes=(head_bytes, row_bytes, head_bytes * group, batch_bytes),
        box=(q.box[0], group, q.box[1] // group, 1, 1),
    )


def tensor_map_slot(
    offset: int, operand: str, spec: ArraySpec, box_rows: int, dtype: str, itemsize: int
) -> TensorMapSlot:
    batch, rows, heads, dim = spec.shape
    # An axis of extent 1 may have any stride; the copy engine still wants a valid one.
    steps = zip(spec.strides[:3], spec.shape[:3], strict=True)
    batch_bytes, row_bytes, head_bytes = (stride * itemsize if extent > 1 else TMA_GRAIN for stride, extent in steps)
    return TensorMapSlot(
        offset=offset,
        operand=operand,
        dtype=dtype,
        dims=(dim, rows, heads, batch),
        strides_bytes=(row_bytes, head_bytes, batch_bytes),
        box=(SLAB, box_rows, 1, 1),
        swizzle=128,
    )
