"""Backward plans of the sm_90 family: one kernel that adds dq up in float32 between prepare and finish, or two kernels.

With ``deterministic=True`` blocks of keys add to dq in turn. Two kernels, one for dk and dv and one for dq, need no
accumulator and have a fixed order of every sum: they serve the head dimensions whose sums leave no room for dq.
"""

from __future__ import annotations

from cuflash.architectures import Device
from cuflash.params import pack
from cuflash.params_sm90_backward import TENSOR_MAPS, backward_sm90_params
from cuflash.plan import MAP_BYTES, Launch, Output, Plan
from cuflash.plan_sm80 import softmax_values
from cuflash.plan_sm90_maps import tensor_map_slot, unaddressable
from cuflash.problem import Problem
from cuflash.shape_sm90_backward import BackwardShape, finish, fused_fields, prepare
from cuflash.tiling_sm90 import STORE_ROWS
from cuflash.tiling_sm90_backward import DkdvTile, DqTile, FusedTile, dkdv_tile, fused_tile, padded_head_dim
from cuflash.variant import Constant

__all__ = ["backward", "backward_with_tile"]

WARPGROUP_THREADS = 128
SECTION_BYTES = 32 * 2**20  # of what the heads of a section share in L2: half of an H200's 60 MB
OVERLAP_LENGTH = 1024  # two kernels, head_dim 256: 220 against 216 causal and 367 against 351 full at 512
ORDERED_HEADS = 16  # side by side, though they fill more than L2: 542 against 511 with 4 heads (128 causal at 8k)
SIZES = ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k")


def backward(problem: Problem, device: Device) -> Plan | str:
    """The plan, or why this family does not take the problem."""
    refusal = _refusal(problem)
    if refusal:
        return refusal
    dims = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    return backward_with_tile(problem, device, fused_tile(problem, *dims) or dkdv_tile(*dims))


def backward_with_tile(problem: Problem, device: Device, tile: FusedTile | DkdvTile) -> Plan:
    """The plan with a given tile of the kernel that keeps keys; ``cuflash tune`` compares several."""
    shape = BackwardShape(problem, device, tile)
    if isinstance(tile, FusedTile):
        keys = _product(shape, "backward_sm90", tile, fused_fields(tile))
    else:
        fields: dict[str, Constant] = {"kStages": tile.stages, "kOrderedDq": False, "kPersistent": False}
        keys = _product(shape, "backward_sm90_dkdv", tile, fields)
    if isinstance(tile, FusedTile):
        order = "blocks of keys in turn" if tile.ordered else "any order"
        last, reasons = finish(shape, tile), [f"dq added up in float32: {order}"]
    else:
        last = _dq(shape)
        reasons = ["dq in a kernel of its own: fixed order", f"dq: {shape.dq_tile.reason}"]
    inputs = ("d_out", "q", "k", "v", "out", "lse", *(("d_lse",) if problem.has_d_lse else ()))
    return Plan(
        kind="backward",
        problem=problem,
        device=device,
        launches=(prepare(shape), keys, last),
        inputs=(*inputs, *problem.score.pointers),
        outputs=tuple(Output(name, spec.shape, spec.dtype) for name, spec in shape.gradients.items()),
        workspace_bytes=shape.offsets["end"],
        reasons=(f"queries x keys {tile.reason}", *reasons),
    )


def _refusal(problem: Problem) -> str | None:
    assert problem.out is not None and problem.d_out is not None
    if problem.dtype.itemsize != 2:
        return f"{problem.dtype.name} has no warpgroup product; float16 and bfloat16 have"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % 8 or dim > 256:
            return f"{name}={dim} is not a multiple of 8 up to 256"
    if 0 in (problem.batch, problem.num_q_heads, problem.seqlen_q, problem.seqlen_k):
        return "there are no rows to describe to the copy engine"
    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, "out": problem.out, "d_out": problem.d_out}
    reasons = (unaddressable(name, spec, problem.dtype.itemsize) for name, spec in arrays.items())
    return next((reason for reason in reasons if reason), None)


