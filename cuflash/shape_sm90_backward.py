"""What the launches of one sm_90 backward share, and the two of them that move bytes: prepare before, finish after."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from cuflash.architectures import Device
from cuflash.masks import Full
from cuflash.params import pack, pointer_offsets
from cuflash.params_sm90_backward import FINISH_SM90, PREPARE_SM90
from cuflash.plan import Launch, Pointer
from cuflash.problem import ArraySpec, Problem, spec_of_contiguous
from cuflash.scores import Identity
from cuflash.tiling_sm90_backward import DkdvTile, DqTile, FusedTile, dq_tile, padded_head_dim
from cuflash.variant import Constant, Variant

__all__ = ["BackwardShape", "finish", "fused_fields", "prepare"]

PREPARE_ROWS, PREPARE_THREADS, FINISH_THREADS = 64, 256, 256
ALIGNMENT = 256  # bytes between the parts of the workspace


class BackwardShape:
    """Head dimensions as the kernels see them, the layout of the workspace, and how a launch finds its way in it."""

    def __init__(self, problem: Problem, device: Device, tile: FusedTile | DkdvTile) -> None:
        self.problem, self.device, self.tile = problem, device, tile
        self.head_dim, self.head_dim_v = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
        self.dq_tile: DqTile = dq_tile(self.head_dim, self.head_dim_v)
        self.heads = problem.batch * problem.num_q_heads
        self.num_q_blocks = -(-problem.seqlen_q // tile.block_q)
        self.accumulator_cols = 0
        if isinstance(tile, FusedTile):
            self.accumulator_cols = tile.accumulator_cols(self.head_dim)
        self.accumulator_floats = self.num_q_blocks * tile.block_q * self.accumulator_cols  # of one head
        block = tile.block_q if self.accumulates else math.lcm(tile.block_q, self.dq_tile.block_q)
        self.stat_rows = -(-problem.seqlen_q // block) * block

    @property
    def ordered(self) -> bool:
        """Whether dq is added up in a fixed order, by turns that the workspace counts."""
        return isinstance(self.tile, FusedTile) and self.tile.ordered

    @property
    def persistent(self) -> bool:
        """Whether the blocks of the main kernel draw tickets for tiles of keys."""
        return isinstance(self.tile, FusedTile) and self.tile.persistent

    @property
    def head_turns(self) -> int:
        """Counters of one head: one for each of two warpgroups and block of queries."""
        return 2 * self.num_q_blocks if self.ordered else 0

    @property
    def accumulates(self) -> bool:
        """Whether dq is added up in float32; otherwise it has a kernel of its own."""
        return self.accumulator_cols > 0

    @cached_property
    def gradients(self) -> dict[str, ArraySpec]:
        """The outputs, C-contiguous."""
        shapes = {"dq": self.problem.q.shape, "dk": self.problem.k.shape, "dv": self.problem.v.shape}
        return {name: spec_of_contiguous(shape, self.problem.dtype.name) for name, shape in shapes.items()}

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offsets of the parts of the workspace, and of its end."""
        stats = self.heads * self.stat_rows * 4
        sums, turns = self.heads * self.accumulator_floats * 4, self.heads * self.head_turns * 4
        sizes = {"lse_log2": stats, "delta": stats, "dq_accumulator": sums, "dq_turns": turns}
        sizes["tickets"] = 4 if self.persistent else 0
        offsets, end = {}, 0
        for name, nbytes in sizes.items():
            offsets[name] = end
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return {**offsets, "end": end}

    def variant(
        self, kernel: str, params: str, size: int, threads: int, fields: dict[str, Constant], featured: bool = True
    ) -> Variant:
        """A kernel with the head dimensions; one without mask and score is the same for all of them."""
        dims = {"kHeadDim": self.head_dim, "kHeadDimV": self.head_dim_v}
        return Variant(
            kernel=kernel,
            family="sm90",
            dtype=self.problem.dtype,
            mask=type(self.problem.mask) if featured else Full,
            score=self.problem.score if featured else Identity(),
            fields=tuple({**fields, **dims}.items()),
            params=params,
            params_size=size,
            threads=threads,
        )

    def pointers(self, dtype: np.dtype[Any]) -> tuple[Pointer, ...]:
        """The addresses of a parameter struct: operands, and parts of the workspace."""
        places = pointer_offsets(dtype, self.problem.score)
        if not self.problem.has_d_lse:
            places.pop("d_lse", None)
        if not self.accumulates:
            places.pop("dq_accumulator", None)
        if not self.ordered:
            places.pop("dq_turns", None)
        if not self.persistent:
            places.pop("tickets", None)
        return tuple(
            Pointer(place, "workspace", self.offsets[name]) if name in self.offsets else Pointer(place, name)
            for name, place in places.items()
        )


