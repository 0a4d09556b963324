"""How an sm_90 forward is divided into tiles, over the keys too where tiles of queries would not fill the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.architectures import Device
from cuflash.masks import Full
from cuflash.params import pack
from cuflash.params_sm90 import COMBINE
from cuflash.plan import Launch, Pointer
from cuflash.problem import Problem
from cuflash.scores import Identity
from cuflash.specs import spec_of_contiguous
from cuflash.tiling_sm90 import TileSm90
from cuflash.variant import Variant

__all__ = ["Division", "combine", "divide"]

MAX_SPLITS = 128  # a lane of forward_combine holds four weights
KEYS_PER_SPLIT = 512  # fewer would cost less than putting the parts together
COMBINE_WARPS = 4


@dataclass(frozen=True)
class Division:
    """The tiles of a problem, and where the parts of split keys lie in the workspace."""

    group: int  # query heads in a tile
    tile_heads: int
    tile_rows: int
    num_q_blocks: int
    num_splits: int
    num_tiles: int
    split_rows: int  # rows of one split: batch * heads * queries
    head_dim_v: int

    @property
    def lse_offset(self) -> int:
        """Bytes of the outputs of all splits, which come first."""
        return self.num_splits * self.split_rows * self.head_dim_v * 4

    @property
    def workspace_bytes(self) -> int:
        """Outputs and lse of every split in float32."""
        return self.lse_offset + self.num_splits * self.split_rows * 4 if self.num_splits > 1 else 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """What explain prints."""
        found = []
        if self.group > 1:
            found.append(f"{self.group} query heads share a tile: alone they would leave most of its rows empty")
        if self.num_splits > 1:
            found.append(
                f"keys in {self.num_splits} parts: {self.num_tiles // self.num_splits} tiles do not fill the GPU"
            )
        return tuple(found)

    def out_strides(self, problem: Problem) -> tuple[int, ...]:
        """Of the outputs, or of one split's part of them [batch, head, row, column]."""
        if self.num_splits > 1:
            head = problem.seqlen_q * problem.head_dim_v
            return (head * problem.num_q_heads, problem.head_dim_v, head, 1)
        return (problem.out or spec_of_contiguous(problem.out_shape, problem.dtype.name)).strides


def divide(problem: Problem, device: Device, tile: TileSm90, group: int) -> Division:
    """Tiles of ``tile.block_q`` rows; splits of the keys as long as multiprocessors are idle and keys are many."""
    tile_heads, tile_rows = problem.num_q_heads // group, problem.seqlen_q * group
    num_q_blocks = -(-tile_rows // tile.block_q)
    num_tiles = num_q_blocks * tile_heads * problem.batch
    num_splits = 1 if problem.batch_invariant else _splits(problem, device, num_tiles)
    return Division(
        group=group,
        tile_heads=tile_heads,
        tile_rows=tile_rows,
        num_q_blocks=num_q_blocks,
        num_splits=num_splits,
        num_tiles=num_tiles * num_splits,
        split_rows=problem.batch * problem.num_q_heads * problem.seqlen_q,
        head_dim_v=problem.head_dim_v,
    )


def _splits(problem: Problem, device: Device, num_tiles: int) -> int:
    if num_tiles == 0:
        return 1
    pairs = problem.mask.visible_pairs(problem.seqlen_q, problem.seqlen_k, problem.shift)
    keys = pairs // max(problem.seqlen_q, 1)  # of the average query
    wanted = min(device.sm_count // num_tiles, keys // KEYS_PER_SPLIT, MAX_SPLITS)
    return wanted if wanted > 1 else 1


def combine(problem: Problem, division: Division) -> Launch:
    """The launch that puts the parts together."""
    out = problem.out or spec_of_contiguous(problem.out_shape, problem.dtype.name)
    values = {
        "out_strides": out.strides,
        "split_rows": division.split_rows,
        "num_q_heads": problem.num_q_heads,
        "seqlen_q": problem.seqlen_q,
        "head_dim_v": problem.head_dim_v,
        "num_splits": division.num_splits,
    }
    fields = COMBINE.fields
    assert fields is not None
    sources = {"split_out": ("workspace", 0), "split_lse": ("workspace", division.lse_offset)}
    pointers = [
        Pointer(fields[name][1], *sources.get(name, (name, 0))) for name in ("split_out", "split_lse", "out", "lse")
    ]
    return Launch(
        variant=Variant(
            kernel="forward_combine",
            family="sm90",
            dtype=problem.dtype,
            mask=Full,
            score=Identity(),
            fields=(("kHeadDimV", -(-problem.head_dim_v // 16) * 16), ("kWarps", COMBINE_WARPS)),
            params="cuflash::ForwardCombineParams",
            params_size=COMBINE.itemsize,
            threads=32 * COMBINE_WARPS,
        ),
        grid=-(-division.split_rows // COMBINE_WARPS),
        block=32 * COMBINE_WARPS,
        shared_bytes=0,
        params=pack(COMBINE, values),
        pointers=tuple(pointers),
        overlap=True,
    )
