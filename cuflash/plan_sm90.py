"""Forward plans of the sm_90 family: one launch, three tensor maps, and a counter where tiles differ in length."""

from __future__ import annotations

import math
from dataclasses import replace

from cuflash.architectures import Device
from cuflash.params import pack, pointer_offsets
from cuflash.params_sm90 import TENSOR_MAPS, forward_sm90_params_dtype
from cuflash.plan import Launch, Output, Plan, Pointer, TensorMapSlot
from cuflash.problem import ArraySpec, Problem, spec_of_contiguous
from cuflash.tiling_sm90 import SLAB, Schedule, TileSm90, shared_bytes, tile_sm90
from cuflash.variant import Variant

__all__ = ["forward", "forward_with_tile", "tensor_map_slot", "unaddressable"]

MAX_TILES = 2**30  # the counter and the index of the next tile stay below 2^31
TMA_GRAIN = 16  # bytes: addresses and strides of tensor maps, and the width of a store
TMA_STRIDE_LIMIT = 2**40  # bytes
COUNTER_BYTES = 16


def forward(problem: Problem, device: Device) -> Plan | str:
    """The plan, or why this family does not take the problem."""
    refusal = _refusal(problem)
    if refusal:
        return refusal
    return forward_with_tile(problem, device, tile_sm90(problem))


def forward_with_tile(problem: Problem, device: Device, tile: TileSm90) -> Plan | str:
    """The plan with a given tile; ``cuflash tune`` compares several."""
    num_q_blocks = -(-problem.seqlen_q // tile.block_q)
    num_heads = problem.batch * problem.num_q_heads
    num_tiles = num_q_blocks * num_heads
    if num_tiles > MAX_TILES:
        return f"{num_tiles} tiles are more than the {MAX_TILES} that its counter takes"
    shared = shared_bytes(tile, problem.head_dim, problem.head_dim_v)
    if shared > device.shared_limit:
        return f"needs {shared} bytes of shared memory of {device.shared_limit}"
    schedule = tile.schedule
    grid = num_tiles if schedule is Schedule.ONE_TILE else min(num_tiles, device.sm_count)
    if grid == num_tiles and schedule is Schedule.DYNAMIC:
        schedule = Schedule.ONE_TILE  # nothing to hand out, so no counter
    dtype = forward_sm90_params_dtype(problem.mask, problem.score)
    launch = Launch(
        variant=_variant(problem, replace(tile, schedule=schedule), shared, dtype.itemsize),
        grid=grid,
        block=128 * (tile.warpgroups + 1),
        shared_bytes=shared,
        params=pack(dtype, _values(problem, tile, num_q_blocks, num_tiles)),
        pointers=_pointers(pointer_offsets(dtype, problem.score), schedule is Schedule.DYNAMIC),
        tensor_maps=_tensor_maps(problem, tile),
        zeroed=schedule is Schedule.DYNAMIC,
    )
    return Plan(
        kind="forward",
        problem=problem,
        device=device,
        launches=(launch,) if grid else (),
        inputs=("q", "k", "v", *problem.score.pointers),
        outputs=(Output("out", problem.out_shape, problem.dtype.name), Output("lse", problem.lse_shape, "float32")),
        workspace_bytes=COUNTER_BYTES if schedule is Schedule.DYNAMIC else 0,
        reasons=(f"{tile.block_q}x{tile.block_k} tiles: {tile.reason}",),
    )


def _refusal(problem: Problem) -> str | None:
    if problem.dtype.itemsize != 2:
        return f"{problem.dtype.name} has no warpgroup product; float16 and bfloat16 have"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % 8 or dim > 256:
            return f"{name}={dim} is not a multiple of 8 up to 256"
    if problem.seqlen_k == 0 and problem.seqlen_q and problem.batch and problem.num_q_heads:
        return "there are no keys to describe to the copy engine"
    arrays = [("q", problem.q), ("k", problem.k), ("v", problem.v)]
    if problem.out is not None:
        arrays.append(("out", problem.out))
    reasons = (unaddressable(name, spec, problem.dtype.itemsize) for name, spec in arrays)
    return next((reason for reason in reasons if reason), None)


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


def _variant(problem: Problem, tile: TileSm90, shared: int, params_size: int) -> Variant:
    return Variant(
        kernel="forward_sm90",
        family="sm90",
        dtype=problem.dtype,
        mask=type(problem.mask),
        score=problem.score,
        fields=(
            ("kBlockQ", tile.block_q),
            ("kBlockK", tile.block_k),
            ("kHeadDim", -(-problem.head_dim // 16) * 16),
            ("kHeadDimV", -(-problem.head_dim_v // 16) * 16),
            ("kWarpgroups", tile.warpgroups),
            ("kStages", tile.stages),
            ("kQStages", tile.q_stages),
            ("kBase", tile.base.value),
            ("kSchedule", tile.schedule.value),
            ("kTurns", tile.turns),
            ("kSkipBlocks", tile.skips),
            ("kSharedBytes", shared),
        ),
        params="cuflash::ForwardSm90Params<Config::Mask, Config::Score>",
        params_size=params_size,
        threads=128 * (tile.warpgroups + 1),
    )


def _values(problem: Problem, tile: TileSm90, num_q_blocks: int, num_tiles: int) -> dict[str, object]:
    out = problem.out or spec_of_contiguous(problem.out_shape, problem.dtype.name)
    operand_strides = {} if problem.alibi_slopes is None else {"alibi_slopes": problem.alibi_slopes.strides}
    log2_e = math.log2(math.e)
    return {
        "out_strides": out.strides,
        "num_q_heads": problem.num_q_heads,
        "num_kv_heads": problem.num_kv_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim_v": problem.head_dim_v,
        "num_q_blocks": num_q_blocks,
        "num_tiles": num_tiles,
        "section_heads": _section_heads(problem, tile),
        "softmax_unit": log2_e if problem.score.pre_scale else problem.scale * log2_e,
        "pre_scale": problem.scale if problem.score.pre_scale else 1.0,
        "mask": problem.mask.params(problem.shift),
        "score": problem.score.params(problem.shift, operand_strides),
    }


def _section_heads(problem: Problem, tile: TileSm90) -> int:
    """Query heads whose tiles stand together, so that their keys and values are read from the L2 cache."""
    group = max(problem.num_q_heads // max(problem.num_kv_heads, 1), 1)
    head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    kv_heads = max(tile.section_mib * 2**20 // max(head_bytes, 1), 1)
    return max(min(kv_heads * group, problem.batch * problem.num_q_heads), 1)


def _pointers(offsets: dict[str, int], has_counter: bool) -> tuple[Pointer, ...]:
    counter = offsets.pop("counter")
    pointers = [Pointer(offset, operand) for operand, offset in offsets.items()]
    return (*pointers, Pointer(counter, "workspace")) if has_counter else tuple(pointers)


def _tensor_maps(problem: Problem, tile: TileSm90) -> tuple[TensorMapSlot, ...]:
    rows = (tile.block_q, tile.block_k, tile.block_k)
    specs = (problem.q, problem.k, problem.v)
    return tuple(
        tensor_map_slot(128 * index, name[0], spec, box_rows, problem.dtype.name, problem.dtype.itemsize)
        for index, (name, spec, box_rows) in enumerate(zip(TENSOR_MAPS, specs, rows, strict=True))
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
