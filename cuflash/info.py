"""What is here: cards, compilers, caches, libraries; what is missing and how to get it."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import cuflash
from cuflash.backends import default_device, why_no_gpu
from cuflash.interop import launcher

__all__ = ["circumstances", "collect", "cupy_packages", "driver_version", "installed_versions"]

_WATCHED = (
    "numpy",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "jax",
    "torch",
)


def collect() -> dict[str, Any]:
    """Everything `cuflash info` prints, as plain data; never raises for what is absent."""
    no_gpu = why_no_gpu()
    return {
        "cuflash": cuflash.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": installed_versions(),
        "driver": driver_version(),
        "nvrtc": _nvrtc(),
        "device": default_device(),
        "gpus": [] if no_gpu else _gpus(),
        "no_gpu": no_gpu,
        "emulator_compiler": _host_compiler(),
        "launcher": launcher.describe(),
        "caches": _caches(),
        "missing": _missing(no_gpu),
    }


def circumstances() -> dict[str, Any]:
    """What a measured number is worth nothing without: card, driver, versions, command, date."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return {
        "card": properties["name"].decode(),
        "sm_count": properties["multiProcessorCount"],
        "driver": driver_version(),
        "versions": {"cuflash": cuflash.__version__, "python": platform.python_version(), **installed_versions()},
        "nvrtc": _nvrtc(),
        "command": " ".join(["cuflash", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter here, those that are installed."""
    found = {}
    for name in _WATCHED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cupy_packages() -> list[str]:
    """Every installed distribution that brings the module ``cupy``; two of them overwrite each other's files."""
    names = {str(found.metadata["Name"]).lower().replace("_", "-") for found in metadata.distributions()}
    return sorted(name for name in names if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")))


def driver_version() -> str:
    """The NVIDIA driver's version; empty without one."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.split("\n")[0].strip() if answer.returncode == 0 else ""


def _gpus() -> list[dict[str, Any]]:
    import cupy

    from cuflash.architectures import architecture_of
    from cuflash.errors import UnsupportedError

    cards = []
    for index in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        capability = (properties["major"], properties["minor"])
        card = {
            "index": index,
            "name": properties["name"].decode(),
            "capability": f"{capability[0]}.{capability[1]}",
            "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
            "multiprocessors": properties["multiProcessorCount"],
            "shared_limit_kib": properties["sharedMemPerBlockOptin"] // 1024,
        }
        try:
            row = architecture_of(capability)
            card |= {"target": row.target, "families": list(row.families), "why": _why(row.families)}
        except UnsupportedError as error:
            card |= {"target": "", "families": [], "why": str(error)}
        cards.append(card)
    return cards


def _why(families: tuple[str, ...]) -> str:
    if families[0] == "sm80":
        return "mma.sync and cp.async, which every GPU since Ampere has"
    return f"{families[0]} has instructions of its own; {', '.join(families[1:])} serves what it does not take"


def _nvrtc() -> str:
    try:
        from cuflash.jit import nvrtc_version

        return ".".join(map(str, nvrtc_version()))
    except Exception:  # CuPy or the library is absent: `missing` says so
        return ""


def _host_compiler() -> str:
    named = os.environ.get("CXX", "")
    return next((path for name in (named, "c++", "g++", "clang++") if name and (path := shutil.which(name))), "")


def _caches() -> dict[str, dict[str, Any]]:
    from cuflash.emulator_build import cache_folder

    folders = {
        "kernels (CuPy)": Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")),
        "emulator": cache_folder(),
    }
    return {name: {"path": str(folder), **_size(folder)} for name, folder in folders.items()}


def _size(folder: Path) -> dict[str, Any]:
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return {"files": len(files), "mib": round(sum(path.stat().st_size for path in files) / 2**20, 1)}


def _missing(no_gpu: str) -> list[dict[str, str]]:
    absent = []
    if no_gpu and shutil.which("nvidia-smi"):
        absent.append(
            {"what": f"the GPU path: {no_gpu}", "remedy": 'pip install "cuflash[cuda12]" or "cuflash[cuda13]"'}
        )
    elif no_gpu:
        absent.append({"what": "a GPU", "remedy": "none needed to try: the emulator runs the kernels on the CPU"})
    if len(packages := cupy_packages()) > 1:
        remedy = f'pip uninstall {" ".join(packages)}, then pip install "cuflash[cuda12]" or "cuflash[cuda13]"'
        absent.append({"what": f"a single CuPy: {' and '.join(packages)} are installed", "remedy": remedy})
    if util.find_spec("cupy") and not _nvrtc():
        absent.append({"what": "NVRTC", "remedy": "pip install nvidia-cuda-nvrtc-cu12 (CUDA 13: nvidia-cuda-nvrtc)"})
    if not util.find_spec("cupy") and not shutil.which("nvidia-smi"):
        what = "CuPy and NVRTC, for `cuflash compile` and `explain --registers`"
        absent.append({"what": what, "remedy": 'optional: pip install "cuflash[cuda12]" or "cuflash[cuda13]"'})
    if not _host_compiler():
        absent.append({"what": "a C++ compiler, for the emulator", "remedy": "apt-get install g++"})
    for module, extra in (("jax", "jax"), ("torch", "torch"), ("matplotlib", "bench")):
        if util.find_spec(module) is None:
            absent.append({"what": module, "remedy": f'optional: pip install "cuflash[{extra}]"'})
    return absent
