"""cuflash and its peers timed in turn, on the same arrays in the same process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.backends import eager_on
from cuflash.catalog import device_here, load_ahead
from cuflash.dtypes import DTYPES
from cuflash.eager import Eager
from cuflash.errors import CuflashError
from cuflash.peers import contestants
from cuflash.peers_base import Contestant, Peer
from cuflash.presets import Shape
from cuflash.problem import Keywords
from cuflash.timing import flops, min_bytes

__all__ = [
    "Figure",
    "RandomPool",
    "Row",
    "Settings",
    "balanced_orders",
    "drop_impossible",
    "measure",
    "read_recorded",
    "summary",
]

_POOL = 2**25  # elements of fresh random numbers; a larger operand repeats them


@dataclass(frozen=True)
class Settings:
    """How a benchmark is run."""

    modes: tuple[str, ...] = ("fwd", "bwd")
    family: str = "auto"
    deterministic: bool = False
    budget_ms: float = 40.0  # of each contestant in each round
    rounds: int = 1  # through all orders
    recorded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peak: float | None = None  # TFLOP/s that 16-bit inputs cannot pass on this card


@dataclass(frozen=True)
class Figure:
    """One contestant's median and what it amounts to."""

    ms: float
    tflops: float
    gbytes: float  # GB/s of the bytes that must move at least


@dataclass(frozen=True)
class Row:
    """One shape in one mode. ``ratio`` is the best peer's time over cuflash's: above 1, cuflash is faster."""

    shape: Shape
    mode: str
    cuflash: Figure
    kernels: tuple[str, ...]
    peers: dict[str, Figure]
    refused: dict[str, str]
    best_peer: str = ""
    best_peer_ms: float = math.nan
    ratio: float = math.nan

    @property
    def failure(self) -> str:
        """Why cuflash itself could not run the shape; empty where it did."""
        return self.refused.get("cuflash", "")

    @property
    def recorded(self) -> bool:
        """Whether the best peer is a recorded ratio to the same run's cuDNN rather than a measurement."""
        return self.best_peer.endswith("*")

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self) | {"recorded": self.recorded, "mask": self.shape.mask_name}
        if self.failure:
            found["cuflash"] = None
        numbers = ("best_peer_ms", "ratio")  # JSON has no NaN
        return found | {name: None for name in numbers if math.isnan(found[name])}


