"""How commands speak: tables to a terminal, JSON to a program, progress to whoever waits, refusals in one line."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cuflash.errors import CuflashError

__all__ = ["Commands", "console", "emit", "emit_one_or_all", "progress", "quiet"]

console = Console(width=None if sys.stdout and sys.stdout.isatty() else 140)
quiet = Console(stderr=True)


class Commands(click.Group):
    """Turns every deliberate refusal into one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read has enough: click ends quietly
            raise
        except (CuflashError, OSError, ModuleNotFoundError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        except KeyError as error:
            raise click.ClickException(str(error.args[0])) from error


def emit(data: Any) -> None:
    click.echo(json.dumps(data, indent=1, default=str))


def emit_one_or_all(documents: list[Any]) -> None:
    """One JSON text whatever was asked for: an object for one shape, a list for several."""
    emit(documents[0] if len(documents) == 1 else documents)


def progress(total: int, label: str) -> tuple[Progress, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=quiet, transient=True)
    return bar, bar.add_task(label, total=total)
