"""How launcher.c becomes a library. A platform wheel's build runs this file alone: it imports nothing of cuflash."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["BESIDE", "SOURCE", "command", "compiler"]

SOURCE = Path(__file__).with_name("launcher.c")
BESIDE = SOURCE.with_name("libcuflash_launcher.so")  # launcher.so would be taken for the module launcher
_COMPILERS = ("cc", "gcc", "clang")


def compiler() -> str | None:
    """``$CC``, or the first C compiler on PATH."""
    return os.environ.get("CC") or next((name for name in _COMPILERS if shutil.which(name)), None)


def command(compiler: str, target: Path) -> list[str]:
    """The command that makes the library ``target``."""
    return [*compiler.split(), "-std=c11", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(target), "-ldl"]
