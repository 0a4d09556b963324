"""Forward plans of the sm_90 family: one launch, three tensor maps, and a counter where tiles differ in length."""

from __future__ import annotations

import math
from dataclasses import replace

from cuflash.architectures import Device
from cuflash.params import pack, pointer_offsets
from cuflash.params_sm90 import forward_sm90_params_dtype
from cuflash.plan import Launch, Output, Plan, Pointer
from cuflash.plan_sm90_maps import forward_tensor_maps, seen_keys, unaddressable
from cuflash.plan_sm90_split import Division, combine, divide
from cuflash.problem import Problem
from cuflash.tiling_sm90 import SLAB, Schedule, TileSm90, out_slab_bytes, shared_bytes, tile_sm90
from cuflash.variant import Variant

__all__ = ["forward", "forward_with_tile", "packed_heads"]

MAX_TILES = 2**30  # the counter and the index of the next tile stay below 2^31
COUNTER_BYTES = 16


def forward(problem: Problem, device: Device) -> Plan | str:
    """The plan, or why this family does not take the problem."""
    refusal = _refusal(problem)
    if refusal:
        return refusal
    group = packed_heads(problem)
    return forward_with_tile(problem, device, tile_sm90(problem, problem.seqlen_q * group), group)


def forward_with_tile(problem: Problem, device: Device, tile: TileSm90, group: int = 1) -> Plan | str:
    """The plan with a given tile, which holds ``group`` query heads; ``cuflash tune`` compares several."""
    division = divide(problem, device, tile, group)
    if division.num_tiles > MAX_TILES:
        return f"{division.num_tiles} tiles are more than the {MAX_TILES} that its counter takes"
    shared = shared_bytes(tile, problem.head_dim, problem.head_dim_v)
    if shared > device.shared_limit:
        return f"needs {shared} bytes of shared memory of {device.shared_limit}"
    out_slabs = _out_slabs(problem, tile, division, device.shared_limit - shared)
    shared += out_slabs * out_slab_bytes(tile)
    grid = min(division.num_tiles, device.sm_count)
    # Nothing to hand out, or parts of keys, of one length: no counter, whose zeros would not bear parts beside them.
    if division.num_splits > 1 or (tile.schedule is Schedule.DYNAMIC and grid == division.num_tiles):
        tile = replace(tile, schedule=Schedule.ONE_TILE)
    if tile.schedule is Schedule.ONE_TILE:
        grid = division.num_tiles
    has_counter = tile.schedule is Schedule.DYNAMIC
    dtype = forward_sm90_params_dtype(problem.mask, problem.score)
    launch = Launch(
        variant=_variant(problem, tile, division, out_slabs, shared, dtype.itemsize),
        grid=grid,
        block=128 * (tile.warpgroups + 1),
        shared_bytes=shared,
        params=pack(dtype, _values(problem, tile, division)),
        pointers=_pointers(pointer_offsets(dtype, problem.score), division, has_counter),
        tensor_maps=forward_tensor_maps(problem, tile, division, out_slabs > 0),
        zeroed=has_counter,
    )
    launches = (launch, combine(problem, division)) if division.num_splits > 1 else (launch,)
    return Plan(
        kind="forward",
        problem=problem,
        device=device,
        launches=launches if grid else (),
        inputs=("q", "k", "v", *problem.score.pointers),
        outputs=(Output("out", problem.out_shape, problem.dtype.name), Output("lse", problem.lse_shape, "float32")),
        workspace_bytes=COUNTER_BYTES if has_counter else division.workspace_bytes,
        reasons=(f"{tile.block_q}x{tile.block_k} tiles: {tile.reason}", *division.reasons),
    )


def packed_heads(problem: Problem) -> int:
    """Query heads that share a tile: the whole group where its rows fill tiles better than each head's own would."""
    group = problem.num_q_heads // max(problem.num_kv_heads, 1)
    if group <= 1 or problem.score.pointers or problem.seqlen_q == 0:
        return 1
    rows = problem.seqlen_q * group
    tile = tile_sm90(problem, rows)
    if tile.box_q % group:  # a box holds whole groups
        return 1
    filled, alone = _share(rows, tile.block_q), _share(problem.seqlen_q, tile_sm90(problem, problem.seqlen_q).block_q)
    return group if alone < 0.9 * filled else 1


