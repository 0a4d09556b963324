"""Tiles of the sm_80 family: rows by head dims, element size and shared memory, each with its measured reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cuflash.architectures import Device
from cuflash.errors import UnsupportedError
from cuflash.masks import SlidingWindow
from cuflash.problem import Problem

__all__ = ["BACKWARD", "BACKWARD_DQ", "FORWARD", "BackwardTile", "DqTile", "ForwardTile", "Row", "choose", "padded"]

KIB = 1024
GRAIN = 16  # elements; head dims are padded to whole tensor-core tiles


def padded(dim: int, grain: int = GRAIN) -> int:
    """``dim`` rounded up to whole tiles."""
    return -(-dim // grain) * grain


class _Tile(Protocol):
    @property
    def head_dim_grain(self) -> int: ...

    def shared_bytes(self, head_dim: int, head_dim_v: int, itemsize: int) -> int: ...


Tile = TypeVar("Tile", bound=_Tile)


@dataclass(frozen=True)
class ForwardTile:
    """Config of forward_sm80."""

    block_q: int  # rows
    block_k: int  # keys
    warps: int
    stages: int  # buffers each for keys and values
    query_registers: int = 0  # registers a thread may spend on holding queries
    in_haste: bool = True  # float32: split by multiplications, and again with care where that made a NaN

    @property
    def head_dim_grain(self) -> int:
        """Head dims are whole tensor-core tiles."""
        return GRAIN

    def shared_bytes(self, head_dim: int, head_dim_v: int, itemsize: int) -> int:
        """Shared memory of one block for padded head dims; the output takes the place of what was read."""
        tiles = self.block_q * head_dim + self.stages * self.block_k * (head_dim + head_dim_v)
        return max(tiles, self.block_q * head_dim_v) * itemsize


@dataclass(frozen=True)
class BackwardTile:
    """Config of backward_sm80."""

    block_q: int  # queries that come together
    block_k: int  # keys a block owns
    warps: int
    warps_k: int  # warps along the keys; the others share keys and split the head dims
    stages: int  # buffers each for q and d_out
    part_q: int  # queries whose scores a warp holds at a time, where no warps share keys

    @property
    def head_dim_grain(self) -> int:
        """Warps that share keys, or rows of dq, own whole tiles of the head dims each; all counts are powers of two."""
        return GRAIN * max(self.warps // self.warps_k, self.warps // (self.block_q // GRAIN), 1)

    def shared_bytes(self, head_dim: int, head_dim_v: int, itemsize: int, accumulates: bool = True) -> int:
        """Shared memory of one block for padded head dims."""
        shares = self.warps != self.warps_k
        keys = self.block_k * (head_dim + head_dim_v) * itemsize
        stage = self.block_q * ((head_dim + head_dim_v) * itemsize + 2 * 4)
        pairs = self.block_k * self.block_q * itemsize
        return keys + self.stages * stage + pairs * (int(shares or accumulates) + int(shares))


@dataclass(frozen=True)
class DqTile:
    """Config of backward_dq_sm80."""

    block_q: int  # queries a block owns
    block_k: int  # keys that come together
    warps: int
    stages: int  # buffers each for keys and values

    @property
    def head_dim_grain(self) -> int:
        """Head dims are whole tensor-core tiles."""
        return GRAIN

    def shared_bytes(self, head_dim: int, head_dim_v: int, itemsize: int) -> int:
        """Shared memory of one block for padded head dims."""
        return (self.block_q + self.stages * self.block_k) * (head_dim + head_dim_v) * itemsize


@dataclass(frozen=True)
class Row(Generic[Tile]):
    """A tile for head dims up to ``head_dim`` (both), elements of ``itemsize`` bytes."""

    head_dim: int
    itemsize: int
    tile: Tile
    reason: str
    capabilities: tuple[tuple[int, int], ...] = ()  # where it holds; everywhere if empty
    deterministic: bool = True  # whether it holds for deterministic gradients, too
    only_windows: bool = False  # whether it is about windows alone

    def holds(self, problem: Problem, device: Device) -> bool:
        """Whether the row is about such a problem on such a device, shared memory aside."""
        return (
            self.itemsize == problem.dtype.itemsize
            and self.head_dim >= max(problem.head_dim, problem.head_dim_v)
            and (not self.capabilities or device.capability in self.capabilities)
            and (self.deterministic or not problem.deterministic)
            and (not self.only_windows or isinstance(problem.mask, SlidingWindow))
        )


_BLACKWELL = ((10, 0), (10, 3), (12, 0), (12, 1))

# Figures are TFLOP/s on an H200 (bfloat16, or float32 where said), full attention, seqlen 2048 and 8192, against
# torch's FlashAttention-2 (float32: its memory-efficient kernel) in the same run.
FORWARD = (
    Row(64, 2, ForwardTile(128, 64, 4, 2, 64), "348, 379; torch 276, 304; one stage 326, 357"),
    Row(128, 2, ForwardTile(128, 48, 4, 2), "380, 397; torch 336, 353; 64 keys spill, 32 keys 365, 387"),
    Row(256, 2, ForwardTile(64, 64, 4, 1), "295, 317; torch 291, 319; 128 rows in 8 warps 278, 303"),
    Row(64, 4, ForwardTile(64, 32, 4, 2), "54; torch 35; 64 keys 59 and twice the code, 128 rows 64 and spill"),
    Row(128, 4, ForwardTile(128, 32, 8, 1), "39 on 9.0, 64 rows 47 and spill on 8.0", ((8, 0),), True, True),
    Row(128, 4, ForwardTile(64, 32, 4, 1), "58; torch 45; 16 keys in two stages 52"),
    Row(256, 4, ForwardTile(64, 16, 4, 2), "not timed; one stage spills there under a window", ((8, 0),)),
    Row(256, 4, ForwardTile(32, 16, 2, 1, in_haste=False), "not timed; the hasty split spills there", _BLACKWELL),
    Row(256, 4, ForwardTile(64, 16, 4, 1), "48; torch 43; 128 rows and 32 keys in 8 warps 54 and spill"),
)

BACKWARD = (
    Row(32, 2, BackwardTile(64, 128, 4, 4, 2, 32), "not timed; 16 queries a part read keys twice as often"),
    # The compiler finds room for 32 queries a part on these two only; 64 queries in two parts spill there, too.
    Row(64, 2, BackwardTile(32, 128, 4, 4, 2, 32), "334; torch 278; 64 queries 359 and spill", ((8, 0), (9, 0)), False),
    Row(64, 2, BackwardTile(64, 128, 4, 4, 2, 16), "301; torch 278"),
    Row(128, 2, BackwardTile(64, 64, 8, 2, 1, 0), "not timed; 128 keys spill there", _BLACKWELL),
    Row(128, 2, BackwardTile(64, 128, 8, 4, 2, 0), "305, 330; torch 258, 294; keys not shared 269, 287"),
    Row(128, 2, BackwardTile(64, 64, 4, 4, 1, 32), "258, 273; fits 99 KiB"),
    Row(256, 2, BackwardTile(64, 64, 8, 2, 1, 0), "230, 247; torch 213, 250; four warps along the keys 219, 233"),
    Row(256, 2, BackwardTile(32, 32, 4, 2, 1, 0), "fits 99 KiB; not timed"),
    Row(64, 4, BackwardTile(32, 64, 4, 4, 2, 16), "not timed; 32 queries a part spill", ((12, 0), (12, 1)), False),
    Row(64, 4, BackwardTile(32, 64, 4, 4, 2, 32), "49; torch 35; 16 queries a part 44, keys shared 38", (), False),
    Row(64, 4, BackwardTile(32, 64, 8, 4, 2, 0), "not timed; where dq has a kernel of its own, the others spill"),
    Row(128, 4, BackwardTile(32, 32, 8, 2, 1, 0), "not timed; 64 keys spill there", _BLACKWELL),
    Row(128, 4, BackwardTile(32, 64, 8, 2, 1, 0), "45; torch 37; four warps along the keys slower by an eighth"),
    Row(128, 4, BackwardTile(32, 32, 8, 2, 1, 0), "fits 99 KiB; not timed; four warps spill"),
    Row(256, 4, BackwardTile(32, 32, 8, 2, 1, 0), "35; torch 35; fits 163 KiB; 64 queries a tenth faster and spill"),
    Row(256, 4, BackwardTile(16, 16, 4, 1, 1, 0), "fits 99 KiB; not timed; two warps 20 and spill"),
)

# Whole deterministic backward, main kernel included; "causal" is at seqlen 2048.
BACKWARD_DQ = (
    Row(32, 2, DqTile(128, 64, 4, 1), "not timed"),
    Row(64, 2, DqTile(128, 32, 4, 2), "causal 202; one stage 184, 64 rows 180; 64 keys in one stage 214 and spill"),
    Row(128, 2, DqTile(64, 64, 4, 1), "218, 228, causal 202; 128 rows and 32 keys 224, 234, 210 and spill"),
    Row(256, 2, DqTile(64, 32, 4, 1), "184, 186; 16 keys in two stages 174, 176"),
    Row(64, 4, DqTile(64, 32, 4, 1), "not timed"),
    Row(128, 4, DqTile(32, 16, 2, 1), "not timed"),
    Row(256, 4, DqTile(16, 16, 1, 1), "not timed"),
)


def choose(rows: tuple[Row[Tile], ...], problem: Problem, device: Device, operation: str) -> Row[Tile]:
    """First row that covers the problem and fits the device.

    Raises:
        UnsupportedError: nothing fits; says the bytes needed and the bytes there are.
    """
    itemsize = problem.dtype.itemsize
    needs = []
    for row in rows:
        if not row.holds(problem, device):
            continue
        head_dim, head_dim_v = (padded(dim, row.tile.head_dim_grain) for dim in (problem.head_dim, problem.head_dim_v))
        needs.append(row.tile.shared_bytes(head_dim, head_dim_v, itemsize))
        if needs[-1] <= device.shared_limit:
            return row
    capability = ".".join(map(str, device.capability))
    rule = (
        f"needs {min(needs)} bytes of shared memory a block for {operation}; {device.name} "
        f"(compute capability {capability}) has {device.shared_limit}"
    )
    dims = (problem.head_dim, problem.head_dim_v)
    raise UnsupportedError("head_dim, head_dim_v", dims, rule, "use a smaller head_dim or a 16-bit dtype")
