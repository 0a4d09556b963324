"""Backward plans of the sm_90 family: prepare, then keys resident with dq added up in float32 and a finish, or two kernels.

Two kernels, one for dk and dv and one for dq, need no accumulator and have a fixed order of every sum: they serve
``deterministic=True`` and the head dimensions whose sums leave no room for dq.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuflash.architectures import Device
from cuflash.masks import Full
from cuflash.params import pack, pointer_offsets
from cuflash.params_sm90_backward import FINISH_SM90, PREPARE_SM90, TENSOR_MAPS, backward_sm90_params
from cuflash.plan import Launch, Output, Plan, Pointer
from cuflash.plan_sm80 import softmax_values
from cuflash.plan_sm90 import tensor_map_slot, unaddressable
from cuflash.problem import Problem, spec_of_contiguous
from cuflash.scores import Identity
from cuflash.tiling_sm90_backward import DkdvTile, DqTile, FusedTile, dkdv_tile, dq_tile, fused_tile, padded_head_dim
from cuflash.variant import Constant, Variant

__all__ = ["backward"]

CONSUMER_REGISTERS = 232  # a thread; what two warpgroups of them leave, 40, is enough for the producer
PREPARE_ROWS, PREPARE_THREADS, FINISH_THREADS = 64, 256, 256
STORE_ROWS = 16  # rows that one warp sends to a gradient at once
ALIGNMENT = 256  # bytes between the parts of the workspace
SECTION_BYTES = 32 * 2**20  # of what the heads of a section share in L2: half of an H200's 60 MB


def backward(problem: Problem, device: Device) -> Plan | str:
    """The plan, or why this family does not take the problem."""
    refusal = _refusal(problem)
    if refusal:
        return refusal
    head_dim, head_dim_v = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    return backward_with_tile(problem, device, fused_tile(problem, head_dim, head_dim_v) or dkdv_tile(head_dim, head_dim_v))


def backward_with_tile(problem: Problem, device: Device, tile: FusedTile | DkdvTile) -> Plan:
    """The plan with a given tile of the kernel that keeps keys; ``cuflash tune`` compares several."""
    return _Backward(problem, device, tile).plan()


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


class _Backward:
    """The pieces of one plan."""

    def __init__(self, problem: Problem, device: Device, tile: FusedTile | DkdvTile) -> None:
        self.problem, self.device, self.tile = problem, device, tile
        self.head_dim, self.head_dim_v = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
        self.accumulates = isinstance(tile, FusedTile) and tile.accumulates
        self.dq_tile = dq_tile(self.head_dim, self.head_dim_v)
        self.heads = problem.batch * problem.num_q_heads
        self.num_q_blocks = -(-problem.seqlen_q // tile.block_q)
        block = tile.block_q if self.accumulates else math.lcm(tile.block_q, self.dq_tile.block_q)
        self.stat_rows = -(-problem.seqlen_q // block) * block
        self.accumulator_cols = 0
        if isinstance(tile, FusedTile) and tile.accumulates:
            self.accumulator_cols = tile.accumulator_cols(self.head_dim)
        self.accumulator_floats = self.num_q_blocks * tile.block_q * self.accumulator_cols  # of one head
        self.offsets, self.workspace_bytes = self._workspace()
        shapes = {"dq": problem.q.shape, "dk": problem.k.shape, "dv": problem.v.shape}
        self.gradients = {name: spec_of_contiguous(shape, problem.dtype.name) for name, shape in shapes.items()}

    def _workspace(self) -> tuple[dict[str, int], int]:
        """Byte offsets of lse_log2, delta and the accumulator; linear in the length."""
        stats = self.heads * self.stat_rows * 4
        sizes = {"lse_log2": stats, "delta": stats, "dq_accumulator": self.heads * self.accumulator_floats * 4}
        offsets, end = {}, 0
        for name, nbytes in sizes.items():
            offsets[name] = end
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return offsets, end

    def plan(self) -> Plan:
        problem = self.problem
        keys = self._fused(self.tile) if isinstance(self.tile, FusedTile) else self._dkdv(self.tile)
        how = "dq added up in float32: any order" if self.accumulates else "dq in a kernel of its own: fixed order"
        reasons = [f"keys {self.tile.reason}", how]
        if not self.accumulates:
            reasons.append(f"dq 128x{self.dq_tile.block_k}: {self.dq_tile.reason}")
        inputs = ("d_out", "q", "k", "v", "out", "lse", *(("d_lse",) if problem.has_d_lse else ()))
        return Plan(
            kind="backward",
            problem=problem,
            device=self.device,
            launches=(self._prepare(), keys, self._finish() if self.accumulates else self._dq(self.dq_tile)),
            inputs=(*inputs, *problem.score.pointers),
            outputs=tuple(Output(name, spec.shape, spec.dtype) for name, spec in self.gradients.items()),
            workspace_bytes=self.workspace_bytes,
            reasons=tuple(reasons),
        )

    def _variant(
        self, kernel: str, params: str, size: int, threads: int, fields: dict[str, Constant], featured: bool = True
    ) -> Variant:
        dims = {"kHeadDim": self.head_dim, "kHeadDimV": self.head_dim_v}
        problem = self.problem
        return Variant(
            kernel=kernel,
            family="sm90",
            dtype=problem.dtype,
            mask=type(problem.mask) if featured else Full,
            score=problem.score if featured else Identity(),
            fields=tuple({**fields, **dims}.items()),
            params=params,
            params_size=size,
            threads=threads,
        )

    def _pointers(self, dtype: np.dtype[Any]) -> tuple[Pointer, ...]:
        offsets = pointer_offsets(dtype, self.problem.score)
        if not self.problem.has_d_lse:
            offsets.pop("d_lse", None)
        if not self.accumulates:
            offsets.pop("dq_accumulator", None)
        return tuple(
            Pointer(offset, "workspace", self.offsets[name]) if name in self.offsets else Pointer(offset, name)
            for name, offset in offsets.items()
        )

    def _prepare(self) -> Launch:
        problem = self.problem
        assert problem.out is not None and problem.d_out is not None
        blocks = -(-self.stat_rows // PREPARE_ROWS)
        lanes = max(8, 1 << (-(-self.head_dim_v // 8) - 1).bit_length())  # eight columns each, a power of two of them
        values = {
            "out_strides": problem.out.strides,
            "d_out_strides": problem.d_out.strides,
            "d_lse_strides": (problem.num_q_heads * problem.seqlen_q, 1, problem.seqlen_q, 0),  # contiguous, as lse is
            "stat_rows": self.stat_rows,
            "accumulator_floats": self.accumulator_floats,
            "num_q_heads": problem.num_q_heads,
            "seqlen_q": problem.seqlen_q,
            "head_dim_v": problem.head_dim_v,
            "num_row_blocks": blocks,
        }
        fields: dict[str, Constant] = {
            "kThreads": PREPARE_THREADS,
            "kBlockRows": PREPARE_ROWS,
            "kRowLanes": lanes,
            "kAccumulatorCols": self.accumulator_cols,
        }
        params = "cuflash::BackwardSm90PrepareParams"
        size = PREPARE_SM90.itemsize
        variant = self._variant("backward_sm90_prepare", params, size, PREPARE_THREADS, fields, False)
        pointers = self._pointers(PREPARE_SM90)
        return Launch(variant, blocks * self.heads, PREPARE_THREADS, 0, pack(PREPARE_SM90, values), pointers)

    def _product(
        self, kernel: str, tile: FusedTile | DkdvTile | DqTile, fields: dict[str, Constant], heads: int, section_bytes: int
    ) -> Launch:
        """A launch of one of the kernels that multiply; its blocks are ordered by sections of heads."""
        problem = self.problem
        dtype = backward_sm90_params(problem.mask, problem.score)
        shared = tile.shared_bytes(self.head_dim, self.head_dim_v)
        blocks = {"num_q_blocks": -(-problem.seqlen_q // tile.block_q), "num_k_blocks": -(-problem.seqlen_k // tile.block_k)}
        sizes = {name: getattr(problem, name) for name in ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k")}
        uniform = problem.mask.left is None and problem.mask.right is None
        section = 1 if uniform else min(max(SECTION_BYTES // max(section_bytes, 1), 1), problem.batch * heads)
        values = {**sizes, **blocks, **softmax_values(problem), "heads_per_section": section}
        values |= {"stat_rows": self.stat_rows, "grad_scale": problem.scale}
        constants = {"kBlockQ": tile.block_q, "kBlockK": tile.block_k, **fields, "kSharedBytes": shared}
        params = "cuflash::BackwardSm90Params<Config::Mask, Config::Score>"
        boxes = {"q": tile.block_q, "d_out": tile.block_q, "k": tile.block_k, "v": tile.block_k}
        assert problem.d_out is not None
        specs = {"q": problem.q, "k": problem.k, "v": problem.v, "d_out": problem.d_out, **self.gradients}
        maps = tuple(
            tensor_map_slot(128 * index, name, specs[name], boxes.get(name, STORE_ROWS), problem.dtype.name, 2)
            for index, name in enumerate(TENSOR_MAPS)
        )
        return Launch(
            variant=self._variant(kernel, params, dtype.itemsize, 384, constants),
            grid=blocks["num_q_blocks" if isinstance(tile, DqTile) else "num_k_blocks"] * heads * problem.batch,
            block=384,
            shared_bytes=shared,
            params=pack(dtype, values),
            pointers=self._pointers(dtype),
            tensor_maps=maps,
        )

    def _query_bytes(self) -> int:
        """What the blocks of one key head read and add again and again: queries, d_out and the accumulator."""
        group = self.problem.num_q_heads // self.problem.num_kv_heads
        return group * (2 * self.stat_rows * (self.head_dim + self.head_dim_v) + 4 * self.accumulator_floats)

    @staticmethod
    def _fused_fields(tile: FusedTile) -> dict[str, Constant]:
        stages = {"kQueryStages": tile.query_stages, "kDOutStages": tile.d_out_stages}
        return {**stages, "kAccumulateDq": tile.accumulates, "kConsumerRegisters": CONSUMER_REGISTERS}

    def _fused(self, tile: FusedTile) -> Launch:
        fields = self._fused_fields(tile)
        return self._product("backward_sm90", tile, fields, self.problem.num_kv_heads, self._query_bytes())

    def _dkdv(self, tile: DkdvTile) -> Launch:
        fields: dict[str, Constant] = {"kStages": tile.stages}
        return self._product("backward_sm90_dkdv", tile, fields, self.problem.num_kv_heads, self._query_bytes())

    def _dq(self, tile: DqTile) -> Launch:
        fields: dict[str, Constant] = {
            "kKeyStages": tile.key_stages,
            "kValueStages": tile.value_stages,
            "kTurns": tile.turns,
        }
        key_bytes = 2 * self.problem.seqlen_k * (self.head_dim + self.head_dim_v)
        group = self.problem.num_q_heads // self.problem.num_kv_heads
        return self._product("backward_sm90_dq", tile, fields, self.problem.num_q_heads, key_bytes // group)

    def _finish(self) -> Launch:
        problem, tile = self.problem, self.tile
        assert isinstance(tile, FusedTile)
        values = {
            "dq_strides": self.gradients["dq"].strides,
            "num_q_heads": problem.num_q_heads,
            "seqlen_q": problem.seqlen_q,
            "head_dim": problem.head_dim,
            "num_q_blocks": self.num_q_blocks,
            "grad_scale": problem.scale,
        }
        fields: dict[str, Constant] = {
            "kThreads": FINISH_THREADS,
            "kBlockQ": tile.block_q,
            "kBlockK": tile.block_k,
            **self._fused_fields(tile),
            "kSharedBytes": tile.shared_bytes(self.head_dim, self.head_dim_v),
        }
        params, size = "cuflash::BackwardSm90FinishParams", FINISH_SM90.itemsize
        shared = tile.block_q * (self.accumulator_cols + 8) * 2
        return Launch(
            variant=self._variant("backward_sm90_finish", params, size, FINISH_THREADS, fields, False),
            grid=self.num_q_blocks * self.heads,
            block=FINISH_THREADS,
            shared_bytes=shared,
            params=pack(FINISH_SM90, values),
            pointers=self._pointers(FINISH_SM90),
        )
