"""The `cuflash` command: what is here, is it right, how fast is it, why, and what exactly runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from cuflash import __version__
from cuflash.options import FAMILY, FILE, JSON, MODELS, PRESET, shape_options, shapes_from
from cuflash.presets import GRIDS, preset_shapes
from cuflash.terminal import Commands, console, emit, emit_one_or_all, progress


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cuflash")
def main() -> None:
    """Exact attention on raw CUDA."""


@main.command()
@JSON
def info(as_json: bool) -> None:
    """What is here, what would run where, and what is missing."""
    from cuflash.info import collect

    facts = collect()
    if as_json:
        return emit(facts)
    from cuflash.tables import info_table

    return console.print(info_table(facts))


@main.command()
@click.option("--device", type=click.Choice(["auto", "gpu", "emulator"]), default="auto", show_default=True)
@MODELS
@click.option("--quick", "scope", flag_value="quick", help="A handful of cases, small.")
@click.option("--full", "scope", flag_value="full", help="Every dtype, longer sequences, edge cases.")
@FAMILY
@JSON
def check(device: str, preset: str, scope: str | None, family: str, as_json: bool) -> None:
    """Compares forward and backward with float64, within the error budget of docs/contract.md."""
    from cuflash.backends import DEVICES, default_device, why_no_gpu
    from cuflash.check import cases, run
    from cuflash.tables import case_cells, case_table, complaints

    device = default_device() if device == "auto" else device
    if device == DEVICES[0] and (why := why_no_gpu()):
        raise click.ClickException(f"no GPU to check: {why}; --device emulator needs none")
    shapes = cases(preset, scope or "", device)
    table, results = case_table(device), []
    bar, task = progress(len(shapes), "checking")
    with bar:
        for result in run(shapes, device, family):
            results.append(result)
            table.add_row(*case_cells(result))
            bar.advance(task)
    wrong = sum(not result.ok for result in results)
    right = sum(result.ok and not result.refusal for result in results)
    if as_json:
        emit({"device": device, "failed": wrong, "cases": [result.as_dict() for result in results]})
    else:
        console.print(table)
        for told in complaints(results):
            console.print(told, style="red", markup=False, highlight=False)
        failed, fine = (
            f"[bold red]{wrong} of {len(results)} cases failed[/]",
            f"[green]{right} case{'s, all' if right != 1 else ','} within budget[/]",
        )
        console.print(failed if wrong else fine)
    sys.exit(1 if wrong or not right else 0)


@main.command()
@PRESET
@click.option(
    "--grid", type=click.Choice(list(GRIDS)), help="fa: the papers' grid (the default); odd: the shapes beside it."
)
@click.option("--head-dim", "head_dims", type=int, multiple=True, help="Only these rows of the grid.")
@click.option("--mode", default="fwd,bwd", show_default=True, help="fwd, bwd, fwdbwd; separated by commas.")
@click.option("--peers", default="auto", show_default=True, help="auto, none, or names separated by commas.")
@click.option(
    "--recorded",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="Ratios to cuDNN that stand for peers not installed.",
)
@click.option("--accuracy", is_flag=True, help="Distances from float64 instead of times.")
@click.option("--draws", type=click.IntRange(1), default=8, show_default=True, help="Sets of inputs for --accuracy.")
@click.option("--deterministic", is_flag=True, help="Time the deterministic gradients.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Times through all orders.")
@click.option("--budget", default=40.0, show_default=True, help="Milliseconds a contestant gets each time through.")
@click.option("--save", type=FILE, default=None, help="Write the JSON record here.")
@click.option("--plot", "picture", type=FILE, default=None, help="Write a picture here.")
@FAMILY
@JSON
def bench(preset: str | None, grid: str | None, head_dims: tuple[int, ...], as_json: bool, **given: Any) -> None:
    """Times cuflash and its peers in turn on the same arrays; needs a GPU."""
    from cuflash.backends import why_no_gpu

    if why := why_no_gpu():
        raise click.ClickException(f"a benchmark needs a GPU: {why}")
    from cuflash.session import bench_session

    draws = given.pop("draws")
    if given.pop("accuracy"):
        accuracy(preset, head_dims, as_json, given["peers"], given["family"], draws, given["save"])
        return
    shapes = preset_shapes(preset) if preset else GRIDS[grid or "fa"]()
    shapes = tuple(shape for shape in shapes if not head_dims or shape.head_dim in head_dims)
    bar, task = progress(len(shapes) * len(given["mode"].split(",")), "measuring")
    with bar:
        session = bench_session(shapes, advance=lambda: bar.advance(task), **given)
    emit(session.record) if as_json else session.print(console)
    sys.exit(any(row.failure for row in session.rows))


def accuracy(
    preset: str | None, head_dims: tuple[int, ...], as_json: bool, peers: str, family: str, draws: int, save: Any
) -> None:
    """`bench --accuracy`."""
    from cuflash.accuracy import accuracy_shapes, run
    from cuflash.tables import accuracy_table

    shapes = [shape.reduced(2048, 4) for shape in preset_shapes(preset)] if preset else accuracy_shapes()
    shapes = [shape for shape in shapes if not head_dims or shape.head_dim in head_dims]
    bar, task = progress(len(shapes), "comparing")
    with bar:
        record = run(shapes, peers, family, draws, save, lambda: bar.advance(task))
    emit(record) if as_json else console.print(accuracy_table(record))


@main.command()
@shape_options
@click.option("--arch", default=None, help="sm_80, sm_90a, …; default: the GPU here, else sm_90a.")
@click.option("--registers", is_flag=True, help="Compile, to know registers and spills; needs NVRTC, no GPU.")
@click.option("--measure", is_flag=True, help="Time the call on this GPU, and a matrix product to hold it against.")
@click.option("--deterministic", is_flag=True)
@FAMILY
@JSON
def explain(preset: str | None, as_json: bool, **given: Any) -> None:
    """Which kernels a call runs, with which tiles, and why; how fast they could be, and are."""
    from cuflash.explanation import explain_shapes
    from cuflash.tables import explain_lines, explain_table

    asked = {name: given.pop(name) for name in ("arch", "registers", "measure", "deterministic", "family")}
    found = explain_shapes(shapes_from(preset, given), **asked)
    if as_json:
        emit_one_or_all([{"shape": shape.name, "plans": plans} for shape, plans in found])
    for shape, plans in () if as_json else found:
        console.print(f"[bold]{shape.name}[/] on {plans[0]['device']}", explain_table(plans))
        console.print(*explain_lines(plans), sep="\n", markup=False, highlight=False)
    if not as_json:
        console.print("\nFigures beside tiles are TFLOP/s on an H200, by which they were chosen.", highlight=False)


@main.command()
@shape_options
@click.option("--arch", default=None, help="sm_80, sm_90a, …; default: the GPU here, else sm_90a.")
@click.option("--symbol", default="", help="Only kernels whose name contains this.")
@FAMILY
@JSON
def source(preset: str | None, arch: str | None, symbol: str, family: str, as_json: bool, **given: Any) -> None:
    """The CUDA text of the kernels a call runs, as NVRTC gets it."""
    from cuflash import catalog

    variants = catalog.unique_variants(shapes_from(preset, given), catalog.device_here(arch, family))
    chosen = [variant for variant in variants if symbol in variant.symbol]
    if not chosen:
        raise click.ClickException(f"no kernel contains {symbol!r}; there are: {', '.join(v.symbol for v in variants)}")
    if as_json:
        return emit([{"symbol": variant.symbol, "source": variant.source()} for variant in chosen])
    return click.echo("\n".join(variant.source() for variant in chosen))


@main.command()
@shape_options
@JSON
def tune(preset: str | None, as_json: bool, **given: Any) -> None:
    """Times the tiles around the table's choice on this GPU."""
    from cuflash import tables, tuning

    documents = []
    for shape in shapes_from(preset, given):
        found = [trial.as_dict() for trial in tuning.tune(shape)]
        documents.append({"shape": shape.name, "trials": found})
        if not as_json:
            console.print(tables.tune_table(shape.name, found))
    if as_json:
        emit_one_or_all(documents)


