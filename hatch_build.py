"""Platform wheels: with CUFLASH_PLATFORM_WHEEL=1 the wheel carries the compiled launcher; no compiler is needed then.

The library has no Python ABI and needs no CUDA, so there is one wheel a platform and not one a Python. Its tag is
manylinux of the newest glibc that the library asks for. Without the variable the wheel stays pure.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LauncherHook(BuildHookInterface):
    """Adds the launcher's library to a wheel that asks for it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("CUFLASH_PLATFORM_WHEEL") != "1" or version == "editable":
            return
        if sys.platform != "linux":
            raise RuntimeError("CUFLASH_PLATFORM_WHEEL=1 builds for Linux, where CUDA's driver is; this is not Linux")
        self.folder = tempfile.TemporaryDirectory()
        recipe = runpy.run_path(str(Path(self.root) / "interop" / "launcher_build.py"))
        library = Path(self.folder.name) / recipe["BESIDE"].name
        compiler = recipe["compiler"]()
        if compiler is None:
            raise RuntimeError("CUFLASH_PLATFORM_WHEEL=1 needs a C compiler on PATH, or in $CC")
        subprocess.run([*recipe["command"](compiler, library), "-s"], check=True)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(library.read_bytes())}"
        build_data["force_include"][str(library)] = f"cuflash/interop/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if folder := getattr(self, "folder", None):
            folder.cleanup()


def _platform_tag(library: bytes) -> str:
    """manylinux of the newest glibc symbol in the library; a plain Linux tag where it has none, as with musl."""
    versions = [tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(\d+\.\d+)", library)]
    if not versions:
        return f"linux_{platform.machine()}"
    major, minor = max(versions)
    return f"manylinux_{major}_{minor}_{platform.machine()}"
