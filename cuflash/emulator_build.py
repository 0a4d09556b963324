"""Host libraries for the emulator: its runtime, built once, and one small library a kernel, in a cache on disk.

A file's name is the digest of everything that made it: sources, flags, the compiler's version, the processor. Builds go
to a temporary folder and arrive by rename, under a lock a target, so processes may build side by side.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from cuflash import sources
from cuflash.errors import EmulatorError
from cuflash.shared_library import is_whole, private_folder, user_cache
from cuflash.side_by_side import side_by_side

__all__ = ["cache_folder", "kernel_library", "runtime_library"]

_COMPILERS = ("g++", "clang++", "c++")
_COMMON = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=fast")
_OPTIONAL = ("-march=native", "-mcpu=native", "-fno-gnu-unique")  # where the compiler knows them
_RUNTIME = ("-O3", "-ftls-model=initial-exec", "-pthread")
# -O1 compiles in little more than half the time of -O2 and runs as fast: the time goes into the runtime.
_KERNEL = ("-O1", "-g1", "-Wno-unknown-pragmas")
_INSTRUMENT = "-fsanitize=thread"
_MAC = sys.platform == "darwin"
_LINK = ("-shared", *(("-undefined", "dynamic_lookup") if _MAC else ()))


def cache_folder() -> Path:
    """Where libraries are kept: CUFLASH_EMULATOR_CACHE, else the user's cache folder."""
    chosen = os.environ.get("CUFLASH_EMULATOR_CACHE")
    if chosen:
        return Path(chosen)
    return user_cache() / "emulator"


@cache
def _compiler() -> tuple[str, ...]:
    """The host compiler's command.

    Raises:
        EmulatorError: there is none; names the package that brings one.
    """
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise EmulatorError(f"CXX={os.environ['CXX']!r} is not a command: {error}") from error
    for command in ([named] if named else []) + [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return tuple(command)
    tried = ", ".join(filter(None, (os.environ.get("CXX"), *_COMPILERS)))
    raise EmulatorError(
        f"the emulator needs a C++20 compiler and found none ({tried}). Install one: `apt-get install g++` on Debian "
        "or Ubuntu, `conda install -c conda-forge cxx-compiler` in conda, `xcode-select --install` on macOS; "
        "or name it in the variable CXX."
    )


@cache
def _flags() -> tuple[str, ...]:
    """Flags the compiler accepts here, for this processor."""
    accepted = [flag for flag in _OPTIONAL if _accepts(*_COMMON, flag)]
    if "-march=native" in accepted and "-mcpu=native" in accepted:
        accepted.remove("-mcpu=native")
    return (*_COMMON, *accepted)


def _accepts(*flags: str) -> bool:
    command = [*_compiler(), *flags, "-Werror", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input="int x;", capture_output=True, text=True).returncode == 0


@cache
def _identity() -> str:
    """What besides text decides the machine code: compiler and processor."""
    version = subprocess.run([*_compiler(), "--version"], capture_output=True, text=True).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return "\n".join((version, platform.machine(), features, *_flags()))


def _include_flags() -> tuple[str, ...]:
    root = sources.source_root()
    return ("-I", str(root / "emulator"), "-I", str(root))


def _digest(*parts: str | bytes) -> str:
    sha = hashlib.sha256(_identity().encode())
    for part in parts:
        sha.update(part.encode() if isinstance(part, str) else part)
        sha.update(b"\0")
    return sha.hexdigest()[:24]


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    with open(folder / f"{name}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    target = Path(command[command.index("-o") + 1])
    if os.strerror(errno.ENOSPC) in result.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
    if result.returncode == 0 and not target.exists():
        raise EmulatorError(
            f"{command[0]} says that it compiled {what}, and made no file; name a C++20 compiler in CXX"
        )
    if result.returncode != 0:
        head = "\n".join(result.stderr.strip().splitlines()[:25])
        raise EmulatorError(f"{what} does not compile for the emulator:\n{head}\ncommand: {shlex.join(command)}")


@cache
def runtime_library() -> Path:
    """The emulator itself; some seconds to build, once a machine."""
    folder = sources.source_root() / "emulator" / "runtime"
    files = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    name = _digest(*_RUNTIME, *(file.name for file in files), *(file.read_bytes() for file in files))
    target = cache_folder() / f"runtime-{name}.so"
    parts = [file for file in files if file.suffix == ".cpp" and file.name != "instrument.cpp"]

    def build(scratch: Path) -> None:
        objects = [scratch / f"{file.stem}.o" for file in parts]

        def one(pair: tuple[Path, Path]) -> None:
            flags = (*_flags(), *_RUNTIME, *_include_flags())
            _run([*_compiler(), *flags, "-c", str(pair[0]), "-o", str(pair[1])], pair[0].name)

        side_by_side(one, zip(parts, objects, strict=True), 2)
        link = [*_compiler(), *_RUNTIME, *_LINK, *map(str, objects), "-o", str(scratch / target.name)]
        _run(link, "the emulator's runtime")

    return _once(target, build)


@cache
def kernel_library(source: str, instrument: bool) -> Path:
    """One kernel for the host. ``instrument`` makes it report every load and store that it does through pointers."""
    root = sources.source_root()
    roots = (root / "emulator", root)
    parts: list[str | bytes] = [source, str(instrument), *_KERNEL]
    included = [line.split('"')[1] for line in source.splitlines() if line.startswith("#include")]
    for entry in [*included, *(("emulator/runtime/instrument.cpp",) if instrument else ())]:
        for name, text in sorted(sources.closure(entry, *roots).items()):
            parts += [name, text]
    target = cache_folder() / f"kernel-{_digest(*parts)}.so"

    def build(scratch: Path) -> None:
        text, compiled = scratch / "kernel.cpp", scratch / "kernel.o"
        text.write_text(source)
        flags = (*_flags(), *_KERNEL, *((_INSTRUMENT,) if instrument else ()), *_include_flags())
        _run([*_compiler(), *flags, "-c", str(text), "-o", str(compiled)], "a kernel")
        extra = [str(root / "emulator" / "runtime" / "instrument.cpp")] if instrument else []
        # The callbacks themselves are not instrumented, and no sanitizer library is linked.
        link = [*_compiler(), *_flags(), "-O2", *_include_flags(), *_LINK, str(compiled), *extra]
        _run([*link, "-o", str(scratch / target.name)], "a kernel")

    return _once(target, build)


def _once(target: Path, build: Callable[[Path], None]) -> Path:
    """Builds into a scratch folder unless the target is there and whole, and renames it into place.

    Where the cache cannot be written (read-only, full, not a folder) a folder of this process stands in for it.
    """
    if is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent, target.stem):
            if not is_whole(target):
                with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                    build(Path(scratch))
                    os.replace(Path(scratch) / target.name, target)
    except OSError as error:
        private = private_folder(target.parent)
        if private == target.parent:
            raise EmulatorError(f"no folder can be written to build the emulator's kernels: {error}") from error
        return _once(private / target.name, build)
    return target
