"""A platform wheel carries the compiled launcher; where it is installed, no compiler is needed to choose it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 2**20  # bytes
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="platform wheels are built on Linux"),
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"),
    pytest.mark.slow,
]


def build(folder: Path, **variables: str) -> Path:
    """A wheel of the checkout, built without the network."""
    pytest.importorskip("hatchling")
    script = f"from hatchling.build import build_wheel; print(build_wheel({str(folder)!r}))"
    environment = {**os.environ, **variables}
    built = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / built.stdout.split()[-1]


@pytest.fixture(scope="module")
def platform_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("platform"), CUFLASH_PLATFORM_WHEEL="1")


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pure"), CUFLASH_PLATFORM_WHEEL="")


def launcher_told_by(wheel: Path, folder: Path) -> str:
    """What ``cuflash info`` says after the wheel was installed in a fresh environment with nothing on PATH.

    cuflash's requirements come from the environment that runs the tests, behind the new one's own packages.
    """
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    homes = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *requirements_elsewhere()}
    (Path(site) / "requirements.pth").write_text("\n".join(sorted(homes)) + "\n")
    nothing = folder / "nothing"
    nothing.mkdir()
    dropped = ("PYTHONPATH", "CC", "CUFLASH_LAUNCHER")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"PATH": str(nothing), "CUFLASH_CACHE_DIR": str(folder / "cache")}
    command = [python, "-m", "cuflash", "info", "--json"]
    told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    launcher: str = json.loads(told.stdout)["launcher"]
    return launcher


def requirements_elsewhere() -> set[str]:
    """Folders outside site-packages that hold what cuflash requires, for instance on PYTHONPATH."""
    import click
    import numpy

    return {str(Path(module.__file__).parent.parent) for module in (click, numpy)}


def test_its_tag_names_the_platform_and_no_python(platform_wheel: Path) -> None:
    machine = re.escape(platform.machine())
    assert re.search(rf"-py3-none-(manylinux_2_\d+|linux)_{machine}\.whl$", platform_wheel.name)
    assert platform_wheel.stat().st_size < LIMIT


def test_a_wheel_is_pure_unless_asked(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert pure_wheel.stat().st_size < LIMIT


def test_it_chooses_the_compiled_launcher_without_a_compiler(platform_wheel: Path, tmp_path: Path) -> None:
    told = launcher_told_by(platform_wheel, tmp_path)
    assert told.startswith(f"compiled launcher ({tmp_path}")
    assert told.endswith("/cuflash/interop/libcuflash_launcher.so)")


def test_the_pure_wheel_falls_back_to_python(pure_wheel: Path, tmp_path: Path) -> None:
    assert "Python launcher" in launcher_told_by(pure_wheel, tmp_path)
