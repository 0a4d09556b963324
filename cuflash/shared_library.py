"""Compiled libraries in a cache on disk: where it is, whether one is whole, and where to build instead."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["is_whole", "private_folder", "user_cache"]

logger = logging.getLogger("cuflash")
_OTHER_FORMATS = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # Mach-O, of one processor and of several


def is_whole(path: Path) -> bool:
    """Whether the file is there and not cut short: to map a cut one would end the process and not raise.

    An ELF file ends with the table of its sections; other formats are checked by the systems that load them.
    """
    try:
        with open(path, "rb") as file:
            head, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if head[:5] != b"\x7fELF\x02" or len(head) < 64:
        return head[:4] in _OTHER_FORMATS
    (table,) = struct.unpack_from("<Q", head, 40)
    width, count = struct.unpack_from("<HH", head, 58)
    return size >= table + width * count


@cache
def private_folder(instead_of: Path) -> Path:
    """A folder of this process alone, for a cache that cannot be written; says so once, and goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="cuflash-"))
    logger.warning("%s cannot be written; kernels are kept in %s until this process ends", instead_of, folder)
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def user_cache() -> Path:
    """Where compiled files are kept: CUFLASH_CACHE_DIR, else the user's cache folder.

    A user without a home, as containers run under numbers that nobody gave a name, gets a folder of this process.
    """
    if named := os.environ.get("CUFLASH_CACHE_DIR"):
        return Path(named)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "cuflash"
    try:
        return Path.home() / ".cache" / "cuflash"
    except RuntimeError:
        return private_folder(Path("~/.cache/cuflash"))