def _share(rows: int, block: int) -> float:
    """Part of the rows of whole tiles that is work."""
    return rows / (-(-rows // block) * block)


def _refusal(problem: Problem) -> str | None:
    if problem.dtype.itemsize != 2:
        return f"{problem.dtype.name} has no warpgroup product; float16 and bfloat16 have"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % 8 or dim > 256:
            return f"{name}={dim} is not a multiple of 8 up to 256"
    if problem.seqlen_k == 0 and problem.seqlen_q and problem.batch and problem.num_q_heads:
        return "there are no keys to describe to the copy engine"
    arrays = (("q", problem.q), ("k", problem.k), ("v", problem.v))
    reasons = (unaddressable(name, spec, problem.dtype.itemsize) for name, spec in arrays)
    return next((reason for reason in reasons if reason), None)


def _out_slabs(problem: Problem, tile: TileSm90, division: Division, spare: int) -> int:
    """Slabs of outputs a warp hands to the copy engine at a time: equal parts that fit the spare bytes.

    Whole lines instead of pieces of 16 bytes, four to a line: +2% at head_dim 64 and at 512 tokens, 0 to +0.5% beyond.
    0: packed heads and parts of keys are written from registers, and so are arrays the copy engine cannot walk.
    """
    if not tile.sends or division.group > 1 or division.num_splits > 1 or not _stores_pieces(problem):
        return 0
    slabs = -(-problem.head_dim_v // SLAB)
    return next((n for n in range(slabs, 0, -1) if slabs % n == 0 and n * out_slab_bytes(tile) <= spare), 0)


def _stores_pieces(problem: Problem) -> bool:
    return problem.out is None or not unaddressable("out", problem.out, problem.dtype.itemsize)


def _variant(
    problem: Problem, tile: TileSm90, division: Division, out_slabs: int, shared: int, params_size: int
) -> Variant:
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
            ("kPacksHeads", division.group > 1),
            ("kSplitsKeys", division.num_splits > 1),
            ("kOutSlabs", out_slabs),
            ("kStoresPieces", _stores_pieces(problem)),
        ),
        params="cuflash::ForwardSm90Params<Config::Mask, Config::Score>",
        params_size=params_size,
        threads=128 * (tile.warpgroups + 1),
    )


def _values(problem: Problem, tile: TileSm90, division: Division) -> dict[str, object]:
    first_key, num_keys = seen_keys(problem)
    shift = problem.shift - first_key
    operand_strides = {} if problem.alibi_slopes is None else {"alibi_slopes": problem.alibi_slopes.strides}
    log2_e = math.log2(math.e)
    return {
        "out_strides": division.out_strides(problem),
        "split_rows": division.split_rows,
        "num_q_heads": problem.num_q_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": num_keys,
        "head_dim_v": problem.head_dim_v,
        "group": max(problem.num_q_heads // max(problem.num_kv_heads, 1), 1),
        "tile_heads": division.tile_heads,
        "tile_rows": division.tile_rows,
        "num_q_blocks": division.num_q_blocks,
        "num_splits": division.num_splits,
        "num_tiles": division.num_tiles,
        "section_heads": _section_heads(problem, tile, division),
        "softmax_unit": log2_e if problem.score.pre_scale else problem.scale * log2_e,
        "pre_scale": problem.scale if problem.score.pre_scale else 1.0,
        "mask": problem.mask.params(shift),
        "score": problem.score.params(shift, operand_strides),
    }


def _section_heads(problem: Problem, tile: TileSm90, division: Division) -> int:
    """Heads whose tiles stand together, so that their keys and values are read from the L2 cache."""
    sharing = max(division.tile_heads // max(problem.num_kv_heads, 1), 1)
    head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    kv_heads = max(tile.section_mib * 2**20 // max(head_bytes, 1), 1)
    return max(min(kv_heads * sharing, problem.batch * division.tile_heads), 1)


def _pointers(offsets: dict[str, int], division: Division, has_counter: bool) -> tuple[Pointer, ...]:
    counter = offsets.pop("counter")
    places = {"out": ("workspace", 0), "lse": ("workspace", division.lse_offset)} if division.num_splits > 1 else {}
    pointers = [Pointer(offset, *places.get(operand, (operand, 0))) for operand, offset in offsets.items()]
    return (*pointers, Pointer(counter, "workspace")) if has_counter else tuple(pointers)
