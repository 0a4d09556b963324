"""Tiles by measurement: the table's choice and its neighbours timed on this GPU, step by step towards the fastest.

Only the sm_90 forward has tiles worth a search: shared memory, registers and the order of tiles pull in different
directions there. What wins is a row to write into ``tiling_sm90.ROWS``, with the figures as its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuflash import plan_sm90
from cuflash.architectures import Device
from cuflash.backends import why_no_gpu
from cuflash.errors import DeviceError, UnsupportedError
from cuflash.plan import Plan
from cuflash.presets import Shape
from cuflash.problem import Keywords, Problem
from cuflash.tiling_sm90 import Schedule, TileSm90, shared_bytes, tile_sm90

__all__ = ["Trial", "climb", "neighbours", "tune"]

# Registers a thread for scores, probabilities and outputs, by warpgroups; beyond them ptxas spilled.
ACCUMULATORS = {1: 200, 2: 196, 3: 128, 4: 84}
MAX_STAGES = 6

Timer = Callable[[Sequence[TileSm90]], Sequence[float]]  # milliseconds a tile


@dataclass(frozen=True)
class Trial:
    """One tile and its time."""

    tile: TileSm90
    ms: float
    is_table: bool  # what the table chooses

    def as_dict(self) -> dict[str, Any]:
        """Plain data for printing."""
        tile = self.tile
        return {
            "tile": f"{tile.block_q}x{tile.block_k}",
            "stages": tile.stages,
            "q_stages": tile.q_stages,
            "base": tile.base.name.lower(),
            "schedule": tile.schedule.name.lower(),
            "turns": tile.turns,
            "skips": tile.skips,
            "section_mib": tile.section_mib,
            "sends": tile.sends,
            "ms": self.ms,
            "is_table": self.is_table,
        }


def neighbours(tile: TileSm90, problem: Problem, device: Device) -> list[TileSm90]:
    """Tiles that differ from one in a single choice and fit registers and shared memory."""
    found, group = [], plan_sm90.packed_heads(problem)
    for other in _changes(tile, problem.mask.left is not None or problem.mask.right is not None):
        dim_v = -(-problem.head_dim_v // 16) * 16
        registers = other.block_k // 2 + other.block_k // 4 + dim_v // 2
        fits = shared_bytes(other, problem.head_dim, problem.head_dim_v) <= device.shared_limit
        fits = fits and other.box_q % group == 0  # packed heads share whole boxes
        if fits and registers <= ACCUMULATORS[other.warpgroups] and other != tile:
            found.append(other)
    return found


def _changes(tile: TileSm90, has_mask: bool) -> Iterator[TileSm90]:
    for warpgroups in (tile.warpgroups - 1, tile.warpgroups + 1):
        if warpgroups in ACCUMULATORS:
            yield replace(tile, warpgroups=warpgroups, turns=tile.turns and warpgroups > 1)
    for step in (-64, -32, -16, 16, 32, 64):
        if 32 <= tile.block_k + step <= 256:
            yield replace(tile, block_k=tile.block_k + step)
    for stages in (tile.stages - 1, tile.stages + 1):
        if 2 <= stages <= MAX_STAGES:
            yield replace(tile, stages=stages)
    yield replace(tile, q_stages=3 - tile.q_stages)
    yield from (replace(tile, schedule=schedule) for schedule in Schedule)
    yield replace(tile, turns=not tile.turns and tile.warpgroups > 1)
    yield replace(tile, sends=not tile.sends)
    if has_mask:
        yield replace(tile, skips=not tile.skips)
        yield from (replace(tile, section_mib=mib) for mib in (tile.section_mib // 4, max(tile.section_mib, 4) * 4))


def climb(problem: Problem, device: Device, time: Timer, steps: int) -> list[Trial]:
    """Goes from the table's tile to the fastest neighbour, at most ``steps`` times; all trials, fastest first."""
    start = tile_sm90(problem, problem.seqlen_q * plan_sm90.packed_heads(problem))
    times: dict[TileSm90, float] = {}
    best = start
    for _ in range(steps):
        new = [tile for tile in (best, *neighbours(best, problem, device)) if tile not in times]
        times.update(zip(new, time(new), strict=True))
        fastest = min(times, key=times.__getitem__)
        if fastest == best:
            break
        best = fastest
    return [Trial(tile, ms, tile == start) for tile, ms in sorted(times.items(), key=lambda item: item[1])]


def tune(shape: Shape, steps: int = 3, budget_ms: float = 10.0, rounds: int = 3) -> list[Trial]:
    """The climb on this GPU, with random numbers.

    Raises:
        DeviceError: there is no GPU.
        UnsupportedError: the sm_90 forward does not take the shape, or does not run here.
    """
    if why := why_no_gpu():
        raise DeviceError("shape", shape.name, f"is tuned on a GPU: {why}", "run it where there is one")
    import cupy

    from cuflash.benchmark import RandomPool
    from cuflash.launch import CupyBackend, device_of
    from cuflash.timing import event_times

    backend, pool = CupyBackend(), RandomPool()
    arrays = {name: pool.draw(seed, extents, shape.dtype) for seed, (name, extents) in enumerate(shape.shapes.items())}
    device = device_of(cupy.cuda.runtime.getDevice())
    q, k, v = (backend.spec(name, arrays[name]) for name in "qkv")
    problem = Problem.forward(q, k, v, Keywords(**shape.keywords))
    answer = plan_sm90.forward(problem, device) if "sm90" in device.families else f"{device.name} is not Hopper"
    if isinstance(answer, str):
        raise UnsupportedError("shape", shape.name, answer, "the other kernels have fixed tables")
    operands = {name: arrays[name] for name in "qkv"}
    operands |= {output.name: backend.empty(output.shape, output.dtype, arrays["q"]) for output in answer.outputs}

    def time(tiles: Sequence[TileSm90]) -> list[float]:
        group = plan_sm90.packed_heads(problem)
        plans = [plan_sm90.forward_with_tile(problem, device, tile, group) for tile in tiles]
        calls = [_call(backend, plan, operands) for plan in plans if isinstance(plan, Plan)]
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for sample, call in zip(samples, calls, strict=True):
                sample += event_times(call, budget_ms)
        return [statistics.median(sample) for sample in samples]

    return climb(problem, device, time, steps)


def _call(backend: Any, plan: Plan, operands: dict[str, Any]) -> Callable[[], None]:
    given = dict(operands)
    if plan.workspace_bytes:
        given["workspace"] = backend.workspace(plan, operands["q"])
    return lambda: backend.run(plan, given)