def fused_fields(tile: FusedTile) -> dict[str, Constant]:
    """Constants of backward_sm90, which decide the layout of the accumulator too."""
    return {
        "kQueryStages": tile.query_stages,
        "kDOutStages": tile.d_out_stages,
        "kOrderedDq": tile.ordered,
        "kPersistent": tile.persistent,
        "kConsumerRegisters": tile.consumer_registers,
    }


def prepare(shape: BackwardShape) -> Launch:
    """delta, lse in log2 units, and a zeroed accumulator or its zeroed turns."""
    problem = shape.problem
    assert problem.out is not None and problem.d_out is not None
    blocks = -(-shape.stat_rows // PREPARE_ROWS)
    lanes = max(8, 1 << (-(-shape.head_dim_v // 8) - 1).bit_length())  # eight columns each, a power of two of them
    values = {
        "out_strides": problem.out.strides,
        "d_out_strides": problem.d_out.strides,
        "d_lse_strides": (problem.num_q_heads * problem.seqlen_q, 1, problem.seqlen_q, 0),  # contiguous, as lse is
        "stat_rows": shape.stat_rows,
        "accumulator_floats": 0 if shape.ordered else shape.accumulator_floats,
        "turns": shape.head_turns,
        "num_q_heads": problem.num_q_heads,
        "seqlen_q": problem.seqlen_q,
        "head_dim_v": problem.head_dim_v,
        "num_row_blocks": blocks,
    }
    fields: dict[str, Constant] = {
        "kThreads": PREPARE_THREADS,
        "kBlockRows": PREPARE_ROWS,
        "kRowLanes": lanes,
        "kAccumulatorCols": 0 if shape.ordered else shape.accumulator_cols,
    }
    params, size = "cuflash::BackwardSm90PrepareParams", PREPARE_SM90.itemsize
    variant = shape.variant("backward_sm90_prepare", params, size, PREPARE_THREADS, fields, False)
    pointers = shape.pointers(PREPARE_SM90)
    return Launch(variant, blocks * shape.heads, PREPARE_THREADS, 0, pack(PREPARE_SM90, values), pointers)


def finish(shape: BackwardShape, tile: FusedTile) -> Launch:
    """dq from the accumulator."""
    problem = shape.problem
    values = {
        "dq_strides": shape.gradients["dq"].strides,
        "num_q_heads": problem.num_q_heads,
        "seqlen_q": problem.seqlen_q,
        "head_dim": problem.head_dim,
        "num_q_blocks": shape.num_q_blocks,
        "grad_scale": problem.scale,
    }
    fields: dict[str, Constant] = {
        "kThreads": FINISH_THREADS,
        "kBlockQ": tile.block_q,
        "kBlockK": tile.block_k,
        **fused_fields(tile),
        "kSharedBytes": tile.shared_bytes(shape.head_dim, shape.head_dim_v),
    }
    params, size = "cuflash::BackwardSm90FinishParams", FINISH_SM90.itemsize
    variant = shape.variant("backward_sm90_finish", params, size, FINISH_THREADS, fields, False)
    staged = tile.block_q * (shape.accumulator_cols + 8) * 2  # bytes: rows eight elements longer than they are
    grid = shape.num_q_blocks * shape.heads
    packed, pointers = pack(FINISH_SM90, values), shape.pointers(FINISH_SM90)
    return Launch(variant, grid, FINISH_THREADS, staged, packed, pointers, overlap=True)
