"""Tiles of the sm_90 forward kernel: a table of measured rows.

Figures are TFLOP/s on an H200 with bfloat16 inputs, 16384 tokens and heads * head_dim = 2048, from 512 to 16384 keys;
"full" rows and rows with a mask (measured: causal) apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from cuflash.problem import Problem

__all__ = [
    "FEW_QUERIES",
    "ROWS",
    "STORE_ROWS",
    "Base",
    "Schedule",
    "TileSm90",
    "out_slab_bytes",
    "shared_bytes",
    "tile_sm90",
]

SLAB = 64  # columns of a shared-memory slab
WARPGROUP_ROWS = 64
STORE_ROWS = 16  # of a box of outputs: a warp's


class Base(Enum):
    """How the base of the exponentials is chosen; twin of ``cuflash::Base``."""

    PLAIN = "cuflash::Base::kPlain"
    OPTIMISTIC = "cuflash::Base::kOptimistic"
    FIXED = "cuflash::Base::kFixed"


class Schedule(Enum):
    """Who takes which tile; twin of ``cuflash::Schedule``."""

    ONE_TILE = "cuflash::Schedule::kOneTile"
    STATIC = "cuflash::Schedule::kStatic"
    DYNAMIC = "cuflash::Schedule::kDynamic"


@dataclass(frozen=True)
class TileSm90:
    """What the tables choose; twin of the fields of ``Config``."""

    warpgroups: int  # of consumers; 64 rows of queries each
    block_k: int  # keys
    stages: int  # of the rings of keys and of values
    q_stages: int
    base: Base
    schedule: Schedule
    turns: bool  # warpgroups take turns on the tensor cores
    skips: bool  # a warpgroup leaves out blocks without a key of its own
    section_mib: int  # keys and values of the heads whose tiles stand together in the order of tiles; 0 is one head
    reason: str
    sends: bool = True  # outputs leave by the copy engine where shared memory has room; 96 without: +1%

    @property
    def block_q(self) -> int:
        """Rows of queries."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def q_parts(self) -> int:
        """Into how many pieces, copied and released one by one, a tile's queries fall."""
        return self.warpgroups if self.q_stages == 1 else 1

    @property
    def box_q(self) -> int:
        """Rows of queries that the copy engine brings at a time."""
        return self.block_q // self.q_parts


@dataclass(frozen=True)
class Row:
    """One measured choice: up to which head_dim, head_dim_v and number of keys it holds, with or without a mask."""

    head_dim: int
    head_dim_v: int
    uniform: bool  # the mask hides nothing
    seqlen_k: int
    tile: TileSm90


_ANY = 2**31
_FIX = Base.FIXED
_STATIC, _DYN = Schedule.STATIC, Schedule.DYNAMIC

# fmt: off
ROWS = (
    Row(64, 64, True, _ANY, TileSm90(
        4, 64, 4, 2, _FIX, _DYN, True, False, 0, "453 to 604; 192x128: 385 to 585, 256x48: 421 to 555")),
    Row(64, 64, False, 2048, TileSm90(
        4, 64, 4, 2, _FIX, _DYN, True, True, 64, "305 to 489; every block: 246 to 430, sections of 4 MiB: 302 to 440")),
    Row(64, 64, False, _ANY, TileSm90(
        4, 64, 4, 2, _FIX, _DYN, True, True, 64, "537 to 600; outputs by the copy engine: -1 to -2%", False)),
    Row(96, 96, True, _ANY, TileSm90(
        3, 96, 3, 1, _FIX, _STATIC, True, False, 0, "680 at 8k; 192x80: 652, 128x176: 627, 128x128: 608", False)),
    Row(96, 96, False, 1024, TileSm90(
        2, 128, 2, 2, _FIX, _DYN, True, False, 16, "as head_dim 128")),
    Row(96, 96, False, _ANY, TileSm90(
        3, 64, 4, 1, _FIX, _DYN, True, True, 256, "617 at 8k, sections of 64 MiB: 598; 128x128: -1%", False)),
    Row(128, 128, True, _ANY, TileSm90(
        2, 128, 2, 2, _FIX, _STATIC, True, False, 0, "523 to 741; 128x176: 503 to 731, 192x64: 488 to 723")),
    Row(128, 128, False, 1024, TileSm90(
        2, 128, 2, 2, _FIX, _DYN, True, False, 16, "341 / 465; sections of 64 MiB: 294 / 404, 192x64: 324 / 421")),
    Row(128, 128, False, _ANY, TileSm90(
        3, 64, 4, 1, _FIX, _DYN, True, True, 64, "558 to 812; 128x128: 520 to 696, sections of 16 MiB: 526 to 655")),
    Row(192, 128, True, _ANY, TileSm90(
        2, 128, 2, 1, _FIX, _STATIC, True, False, 0, "816 at 8k; without turns: 751")),
    Row(192, 128, False, _ANY, TileSm90(
        2, 128, 2, 1, _FIX, _DYN, True, True, 64, "775 at 8k; 192x64: 707, 128x64: 664")),
    Row(192, 192, True, _ANY, TileSm90(
        2, 112, 2, 1, _FIX, _STATIC, False, False, 0, "744 at 8k; with turns: 735, 96 keys: 719")),
    Row(192, 192, False, _ANY, TileSm90(
        2, 96, 2, 1, _FIX, _DYN, True, True, 256, "678 at 8k, sections of 64 MiB: 616; 112 keys: 671, 80: 651")),
    Row(256, 256, True, _ANY, TileSm90(
        2, 64, 2, 1, _FIX, _STATIC, False, False, 0, "546 to 759; 80 keys: 517 to 755, optimistic base: 519 to 753")),
    Row(256, 256, False, 1024, TileSm90(
        2, 64, 2, 1, _FIX, _DYN, True, True, 32, "353 / 460, sections of 16 MiB: 344 / 435, of 64: 311 / 442")),
    Row(256, 256, False, 4096, TileSm90(
        2, 64, 2, 1, _FIX, _DYN, True, True, 64, "549 to 674; 80 keys: 540 to 659, sections of 32 MiB: 534 at 2k")),
    Row(256, 256, False, _ANY, TileSm90(
        2, 64, 2, 1, _FIX, _DYN, True, True, 256, "693 at 8k, sections of 64 MiB: 681; 80 keys: 698, at 16k -8%")),
)
# fmt: on


