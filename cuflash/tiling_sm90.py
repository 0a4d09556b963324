"""Tiles of the sm_90 forward kernel: a table of measured rows, and a rule for the head dimensions between them.

Figures are TFLOP/s on an H200 with bfloat16 inputs, 16384 tokens and heads * head_dim = 2048, unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from cuflash.architectures import Device
from cuflash.problem import Problem

__all__ = ["Base", "Schedule", "TileSm90", "shared_bytes", "tile_sm90"]

SLAB = 64  # columns of a shared-memory slab
WARPGROUP_ROWS = 64


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

    @property
    def block_q(self) -> int:
        """Rows of queries."""
        return self.warpgroups * WARPGROUP_ROWS


@dataclass(frozen=True)
class Row:
    """One measured choice: up to which head_dim, head_dim_v and number of keys it holds, for which masks."""

    head_dim: int
    head_dim_v: int
    uniform: bool  # the mask hides nothing
    seqlen_k: int
    tile: TileSm90


_ANY = 2**31
_FIX, _OPT = Base.FIXED, Base.OPTIMISTIC
_ONE, _STATIC, _DYN = Schedule.ONE_TILE, Schedule.STATIC, Schedule.DYNAMIC

# fmt: off
ROWS = (
    Row(64, 64, True, 1024, TileSm90(4, 64, 4, 2, _FIX, _STATIC, True, False, 0, "442 / 488; 192x128: 415 / 460")),
    Row(64, 64, True, _ANY, TileSm90(3, 128, 3, 2, _FIX, _DYN, True, False, 0, "534 to 595; 256x64 stops at 546")),
    Row(64, 64, False, 4096, TileSm90(4, 64, 4, 2, _FIX, _DYN, True, True, 64, "276 to 467; short blocks on the diagonal")),
    Row(64, 64, False, _ANY, TileSm90(3, 128, 3, 2, _FIX, _DYN, True, True, 64, "520 to 550; 256x64 stops at 508")),
    Row(128, 128, True, 512, TileSm90(2, 128, 2, 2, _FIX, _STATIC, True, False, 0, "518 against 511 of 176 keys")),
    Row(128, 128, True, _ANY, TileSm90(2, 176, 2, 1, _FIX, _DYN, True, False, 0, "593 to 734; 128 keys: 588 to 704")),
    Row(128, 128, False, _ANY, TileSm90(2, 128, 2, 2, _FIX, _DYN, True, False, 64, "331 to 691; static order: 318 to 523")),
    Row(256, 256, True, 1024, TileSm90(2, 64, 2, 1, _FIX, _STATIC, False, False, 0, "560 / 641 against 529 / 632")),
    Row(256, 256, True, _ANY, TileSm90(2, 80, 2, 1, _OPT, _STATIC, False, False, 0, "705 to 763; fixed base: 672 to 738")),
    Row(256, 256, False, 4096, TileSm90(2, 64, 2, 1, _FIX, _DYN, False, True, 64, "340 to 637 against 334 to 621 of 80")),
    Row(256, 256, False, _ANY, TileSm90(2, 80, 2, 1, _FIX, _ONE, False, True, 64, "700 / 743; persistent: 662 / 681")),
)
# fmt: on


def tile_sm90(problem: Problem, device: Device) -> TileSm90 | str:
    """The tile for a problem, or why there is none."""
    uniform = problem.mask.left is None and problem.mask.right is None
    for row in ROWS:
        if (
            _slabs(problem.head_dim) == _slabs(row.head_dim)
            and _slabs(problem.head_dim_v) == _slabs(row.head_dim_v)
            and uniform == row.uniform
            and problem.seqlen_k <= row.seqlen_k
        ):
            return _adapted(row.tile, problem)
    return _by_rule(problem, device, uniform)


def _adapted(tile: TileSm90, problem: Problem) -> TileSm90:
    """The tile as measured for the plain score, adapted to what takes more room."""
    if problem.score.pre_scale and tile.block_k > 128:
        tile = replace(tile, block_k=128)  # a score function wants registers: 176 keys would spill
    if problem.dtype.name == "float16" and tile.base is Base.OPTIMISTIC:
        tile = replace(tile, base=Base.FIXED)  # P may only grow to 2^15 before a tile is redone
    return tile


def _by_rule(problem: Problem, device: Device, uniform: bool) -> TileSm90 | str:
    """Two warpgroups and as many keys as registers and shared memory hold."""
    schedule = Schedule.STATIC if uniform else Schedule.DYNAMIC
    dim_v = _padded(problem.head_dim_v)
    for block_k in range(192, 16, -16):
        # A thread holds scores in float32, probabilities in 16 bits and outputs in float32; 48 registers for the rest.
        registers = block_k // 2 + block_k // 4 + dim_v // 2
        if registers > 184 or (not uniform and block_k > 128):
            continue
        reason = f"{block_k} keys fill registers or shared memory"
        tile = TileSm90(2, block_k, 2, 1, Base.FIXED, schedule, dim_v <= 128, not uniform, 0 if uniform else 64, reason)
        if shared_bytes(tile, problem.head_dim, problem.head_dim_v) <= device.shared_limit:
            return tile
    return "no tile fits shared memory"


def _slabs(dim: int) -> int:
    return -(-dim // SLAB)


def _padded(dim: int) -> int:
    return -(-dim // 16) * 16


def shared_bytes(tile: TileSm90, head_dim: int, head_dim_v: int) -> int:
    """Dynamic shared memory of a block; twin of ``ForwardSm90::kSharedBytes``."""
    row_bytes = 128
    q = tile.q_stages * tile.block_q * _slabs(head_dim) * row_bytes
    kv = tile.stages * tile.block_k * (_slabs(head_dim) + _slabs(head_dim_v)) * row_bytes
    board = 4 * (16 + 16 * tile.warpgroups + 16)
    return q + kv + board + 16 * (tile.q_stages + 2 * tile.stages)
