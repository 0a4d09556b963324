"""Where cuda_src lies, what a kernel includes, and the digest that makes an edited header a new kernel."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

import cuflash

__all__ = ["closure", "digest", "source_root"]

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@cache
def source_root() -> Path:
    """The cuda_src folder of this installation: beside the package in a checkout, inside it in a wheel."""
    return next(room for base in cuflash.__path__ if (room := Path(base) / "cuda_src").is_dir())


def closure(entry: str, *roots: Path) -> dict[str, bytes]:
    """Every file reached by quoted includes from ``entry``, by its path as included; the first root with it wins."""
    found: dict[str, bytes] = {}
    pending = [entry]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        path = next((root / name for root in roots or (source_root(),) if (root / name).is_file()), None)
        if path is None:
            raise FileNotFoundError(f"{entry} includes {name}, which is not under cuda_src")
        found[name] = path.read_bytes()
        pending += _INCLUDE.findall(found[name].decode())
    return found


def digest(entry: str) -> str:
    """SHA-256 over the include closure of ``entry``; read once a process unless a file's time changes."""
    root = source_root()
    stamp = max(path.stat().st_mtime_ns for path in root.rglob("*.cuh"))
    return _digest(entry, str(root), stamp)


@cache
def _digest(entry: str, root: str, stamp: int) -> str:
    sha = hashlib.sha256()
    for name, text in sorted(closure(entry, Path(root)).items()):
        sha.update(name.encode() + b"\0" + text + b"\0")
    return sha.hexdigest()
