"""Forward plans of the sm_80 family (mma.sync, cp.async): every GPU since Ampere, and the emulator."""

from __future__ import annotations

import math
from typing import Any

from cuflash.access import copy_bytes, store_bytes
from cuflash.architectures import Device
from cuflash.params import forward_params, pack, pointer_offsets
from cuflash.plan import Launch, Output, Plan, Pointer
from cuflash.problem import Problem, spec_of_contiguous
from cuflash.tiling import FORWARD, choose, padded
from cuflash.variant import Variant

__all__ = ["forward", "softmax_values"]

LOG2_E = math.log2(math.e)


def forward(problem: Problem, device: Device) -> Plan:
    """One launch: a block per query block, query head and batch."""
    row = choose(FORWARD, problem, device, "forward")
    tile, itemsize = row.tile, problem.dtype.itemsize
    head_dim, head_dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    num_q_blocks = -(-problem.seqlen_q // tile.block_q)
    out = problem.out or spec_of_contiguous(problem.out_shape, problem.dtype.name)
    dtype = forward_params(problem.mask, problem.score)
    width = copy_bytes((problem.q, problem.k, problem.v), itemsize)
    variant = Variant(
        kernel="forward_sm80",
        family="sm80",
        dtype=problem.dtype,
        mask=type(problem.mask),
        score=problem.score,
        fields=(
            ("kBlockQ", tile.block_q),
            ("kBlockK", tile.block_k),
            ("kHeadDim", head_dim),
            ("kHeadDimV", head_dim_v),
            ("kWarps", tile.warps),
            ("kStages", tile.stages),
            ("kCopyBytes", width),
            ("kStoreBytes", store_bytes(out, itemsize)),
            ("kQueryRegisters", tile.query_registers),
            ("kInHaste", tile.in_haste),
            ("kPartialDims", (head_dim, head_dim_v) != (problem.head_dim, problem.head_dim_v)),
        ),
        params="cuflash::ForwardParams<Config::Mask, Config::Score>",
        params_size=dtype.itemsize,
        threads=32 * tile.warps,
    )
    values = {
        "q_strides": problem.q.strides,
        "k_strides": problem.k.strides,
        "v_strides": problem.v.strides,
        "out_strides": out.strides,
        "num_q_blocks": num_q_blocks,
        **sizes(problem),
        **softmax_values(problem),
    }
    grid = num_q_blocks * problem.num_q_heads * problem.batch
    launch = Launch(
        variant=variant,
        grid=grid,
        block=variant.threads,
        shared_bytes=tile.shared_bytes(head_dim, head_dim_v, itemsize),
        params=pack(dtype, values),
        pointers=tuple(Pointer(offset, name) for name, offset in pointer_offsets(dtype, problem.score).items()),
    )
    return Plan(
        kind="forward",
        problem=problem,
        device=device,
        launches=(launch,) if grid else (),
        inputs=("q", "k", "v", *problem.score.pointers),
        outputs=(Output("out", problem.out_shape, problem.dtype.name), Output("lse", problem.lse_shape, "float32")),
        reasons=(f"{tile.block_q}x{tile.block_k} tiles, {tile.warps} warps: {row.reason}", access_reason(width)),
    )


def sizes(problem: Problem) -> dict[str, int]:
    """The extents every kernel of the family takes."""
    names = ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    return {name: getattr(problem, name) for name in names}


def softmax_values(problem: Problem) -> dict[str, Any]:
    """Scale, mask and score as the kernels want them: log2 score = softmax_unit * apply(pre_scale * dot)."""
    folded = not problem.score.pre_scale
    strides = {} if problem.alibi_slopes is None else {"alibi_slopes": problem.alibi_slopes.strides}
    return {
        "softmax_unit": problem.scale * LOG2_E if folded else LOG2_E,
        "pre_scale": 1.0 if folded else problem.scale,
        "mask": problem.mask.params(problem.shift),
        "score": problem.score.params(problem.shift, strides),
    }


def access_reason(width: int) -> str:
    """What ``explain`` says about memory accesses."""
    if width == 16:
        return "16-byte copies"
    return f"{width}-byte copies: an address or a stride of q, k or v allows no wider ones"