# Few queries: one warpgroup, and deep rings, since the time goes into reading keys and values.
# fmt: off
FEW_QUERIES = (
    (64, 64, TileSm90(1, 128, 6, 1, _FIX, _DYN, False, False, 0, "64 rows; six stages fill shared memory")),
    (128, 128, TileSm90(1, 128, 3, 1, _FIX, _DYN, False, False, 0, "64 rows; three stages fill shared memory")),
    (192, 128, TileSm90(1, 96, 3, 1, _FIX, _DYN, False, False, 0, "64 rows; three stages fill shared memory")),
    (192, 192, TileSm90(1, 80, 3, 1, _FIX, _DYN, False, False, 0, "64 rows; three stages fill shared memory")),
    (256, 256, TileSm90(1, 64, 3, 1, _FIX, _DYN, False, False, 0, "64 rows; three stages fill shared memory")),
)
# fmt: on


def tile_sm90(problem: Problem, rows: int) -> TileSm90:
    """The tile for a problem of so many rows a head: the first line that holds its head dimensions."""
    if rows <= WARPGROUP_ROWS:
        fits = (tile for dim, dim_v, tile in FEW_QUERIES if problem.head_dim <= dim and problem.head_dim_v <= dim_v)
        return next(fits)
    uniform = problem.mask.left is None and problem.mask.right is None
    row = next(
        row
        for row in ROWS
        if problem.head_dim <= row.head_dim
        and problem.head_dim_v <= row.head_dim_v
        and problem.seqlen_k <= row.seqlen_k
        and uniform == row.uniform
    )
    if problem.score.pre_scale:
        # Two score functions in a row need registers; with more warpgroups, keys or places for queries they spill.
        warpgroups, block_k = min(row.tile.warpgroups, 3), min(row.tile.block_k, 112)
        return replace(row.tile, warpgroups=warpgroups, block_k=block_k, q_stages=1)
    return row.tile


def _slabs(dim: int) -> int:
    return -(-dim // SLAB)


def shared_bytes(tile: TileSm90, head_dim: int, head_dim_v: int) -> int:
    """Dynamic shared memory of a block; twin of ``ForwardSm90::kSharedBytes``."""
    row_bytes = 128
    q = tile.q_stages * tile.block_q * _slabs(head_dim) * row_bytes
    kv = tile.stages * tile.block_k * (_slabs(head_dim) + _slabs(head_dim_v)) * row_bytes
    board = 4 * (16 + 16 * tile.warpgroups + 16)
    return q + kv + board + 16 * (tile.q_stages * tile.q_parts + 2 * tile.stages)


def out_slab_bytes(tile: TileSm90) -> int:
    """Shared memory that one slab of outputs takes in all warps."""
    return tile.block_q * SLAB * 2
