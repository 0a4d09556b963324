"""What the commands print: plain data in, rich tables out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from cuflash.benchmark import Row
from cuflash.check import CaseResult
from cuflash.dtypes import DTYPES

__all__ = [
    "accuracy_table",
    "bench_table",
    "case_cells",
    "case_table",
    "compile_table",
    "complaints",
    "explain_lines",
    "explain_table",
    "info_table",
    "summary_line",
    "tune_table",
]

GOOD, BAD = "[green]", "[bold red]"


def new_table(title: str = "", **options: Any) -> Table:
    """The house's look: no frames, as narrow as the content."""
    return Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), **options)


def case_table(device: str) -> Table:
    """The empty table of `cuflash check`; rows come from ``case_cells``."""
    table = new_table(f"cuflash check on the {device}: forward and backward against float64")
    for column in ("case", "dtype", "mask", "batch x heads x seqlens"):
        table.add_column(column, overflow="fold")
    for column in ("worst", "error", "budget"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    table.add_column("time", justify="right")
    return table


def case_cells(result: CaseResult) -> tuple[str, ...]:
    """One case as a row; what went wrong stands in full below the table."""
    head = (result.name, DTYPES[result.dtype].short, result.mask, result.shape)
    worst = result.worst
    if worst is None:
        verdict = "[yellow]not taken[/]" if result.refusal else f"{BAD}failed[/]"
        return (*map(escape, head), "", "", "", verdict, "")
    verdict = f"{GOOD}ok[/]" if result.ok else f"{BAD}{'misplaced' if worst.why else 'over budget'}[/]"
    numbers = (worst.name, f"{worst.error:.1e}", f"{worst.budget:.1e}")
    return (*map(escape, head), *numbers, verdict, f"{result.seconds:.2f} s")


def complaints(results: Iterable[CaseResult]) -> list[str]:
    """Every failed case in words; of a compiler's speech only the beginning, ``--json`` has all of it."""
    found = []
    for result in results:
        wrong = [one for one in result.deviations if not one.ok]
        told = [f"{one.name}: {one.why or f'error {one.error:.3e}, budget {one.budget:.3e}'}" for one in wrong]
        for what in [result.failure] if result.failure else told:
            first, *rest = what.splitlines()
            found += [f"{result.name}: {first}", *(f"  {line}" for line in rest[:5]), *["  …"][: len(rest) > 5]]
    return found


def bench_table(rows: Sequence[Row], peak_tflops: float | None, title: str) -> Table:
    """One row a shape and mode; a star marks a peer that stands by its recorded ratio to the same run's cuDNN."""
    table = new_table(title)
    for column in ("mode", "case", "B", "heads"):
        table.add_column(column)
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    for column in ("ms", "TFLOP/s", "of peak", "GB/s", "best peer", "ratio", *names):
        table.add_column(column, justify="right")
    for row in rows:
        shape, mine = row.shape, row.cuflash
        if row.failure:
            table.add_row(row.mode, escape(shape.name), str(shape.batch), "", f"{BAD}failed[/]")
            continue
        share = f"{100 * mine.tflops / peak_tflops:.0f}%" if peak_tflops else ""
        ratio = "" if math.isnan(row.ratio) else f"{GOOD if row.ratio >= 1 else '[yellow]'}{row.ratio:.3f}[/]"
        table.add_row(
            row.mode,
            escape(shape.name),
            str(shape.batch),
            f"{shape.num_q_heads}/{shape.num_kv_heads}",
            f"{mine.ms:.3f}",
            f"{mine.tflops:.0f}",
            share,
            f"{mine.gbytes:.0f}",
            row.best_peer,
            ratio,
            *(f"{row.peers[name].tflops:.0f}" if name in row.peers else "–" for name in names),
        )
    return table


def summary_line(mode: str, numbers: Mapping[str, float]) -> str:
    """The ratio to the best peer over all points of a mode."""
    mean, least, most = (f"{numbers[name]:.3f}" for name in ("geomean", "min", "max"))
    return f"{mode}: {numbers['points']} points, ratio to the best peer {mean} (geometric mean), {least} to {most}"


def accuracy_table(record: Mapping[str, Any]) -> Table:
    """Errors by shape, kind of input and result; the ratio is to the most accurate peer."""
    names = list(record["peer_versions"])
    table = new_table(f"root mean square error against float64 on {record['card']}")
    for column in ("case", "inputs", "result", "cuflash", *names, "ratio"):
        table.add_column(column, justify="left" if column in ("case", "inputs", "result") else "right")
    for row in record["rows"]:
        peers = (f"{row['peers'][name]:.2e}" if name in row["peers"] else "–" for name in names)
        ratio = f"{row['ratio']:.3f}" if row["ratio"] else ""
        ratio += f" ± {row['uncertainty']:.3f}" if row["uncertainty"] else ""
        table.add_row(row["shape"], row["distribution"], row["result"], f"{row['cuflash']:.2e}", *peers, ratio)
    return table


def explain_table(described: Iterable[Mapping[str, Any]]) -> Table:
    """The launches of one or more plans; registers and spills where they are known."""
    table = new_table()
    launches = [(plan["kind"], launch) for plan in described for launch in plan["launches"]]
    compiled = (
        {"registers": "registers", "spills": "spill_bytes"} if any("registers" in one for _, one in launches) else {}
    )
    for column in ("plan", "kernel", "grid", "block", "shared", *compiled):
        table.add_column(column, justify="left" if column in ("plan", "kernel") else "right", overflow="fold")
    for kind, launch in launches:
        sizes = (str(launch["grid"]), str(launch["block"]), f"{launch['shared_bytes'] / 1024:.0f} KiB")
        table.add_row(kind, launch["kernel"], *sizes, *(str(launch[name]) for name in compiled.values()))
    return table


def explain_lines(described: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What a table has no room for: work, memory, share of the peak possible and reached, reasons, tiles."""
    for plan in described:
        yield f"{plan['kind']}: {plan['gflops']:.1f} GFLOP, workspace {plan['workspace_bytes'] / 2**20:.1f} MiB"
        if plan["predicted_share"]:
            share, bound = f"{100 * plan['predicted_share']:.0f}%", plan["bound_by"]
            yield f"  at most {share} of the tensor cores' peak: a block of scores is bound by its {bound}"
        if "tflops" in plan:
            peak = plan["matmul_tflops"]
            beside = f", {100 * plan['tflops'] / peak:.0f}% of a matrix product here and now" if peak else ""
            yield f"  measured {plan['tflops']:.0f} TFLOP/s{beside}"
        yield from (f"  {reason}" for reason in plan["reasons"])
        for launch in plan["launches"]:
            config = " ".join(f"{name.removeprefix('k')}={value}" for name, value in launch["config"].items())
            yield f"  {launch['kernel']}: {config}"


def tune_table(name: str, trials: Iterable[Mapping[str, Any]]) -> Table:
    """Tiles, fastest first; the table's own choice has a star."""
    table = new_table(name)
    rows = [dict(trial) for trial in trials]
    for column in (rows or [{}])[0]:
        if column != "is_table":
            table.add_column(column)
    for row in rows:
        star = "*" if row.pop("is_table") else ""
        table.add_row(
            row.pop("tile") + star, *(f"{value:.3f}" if name == "ms" else str(value) for name, value in row.items())
        )
    return table


def compile_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """One row a kernel and target."""
    table = new_table()
    for column in ("kernel", "target", "KiB", "registers", "spills", "seconds", "verdict"):
        table.add_column(
            column, justify="left" if column in ("kernel", "target", "verdict") else "right", overflow="fold"
        )
    for row in rows:
        verdict = f"{BAD}refused[/]" if row["error"] else "spills" if row["spill_bytes"] else f"{GOOD}ok[/]"
        table.add_row(
            row["symbol"],
            row["target"],
            f"{row['bytes'] / 1024:.0f}",
            str(row["registers"]),
            str(row["spill_bytes"]),
            f"{row['seconds']:.1f}",
            verdict,
        )
    return table


def info_table(facts: Mapping[str, Any]) -> Table:
    """Two columns: what, and what of it."""
    table = new_table(f"cuflash {facts['cuflash']}", show_header=False)
    table.add_row("runs on", "the GPU" if facts["device"] == "gpu" else "the CPU emulator")
    table.add_row("python", f"{facts['python']} on {facts['platform']}")
    table.add_row("libraries", "  ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    table.add_row("NVIDIA driver", facts["driver"] or "none")
    table.add_row("NVRTC", facts["nvrtc"] or "none")
    table.add_row("C++ compiler", facts["emulator_compiler"] or "none")
    table.add_row("plans of GPU arrays", facts["launcher"])
    for card in facts["gpus"]:
        sizes = f"{card['memory_gib']} GiB, {card['multiprocessors']} SMs, {card['shared_limit_kib']} KiB shared"
        families = f"families {', '.join(card['families']) or 'none'}: {card['why']}"
        table.add_row(
            f"GPU {card['index']}",
            escape(f"{card['name']} ({card['capability']}, {card['target']}), {sizes}\n{families}"),
        )
    for name, cache in facts["caches"].items():
        table.add_row(f"cache, {name}", escape(f"{cache['path']}: {cache['files']} files, {cache['mib']} MiB"))
    for absent in facts["missing"]:
        table.add_row("[yellow]missing[/]", escape(f"{absent['what']}: {absent['remedy']}"))
    return table