class RandomPool:
    """Normal numbers on the GPU, drawn once by NumPy and cut to every shape: no cuRAND, no minutes on the host."""

    def __init__(self) -> None:
        self._flat: dict[tuple[int, str], Any] = {}

    def draw(self, seed: int, extents: tuple[int, ...], dtype: str) -> Any:
        """A contiguous array; the same seed, shape and dtype give the same memory."""
        import cupy

        count = math.prod(extents)
        flat = self._flat.get((seed, dtype))
        if flat is None or flat.size < count:
            values = np.random.default_rng(seed).standard_normal(min(_POOL, count), dtype=np.float32)
            base = cupy.asarray(values.astype(DTYPES[dtype].numpy))
            repeats = -(-count // base.size)
            flat = base if repeats == 1 else cupy.concatenate([base] * repeats)
            self._flat[seed, dtype] = flat
        return flat[:count].reshape(extents)


def measure(shapes: Sequence[Shape], peers: Mapping[str, Peer], settings: Settings) -> Iterator[Row]:
    """Row after row, each mode of each shape."""
    pool, eager = RandomPool(), eager_on("gpu", settings.family)
    largest = sorted(shapes, key=lambda shape: -max(math.prod(extents) for extents in shape.shapes.values()))
    for shape in largest[:1]:
        _arrays(pool, shape)  # the pool is at its full size from here on
    kinds = ("fwd",) if settings.modes == ("fwd",) else ("fwd", "bwd")
    load_ahead(shapes, device_here(None, settings.family), kinds, settings.deterministic)
    for shape in shapes:
        for mode in settings.modes:
            try:
                yield _measure_row(eager, _arrays(pool, shape), shape, mode, peers, settings)
            except CuflashError as error:
                yield Row(shape, mode, Figure(math.nan, math.nan, math.nan), (), {}, {"cuflash": str(error)})


def read_recorded(path: Path) -> dict[str, dict[str, Any]]:
    """Best-peer-over-cuDNN ratios by "mode/head_dim/mask/seqlen".

    Raises:
        ValueError: the file is not such a table.
    """
    table = json.loads(path.read_text())
    if not isinstance(table, dict) or "points" not in table or "how" not in table:
        raise ValueError(f"{path} is not a table of recorded ratios: it needs 'points' and 'how'")
    return dict(table["points"])


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Geometric mean, least and greatest ratio to the best peer, a mode a line."""
    found: dict[str, dict[str, float]] = {}
    for mode in dict.fromkeys(row.mode for row in rows):
        ratios = [row.ratio for row in rows if row.mode == mode and not math.isnan(row.ratio)]
        if ratios:
            mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
            found[mode] = {"points": len(ratios), "geomean": mean, "min": min(ratios), "max": max(ratios)}
    return found


def _arrays(pool: RandomPool, shape: Shape) -> dict[str, Any]:
    drawn = enumerate(shape.shapes.items())
    arrays = {name: pool.draw(seed, extents, shape.dtype) for seed, (name, extents) in drawn}
    if shape.alibi:
        import cupy

        heads = np.arange(1, shape.num_q_heads + 1, dtype=np.float32)
        arrays["alibi_slopes"] = cupy.asarray(2.0 ** (-8.0 * heads / shape.num_q_heads).astype(np.float32))
    return arrays


def _measure_row(
    eager: Eager, arrays: dict[str, Any], shape: Shape, mode: str, peers: Mapping[str, Peer], settings: Settings
) -> Row:
    own, kernels = _own(eager, arrays, shape, mode, settings.deterministic)
    results = own.call()
    others, refused = contestants(peers, arrays, shape, mode, results[:1] if mode == "fwd" else results)
    everybody = [own, *others]
    orders = balanced_orders(len(everybody))
    for order in orders * settings.rounds:
        for number in order:
            everybody[number].measure(settings.budget_ms / len(orders))
    figures = {one.name: _figure(shape, mode, one.milliseconds) for one in everybody}
    refused |= drop_impossible(figures, settings.peak if shape.dtype != "float32" else None)
    mine = figures.pop(own.name, Figure(math.nan, math.nan, math.nan))
    best, best_ms = _best(shape, mode, figures, settings.recorded)
    return Row(shape, mode, mine, kernels, figures, refused, best, best_ms, best_ms / mine.ms)


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of 0 to count - 1 in which everyone comes at every place, and after every other one, equally often.

    A card that has run something slow is cool, and runs what comes next up to 7% faster. Source: E. J. Williams,
    Experimental designs balanced for the estimation of residual effects of treatments (1949).
    """
    zigzag = [step // 2 if step % 2 == 0 else count - (step + 1) // 2 for step in range(count)]
    orders = [[(number + shift) % count for number in zigzag] for shift in range(count)]
    return orders + [order[::-1] for order in orders] if count % 2 else orders


def drop_impossible(figures: dict[str, Figure], peak: float | None) -> dict[str, str]:
    """Takes out what no tensor core can have computed in its time, however right the values, and says so."""
    above = {name: figure.tflops for name, figure in figures.items() if peak and figure.tflops > peak}
    for name in above:
        del figures[name]
    return {
        name: f"{tflops:.0f} TFLOP/s: the tensor cores have {peak:.0f} at the highest clock; not all of it was timed"
        for name, tflops in above.items()
    }


def _own(
    eager: Eager, arrays: dict[str, Any], shape: Shape, mode: str, deterministic: bool
) -> tuple[Contestant, tuple[str, ...]]:
    words = Keywords(**shape.keywords, deterministic=deterministic)
    inputs = {name: array for name, array in arrays.items() if name != "d_out"}
    kernels = [launch.variant.symbol for launch in eager.plan("forward", inputs, words).launches]
    if mode == "fwd":
        return Contestant("cuflash", partial(eager.forward, inputs, words)), tuple(kernels)
    out, lse = eager.forward(inputs, words)
    saved = {"d_out": arrays["d_out"], **inputs, "out": out, "lse": lse}
    backward = [launch.variant.symbol for launch in eager.plan("backward", saved, words).launches]
    if mode == "bwd":
        return Contestant("cuflash", partial(eager.backward, saved, words)), tuple(backward)

    def both() -> Any:
        out, lse = eager.forward(inputs, words)
        return eager.backward({"d_out": arrays["d_out"], **inputs, "out": out, "lse": lse}, words)

    return Contestant("cuflash", both), (*kernels, *backward)


def _figure(shape: Shape, mode: str, ms: float) -> Figure:
    return Figure(ms, flops(shape, mode) / ms / 1e9, min_bytes(shape, mode) / ms / 1e6)


def _best(
    shape: Shape, mode: str, figures: Mapping[str, Figure], recorded: Mapping[str, Mapping[str, Any]]
) -> tuple[str, float]:
    """The fastest peer and its time; a recorded ratio to the same run's cuDNN competes under its name and a star."""
    times = {name: figure.ms for name, figure in figures.items()}
    row = recorded.get(f"{mode}/{shape.head_dim}/{shape.mask_name}/{shape.seqlen_k}")
    timed = {name.partition("-")[0] for name in times}  # fa3-jax is FlashAttention-3, too
    if row and "cudnn" in times and row["peer"] not in timed:
        times[f"{row['peer']}*"] = times["cudnn"] / row["over_cudnn"]
    if not times:
        return "", math.nan
    name = min(times, key=times.__getitem__)
    return name, times[name]
