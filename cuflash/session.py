"""A whole benchmark: machine floor, rows, record and picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cuflash import peers_torch, timing
from cuflash.benchmark import Row, Settings, measure, read_recorded, summary
from cuflash.info import circumstances
from cuflash.peers import chosen
from cuflash.presets import Shape
from cuflash.timing import copy_bandwidth, matmul_peak

__all__ = ["MODES", "Session", "bench_session"]

MODES = ("fwd", "bwd", "fwdbwd")
_PROTOCOL = (
    "medians of CUDA events (JAX: wall clock over queued calls), {rounds} times {budget} ms, in turns whose orders let "
    "everyone come after everyone else equally often; normal random data; FLOPs of visible pairs, square causal as half"
)


@dataclass(frozen=True)
class Session:
    """What was measured, and the record that is written to disk."""

    rows: Sequence[Row]
    record: dict[str, Any]

    def print(self, console: Console) -> None:
        from cuflash.tables import bench_table, summary_line

        machine = self.record["machine"]
        console.print(bench_table(self.rows, machine["matmul_tflops"], _title(self.record)))
        floor = {"matmul": (machine["matmul_tflops"], "TFLOP/s"), "copy": (machine["copy_gbytes"], "GB/s")}
        console.print(
            "this run: " + ", ".join(f"{name} {value:.0f} {unit}" for name, (value, unit) in floor.items() if value)
        )
        for mode, numbers in self.record["summary"].items():
            console.print(summary_line(mode, numbers))
        for row in self.rows:
            if row.failure:
                console.print(f"{row.mode} {row.shape.name}: {row.failure}", style="red", markup=False, highlight=False)
        for name, why in self.record["absent_peers"].items():
            console.print(f"absent: {name} ({why})", style="dim", markup=False, highlight=False)
        if any(row.recorded for row in self.rows):
            console.print(f"* recorded ratio to cuDNN x this run's cuDNN; {self.record['recorded']}", style="dim")


def bench_session(
    shapes: Sequence[Shape],
    *,
    mode: str,
    peers: str,
    recorded: Path | None,
    family: str,
    deterministic: bool,
    rounds: int,
    budget: float,
    save: Path | None,
    picture: Path | None,
    advance: Callable[[], object],
) -> Session:
    """Measures every shape in every mode.

    Raises:
        KeyError: an unknown mode or peer; the message lists the known ones.
        ValueError: ``recorded`` is not a table of ratios.
    """
    modes = tuple(name.strip() for name in mode.split(","))
    if unknown := [name for name in modes if name not in MODES]:
        raise KeyError(f"no mode {', '.join(unknown)}; there are: {', '.join(MODES)}")
    present, absent = chosen(peers)
    ratios = read_recorded(recorded) if recorded else {}
    peak = timing.tensor_peak()
    settings = Settings(modes, family, deterministic, budget, rounds, ratios, peak)
    base = {
        **circumstances(),
        "peer_versions": {name: peer.version() for name, peer in present.items()},
        "absent_peers": absent,
        "machine": {
            "matmul_tflops": matmul_peak((peers_torch.product, timing.product)),
            "copy_gbytes": copy_bandwidth(),
            "highest_tflops": peak,
        },
        "protocol": _PROTOCOL.format(rounds=rounds, budget=budget),
        "recorded": json.loads(recorded.read_text())["how"] if recorded else "",
    }
    rows: list[Row] = []
    for row in measure(shapes, present, settings):
        rows.append(row)
        advance()
        if save:
            _write(save, base, rows)  # after every row: a run that is cut short leaves what it had
    if picture:
        from cuflash.plotting import plot

        plot(rows, picture, _title(base), base["machine"]["matmul_tflops"])
    return Session(rows, _record(base, rows))


def _record(base: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    return {**base, "summary": summary(rows), "rows": [row.as_dict() for row in rows]}


def _write(path: Path, base: dict[str, Any], rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_record(base, rows), indent=1, default=str) + "\n")


def _title(record: dict[str, Any]) -> str:
    return (
        f"cuflash {record['versions']['cuflash']} on {record['card']}, driver {record['driver']}, {record['date'][:10]}"
    )