def _dq(shape: BackwardShape) -> Launch:
    tile = shape.dq_tile
    fields: dict[str, Constant] = {
        "kWarpgroups": tile.warpgroups,
        "kKeyStages": tile.key_stages,
        "kValueStages": tile.value_stages,
        "kTurns": tile.turns,
    }
    return _product(shape, "backward_sm90_dq", tile, fields)


def _product(
    shape: BackwardShape, kernel: str, tile: FusedTile | DkdvTile | DqTile, fields: dict[str, Constant]
) -> Launch:
    """A launch of one of the kernels that multiply: a block per tile of keys, or of queries for dq."""
    problem = shape.problem
    assert problem.d_out is not None
    dtype = backward_sm90_params(problem.mask, problem.score)
    shared = tile.shared_bytes(shape.head_dim, shape.head_dim_v)
    q_blocks, k_blocks = -(-problem.seqlen_q // tile.block_q), -(-problem.seqlen_k // tile.block_k)
    values = {
        **{name: getattr(problem, name) for name in SIZES},
        **softmax_values(problem),
        "num_q_blocks": q_blocks,
        "num_k_blocks": k_blocks,
        "heads_per_section": _heads_per_section(shape, tile),
        "stat_rows": shape.stat_rows,
        "grad_scale": problem.scale,
    }
    constants = {"kBlockQ": tile.block_q, "kBlockK": tile.block_k, **fields, "kSharedBytes": shared}
    rows = {"q": tile.block_q, "d_out": tile.block_q, "k": tile.block_k, "v": tile.block_k}
    specs = {"q": problem.q, "k": problem.k, "v": problem.v, "d_out": problem.d_out, **shape.gradients}
    params = "cuflash::BackwardSm90Params<Config::Mask, Config::Score>"
    threads = WARPGROUP_THREADS * (1 + (tile.warpgroups if isinstance(tile, DqTile) else 2))
    grid = q_blocks * shape.heads if isinstance(tile, DqTile) else k_blocks * problem.batch * problem.num_kv_heads
    if isinstance(tile, FusedTile) and tile.persistent:
        grid = min(grid, shape.device.sm_count)
    return Launch(
        variant=shape.variant(kernel, params, dtype.itemsize, threads, constants),
        grid=grid,
        block=threads,
        shared_bytes=shared,
        params=pack(dtype, values),
        pointers=shape.pointers(dtype),
        tensor_maps=tuple(
            tensor_map_slot(MAP_BYTES * index, name, specs[name], rows.get(name, STORE_ROWS), problem.dtype.name, 2)
            for index, name in enumerate(TENSOR_MAPS)
        ),
        overlap=isinstance(tile, FusedTile) or max(problem.seqlen_q, problem.seqlen_k) <= OVERLAP_LENGTH,
    )


def _heads_per_section(shape: BackwardShape, tile: FusedTile | DkdvTile | DqTile) -> int:
    """As many heads as have what their blocks read again and again in L2; one where all blocks are equally long, unless
    they wait for each other: then blocks of one head had better not run side by side.
    """
    problem = shape.problem
    if problem.mask.left is None and problem.mask.right is None and not shape.ordered:
        return 1
    group = problem.num_q_heads // problem.num_kv_heads
    dims = 2 * (shape.head_dim + shape.head_dim_v)
    if isinstance(tile, DqTile):  # keys and values, shared by a group of query heads
        heads, head_bytes = shape.heads, problem.seqlen_k * dims // group
    else:  # queries and d_out, and the accumulator that they are added to
        heads = problem.batch * problem.num_kv_heads
        head_bytes = group * (shape.stat_rows * dims + 4 * shape.accumulator_floats)
    fewest = ORDERED_HEADS if shape.ordered and problem.mask.right is not None else 1
    return min(max(SECTION_BYTES // max(head_bytes, 1), fewest), heads)
