"""What share of the tensor cores' peak a Hopper forward can reach at best, from its own tiles: a number to hold
measurements against.

A block of scores costs what its slowest unit takes, as if all overlapped: tensor cores, exponentials, or shared memory.
Tiles go to multiprocessors longest first. Memory, latencies and the power cap are left out, so a kernel that reaches
its prediction has nothing left to overlap, and one far below it waits for something that the model does not know.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from cuflash.plan import Plan

__all__ = ["Prediction", "predict"]

# A multiprocessor of compute capability 9.0, each clock (CUDA programming guide, arithmetic throughput).
TENSOR_FLOPS = 4096  # 16-bit inputs, dense
EXPONENTIALS = 16
SHARED_BYTES = 128
ROWS = 64  # of a warpgroup
MAX_SORTED = 200_000  # tiles; beyond, the last of them hardly matter


@dataclass(frozen=True)
class Prediction:
    """The share of the peak, and what bounds a block of scores."""

    share: float
    bound: str  # tensor cores, exponentials or shared memory


def predict(plan: Plan) -> Prediction | None:
    """The best that the plan's tiles allow; None for kernels without a model, split keys and empty problems."""
    fields = dict(plan.launches[0].variant.fields) if plan.launches else {}
    if (
        not fields
        or plan.launches[0].variant.kernel != "forward_sm90"
        or fields["kSplitsKeys"]
        or fields["kPacksHeads"]
    ):
        return None
    block_k, warpgroups = int(fields["kBlockK"]), int(fields["kWarpgroups"])
    dim, dim_v = int(fields["kHeadDim"]), int(fields["kHeadDimV"])
    cycles = {
        "tensor cores": ROWS * block_k * 2 * (dim + dim_v) / TENSOR_FLOPS,
        "exponentials": ROWS * block_k / EXPONENTIALS,
        # queries and keys for the scores, values for the outputs; keys and values are written once for all warpgroups
        "shared memory": 2 * (ROWS * dim + block_k * (dim + dim_v) * (1 + 1 / warpgroups)) / SHARED_BYTES,
    }
    bound = max(cycles, key=cycles.__getitem__)
    tiles = [
        blocks * cycles[bound] for blocks in _blocks_of_tiles(plan, block_k, warpgroups, bool(fields["kSkipBlocks"]))
    ]
    copies = plan.problem.batch * plan.problem.num_q_heads
    span = _makespan(tiles, copies, plan.device.sm_count)
    if span == 0:
        return None
    return Prediction(min(1.0, plan.flops / (TENSOR_FLOPS * plan.device.sm_count * span)), bound)


def _blocks_of_tiles(plan: Plan, block_k: int, warpgroups: int, skips: bool) -> list[int]:
    """Blocks of scores, of one warpgroup each, that the tiles of a head compute."""
    problem, tile_rows = plan.problem, ROWS * warpgroups

    def blocks(first_row: int, rows: int) -> int:
        last_row = min(first_row + rows, problem.seqlen_q) - 1
        left, right = problem.mask.left, problem.mask.right
        begin = 0 if left is None else max(first_row + problem.shift - left, 0)
        end = problem.seqlen_k if right is None else min(last_row + problem.shift + right + 1, problem.seqlen_k)
        return -(-end // block_k) - begin // block_k if end > begin else 0

    if not skips:
        return [warpgroups * blocks(row, tile_rows) for row in range(0, problem.seqlen_q, tile_rows)]
    parts = [blocks(row, ROWS) for row in range(0, problem.seqlen_q, ROWS)]
    return [sum(parts[i : i + warpgroups]) for i in range(0, len(parts), warpgroups)]


def _makespan(tiles: list[float], copies: int, workers: int) -> float:
    """When the last multiprocessor is done, with the longest tiles first."""
    if len(tiles) * copies > MAX_SORTED:
        return sum(tiles) * copies / workers + max(tiles, default=0.0)
    busy = [0.0] * workers
    for tile in sorted(tiles, reverse=True):
        for _ in range(copies):
            heapq.heapreplace(busy, busy[0] + tile)
    return max(busy)
