"""The wheel is small, complete and alone: it carries the kernels and needs nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 2**20  # bytes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout without the network."""
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("wheel")
    script = f"from hatchling.build import build_wheel; print(build_wheel({str(target)!r}))"
    built = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return target / built.stdout.split()[-1]


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked as an installer would."""
    target = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def test_it_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < LIMIT


def test_it_carries_every_room(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for name in ("cli.py", "py.typed", "interop/__init__.py", "cuda_src/ptx/mma_sync.cuh"):
        assert f"cuflash/{name}" in inside
    expected = {
        f"cuflash/cuda_src/{path.relative_to(ROOT / 'cuda_src')}" for path in (ROOT / "cuda_src").rglob("*.cuh")
    }
    assert expected <= inside
    assert {name.split("/")[0].split("-")[0] for name in inside} == {"cuflash"}, "nothing else lands in site-packages"
    assert not [name for name in inside if "__pycache__" in name]


def test_it_imports_and_finds_its_kernels_away_from_the_checkout(site: Path) -> None:
    script = (
        "import cuflash, cuflash.cli, cuflash.interop; from cuflash.sources import source_root;"
        "assert callable(cuflash.flash_attention); print(cuflash.__file__); print(source_root())"
    )
    result = run_away(site, "-c", script)
    assert result.returncode == 0, result.stderr
    assert all(line.startswith(str(site)) for line in result.stdout.split())


def test_its_command_works_away_from_the_checkout(site: Path) -> None:
    result = run_away(site, "-m", "cuflash", "source", "--arch", "sm_80", "--head-dim", "64")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("// cuda_src digest")


def test_the_digest_does_not_depend_on_where_it_lies(site: Path) -> None:
    script = "from cuflash.sources import digest; print(digest('ptx/mma_sync.cuh'))"
    here = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run_away(site, "-c", script).stdout == here.stdout


def run_away(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments], cwd=site, env=environment, capture_output=True, text=True, timeout=120
    )
