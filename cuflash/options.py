"""Options that several commands share; among them those that name one attention call without its arrays."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cuflash.errors import ArgumentError
from cuflash.presets import PRESETS, Shape, preset_shapes

__all__ = ["FAMILY", "FILE", "JSON", "MODELS", "PRESET", "shape_options", "shapes_from"]

JSON = click.option("--json", "as_json", is_flag=True, help="Machine-readable output on stdout.")
FAMILY = click.option("--family", default="auto", show_default=True, help="Force a kernel family: sm80, sm90.")
MODELS = click.option("--preset", default="all", show_default=True, help=f"all, {', '.join(PRESETS)}.")
PRESET = click.option("--preset", default=None, help=f"A model's shapes: all, {', '.join(PRESETS)}.")

FILE = click.Path(dir_okay=False, path_type=Path)
_COUNT = click.IntRange(min=0)


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that name one attention call, for commands that need no arrays."""
    options = (
        PRESET,
        click.option("--batch", default=1, type=_COUNT, show_default=True),
        click.option("--seqlen", "seqlen_q", default=4096, type=_COUNT, show_default=True),
        click.option("--seqlen-k", default=None, type=_COUNT, help="Default: as --seqlen."),
        click.option("--heads", "num_q_heads", default=32, type=_COUNT, show_default=True),
        click.option("--kv-heads", "num_kv_heads", default=None, type=_COUNT, help="Default: as --heads."),
        click.option("--head-dim", default=128, type=_COUNT, show_default=True),
        click.option("--head-dim-v", default=0, type=_COUNT, help="Default: as --head-dim."),
        click.option("--dtype", default="bfloat16", show_default=True),
        click.option("--causal", is_flag=True),
        click.option("--window", default=None, help="LEFT,RIGHT; an empty side is open, as in 4095,0 or ,8."),
        click.option("--softcap", default=None, type=float),
        click.option("--alibi", is_flag=True),
        click.option(
            "--align",
            default="bottom-right",
            show_default=True,
            help="bottom-right, top-left, or the key position of query 0.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def shapes_from(preset: str | None, given: dict[str, Any]) -> list[Shape]:
    """The preset's shapes, or the one that the options of ``shape_options`` name.

    Raises:
        ArgumentError: both at once, an unknown preset, a window that is no pair.
    """
    if preset:
        context = click.get_current_context()
        beside = [name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if beside:
            flags = [flag for known in context.command.params if known.name in beside for flag in known.opts]
            raise ArgumentError("--preset", preset, "names whole shapes", f"leave out {', '.join(flags)}")
        return list(preset_shapes(preset))
    sides = _sides(given.pop("window"))
    if re.fullmatch(r"[-+]?\d+", given["align"]):
        given["align"] = int(given["align"])
    given["seqlen_k"] = given["seqlen_q"] if given["seqlen_k"] is None else given["seqlen_k"]
    given["num_kv_heads"] = given["num_q_heads"] if given["num_kv_heads"] is None else given["num_kv_heads"]
    return [Shape(name="call", window=sides, **given)]


def _sides(window: str | None) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    found = re.fullmatch(r"\s*([-+]?\d+)?\s*,\s*([-+]?\d+)?\s*", window)
    if found is None:
        raise ArgumentError("--window", window, "must be LEFT,RIGHT", "an empty side is open, as in 4095,0 or ,8")
    left, right = (None if side is None else int(side) for side in found.groups())
    return left, right
