"""Runs the words of a plan: through the compiled launcher.c where there is one, else through a twin in Python.

The C launcher needs no Python ABI and no headers. A ``libcuflash_launcher.so`` beside this file, which platform wheels
carry, is taken as it is; elsewhere it is built once into the cache when the machine has a C compiler, in a temporary
file that is renamed when whole, so that two processes never see half a library. ``CUFLASH_LAUNCHER`` chooses by hand:
``c``, ``python`` or ``auto``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cuflash.errors import ArgumentError, CompileError, CuflashError
from cuflash.interop import launcher_build
from cuflash.shared_library import is_whole, user_cache

__all__ = ["CLauncher", "Launcher", "Run", "build", "describe", "launcher"]

_TEXT_BYTES = 320
_lock = threading.Lock()


# (addresses in the order of the plan's words, stream, device or -1 for the one of the current context)
Run = Callable[[Sequence[int], int, int], None]


class Launcher(Protocol):
    """What an executor of words offers."""

    name: str

    def register(self, key: int, device: int, handle: int) -> None:
        """Makes a loaded kernel known by its content hash on one device."""

    def prepare(self, words: np.ndarray[Any, Any]) -> Run:
        """The plan of these words, ready to be queued again and again."""


class CLauncher:
    """launcher.c through ctypes; its two FFI entry points are given to XLA as addresses."""

    name = "c"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self._run = self.library.cuflash_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        self._run.argtypes += [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
        self.library.cuflash_register.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p]

    def register(self, key: int, device: int, handle: int) -> None:
        with _lock:
            if self.library.cuflash_register(key, device, handle):
                raise CuflashError("the launcher's table is full: more than 8192 kernels in one process")

    def prepare(self, words: np.ndarray[Any, Any]) -> Run:
        words = np.ascontiguousarray(words, np.int64)
        start, size, execute = words.ctypes.data, words.size, self._run
        text = ctypes.create_string_buffer(_TEXT_BYTES)  # written on failure only
        count = int(words[1]) if size > 1 else 0
        pack = struct.Struct(f"{max(count, 0)}Q").pack

        # Everything that does not change is bound here: attribute look-ups cost more than the call into C.
        def run(operands: Sequence[int], stream: int, device: int, keep: Any = words) -> None:
            if execute(start, size, pack(*operands), count, stream, device, text, _TEXT_BYTES):
                raise CuflashError(text.value.decode())

        return run


@cache
def launcher() -> Launcher:
    """The launcher of this process, chosen once.

    Raises:
        ArgumentError: ``CUFLASH_LAUNCHER`` is none of its three values.
        CompileError: ``CUFLASH_LAUNCHER=c`` and it can be neither found nor built.
    """
    from cuflash.interop.driver import PythonLauncher

    choice = os.environ.get("CUFLASH_LAUNCHER", "auto")
    if choice not in ("auto", "c", "python"):
        raise ArgumentError("CUFLASH_LAUNCHER", choice, "must be auto, c or python")
    if choice == "python":
        return PythonLauncher()
    try:
        return CLauncher(build())
    except (CompileError, OSError):
        if choice == "c":
            raise
        return PythonLauncher()


def describe() -> str:
    """One line for ``cuflash info``."""
    chosen = launcher()
    if isinstance(chosen, CLauncher):
        return f"compiled launcher ({chosen.path})"
    return "Python launcher (slower by some microseconds a call; a C compiler would bring the compiled one)"


@cache
def build() -> Path:
    """The launcher library: the one lying here, the cache's, or freshly compiled.

    Raises:
        CompileError: no C compiler, or it refused the source.
    """
    if launcher_build.BESIDE.is_file():
        return launcher_build.BESIDE
    digest = hashlib.sha256(launcher_build.SOURCE.read_bytes() + platform.machine().encode()).hexdigest()[:16]
    path = user_cache() / f"launcher-{digest}.so"
    if not is_whole(path):
        _compile(path)
    return path


def _compile(path: Path) -> None:
    compiler = launcher_build.compiler()
    if compiler is None:
        raise CompileError("launcher.c", platform.machine(), "no C compiler on PATH", "cc --version")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            command = launcher_build.command(compiler, fresh)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CompileError("launcher.c", platform.machine(), done.stderr, " ".join(command))
            os.replace(fresh, path)
    except OSError as error:
        raise CompileError(
            "launcher.c", platform.machine(), str(error), f"{compiler} {launcher_build.SOURCE}"
        ) from error