@main.command("compile")
@click.option(
    "--arch", "archs", multiple=True, default=("all",), show_default=True, help="sm_80, sm_90a, …; repeatable."
)
@MODELS
@click.option("--symbol", default="", help="Only kernels whose name contains this.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=None, help="Write cubins here.")
@FAMILY
@JSON
def compile_command(
    archs: tuple[str, ...], preset: str, symbol: str, out: Path | None, family: str, as_json: bool
) -> None:
    """Compiles the kernels that models need, for any target; needs NVRTC, no GPU."""
    from cuflash import catalog
    from cuflash.tables import compile_table

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    jobs = []
    for known in catalog.architectures(archs):
        variants = catalog.unique_variants(preset_shapes(preset), catalog.device_like(known, family))
        jobs += [(variant, known.target) for variant in variants if symbol in variant.symbol]
    if not jobs:
        raise click.ClickException(f"no kernel contains {symbol!r}; `cuflash source` prints names")
    bar, task = progress(len(jobs), "compiling")
    rows = []
    with bar:
        for compiled in catalog.compile_many(jobs, out):
            rows.append(compiled)
            bar.advance(task)
    if as_json:
        emit(rows)
    else:
        console.print(compile_table(rows))
        for row in rows:
            console.print(row["error"], style="red", markup=False, highlight=False, end="\n" if row["error"] else "")
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
