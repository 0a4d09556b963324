"""Tiles of the sm_90 backward kernels: which kernels a problem takes, and how much of it a block holds.

Figures are TFLOP/s of the whole backward on an H200 with bfloat16 inputs, 16384 tokens and heads * head_dim = 2048.
"""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.problem import Problem

__all__ = ["DkdvTile", "DqTile", "FusedTile", "dkdv_tile", "dq_tile", "fused_tile", "padded_head_dim", "tile_bytes"]

SLAB = 64  # columns of a shared-memory slab, 128 bytes
SHARED_LIMIT = 227 * 1024  # bytes a block may have
BARRIER = 8  # bytes
# Up to here tiles of keys in turn, and persistent blocks, win: causal at 512 and 1k 212 and 313 against 189 and 292
# (head_dim 64), 234 and 350 against 219 and 348 (128); full 357 and 447 against 344 and 426 (64), but 365 and 459
# against 386 and 493 (128). Longer, each tile waits for the one before it and the clearing is a small part.
_SHORT = 1024  # queries and keys
_GRAIN = 32  # columns; the copy engine fills what is missing with zeros


@dataclass(frozen=True)
class FusedTile:
    """backward_sm90: tiles of 128 keys, two warpgroups; dq is added up in float32."""

    block_q: int
    query_stages: int
    d_out_stages: int
    ordered: bool  # tiles of keys add to dq in turn: a fixed order, and nothing to clear beforehand
    persistent: bool  # as many blocks as multiprocessors, which draw tickets for tiles; those in turn must
    reason: str
    consumer_registers: int = 232  # a thread; what two warpgroups of them leave, 40, is enough for the producer

    block_k = 128

    def accumulator_cols(self, head_dim: int) -> int:
        """Columns of the float32 accumulator: halves of whole slabs, unless the warpgroups share it by rows."""
        slabs = -(-head_dim // SLAB)
        return head_dim if self.block_q == 128 or slabs == 1 else slabs * SLAB

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Twin of BackwardSm90Layout::kBytes."""
        total = tile_bytes(self.block_k, head_dim) + tile_bytes(self.block_k, head_dim_v)
        total += self.query_stages * (tile_bytes(self.block_q, head_dim) + 2 * 4 * self.block_q)  # with lse and delta
        total += self.d_out_stages * tile_bytes(self.block_q, head_dim_v)
        total += 2 * tile_bytes(self.block_q, self.block_k) + 4 * self.block_q * self.accumulator_cols(head_dim)
        total += (3 + 2 * self.query_stages + 2 * self.d_out_stages) * BARRIER
        return total + (6 * BARRIER if self.persistent else 0)  # the board of tickets


@dataclass(frozen=True)
class DkdvTile:
    """backward_sm90_dkdv: 64 keys a block, one warpgroup for probabilities and dv, one for d(scores) and dk."""

    block_q: int
    stages: int
    reason: str

    block_k = 64

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Twin of BackwardSm90DkdvLayout::kBytes."""
        stage = tile_bytes(self.block_q, head_dim) + tile_bytes(self.block_q, head_dim_v) + 2 * 4 * self.block_q
        total = tile_bytes(self.block_k, head_dim) + tile_bytes(self.block_k, head_dim_v) + self.stages * stage
        return total + 2 * 2 * self.block_q * self.block_k + (2 + 4 * self.stages) * BARRIER


@dataclass(frozen=True)
class DqTile:
    """backward_sm90_dq: 64 queries a warpgroup, keys and values stream past."""

    warpgroups: int  # of consumers, 2 or 3
    block_k: int
    key_stages: int
    value_stages: int
    turns: bool  # warpgroups take turns on the tensor cores; wants a third stage of keys
    reason: str

    @property
    def block_q(self) -> int:
        """Rows of queries."""
        return 64 * self.warpgroups

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Twin of BackwardSm90DqLayout::kBytes."""
        total = tile_bytes(self.block_q, head_dim) + tile_bytes(self.block_q, head_dim_v)
        total += self.key_stages * tile_bytes(self.block_k, head_dim)
        total += self.value_stages * tile_bytes(self.block_k, head_dim_v)
        return total + (1 + 2 * self.key_stages + 2 * self.value_stages) * BARRIER


def tile_bytes(rows: int, cols: int) -> int:
    """A 16-bit tile of whole slabs."""
    return -(-cols // SLAB) * rows * 2 * SLAB


def padded_head_dim(head_dim: int) -> int:
    """Columns that the kernels multiply: a multiple of 32 from 64 on."""
    return max(-(-head_dim // _GRAIN) * _GRAIN, SLAB)


def fused_tile(problem: Problem, head_dim: int, head_dim_v: int) -> FusedTile | None:
    """For head dimensions whose sums of 128 keys fit the registers of two warpgroups: up to 128."""
    widest = max(head_dim, head_dim_v)
    if widest > 128:
        return None
    hides = problem.mask.right is not None
    is_short = max(problem.seqlen_q, problem.seqlen_k) <= _SHORT and (hides or widest <= 64)
    in_turn = problem.deterministic or is_short
    if widest <= 64 and not problem.score.pre_scale and problem.mask.left is None:
        registers = 240 if in_turn and not hides else 232  # with fewer or more it spills
        return FusedTile(128, 3, 2, in_turn, in_turn, "128x128: 577 full, 559 causal at 16k", registers)
    if problem.score.pre_scale and head_dim > 64:
        return FusedTile(48, 3, 3, in_turn, in_turn, "48x128: with 64 queries a score spills registers")
    persistent = in_turn or problem.mask.left is not None  # a window spills without
    return FusedTile(64, 3, 3, in_turn, persistent, "64x128: 639 full, 614 causal at 16k; 80x128 608 full")


def dkdv_tile(head_dim: int, head_dim_v: int) -> DkdvTile:
    """The most queries that shared memory takes twice."""
    wide = DkdvTile(96, 2, "96x64: wider products read less shared memory")
    if max(head_dim, head_dim_v) <= 224 and wide.shared_bytes(head_dim, head_dim_v) <= SHARED_LIMIT:
        return wide
    return DkdvTile(64, 2, "64x64: 256 columns of keys, values and two stages of queries fill shared memory")


def dq_tile(head_dim: int, head_dim_v: int) -> DqTile:
    """Keys a step by registers: dq, scores, d(probs) and packed d(scores) of 64 queries fit 240."""
    if head_dim <= 64:
        tile = DqTile(2, 128, 2, 2, False, "128x128: whole blocks on the diagonal")
    elif head_dim <= 128:
        tile = DqTile(2, 112, 3, 2, True, "128x112: with 128 keys the products serialise for lack of registers")
    elif head_dim <= 192:
        tile = DqTile(2, 80, 2, 2, False, "128x80: with 96 keys the products serialise for lack of registers")
    else:
        tile = DqTile(2, 64, 2, 1, False, "128x64: dq alone takes 128 registers")
    if tile.shared_bytes(head_dim, head_dim_v) <= SHARED_LIMIT:
        return tile
    return DqTile(2, 64, 2, 1, False, "128x64: a wide head_dim_v fills shared memory")
