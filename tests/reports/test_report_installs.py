"""Reported faults: imports without a driver, GPUs and compilers out of range, two CuPy packages, missing headers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from children import run

from cuflash.architectures import architecture_of
from cuflash.errors import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]


def test_import_without_a_driver() -> None:
    """Import, option objects, help and the reference work; the first GPU call raises one readable error."""
    script = """
import numpy as np, cuflash, cuflash.reference
from cuflash.cli import main
from click.testing import CliRunner
cuflash.SlidingWindow(3, 0), cuflash.Softcap(5.0), cuflash.Alibi()
assert CliRunner().invoke(main, ["--help"]).exit_code == 0
q = np.ones((1, 2, 1, 8), np.float32)
assert np.allclose(cuflash.reference.attention(q, q, q)[0], 1)
from cuflash.backends import why_no_gpu
assert why_no_gpu()
print("fine")
"""
    result = run(script, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0 and result.stdout.strip() == "fine", result.stderr


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5)])
def test_a_gpu_too_old_is_named(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        architecture_of(capability)
    assert f"{capability[0]}.{capability[1]}" in str(caught.value) and "8.0" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("capability", [(12, 0), (12, 1), (13, 0)])
def test_a_gpu_newer_than_the_tables_gets_the_generic_family(capability: tuple[int, int]) -> None:
    row = architecture_of(capability)
    assert "sm80" in row.families and row.shared_limit >= 99 * 1024 and row.target.startswith("sm_1")


def test_a_target_the_compiler_does_not_know_is_named() -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    from cuflash import jit
    from cuflash.architectures import Device
    from cuflash.errors import CompileError
    from cuflash.plan import forward_plan
    from cuflash.problem import Problem, spec_of_contiguous

    spec = spec_of_contiguous((1, 64, 1, 64), "float16")
    variant = forward_plan(Problem.forward(spec, spec, spec), Device.emulated()).launches[0].variant
    with pytest.raises(CompileError) as caught:
        jit.compile_cubin(variant, "sm_61")
    assert "sm_61" in str(caught.value) and variant.symbol in str(caught.value)
    assert "cuflash" in str(caught.value).rsplit("reproduce with", 1)[-1]


INSTALLED = {
    "none": ([], []),
    "one": (["cupy-cuda12x"], []),
    "two": (["cupy-cuda12x", "cupy_cuda13x"], ["cupy-cuda12x and cupy-cuda13x"]),
    "from conda": (["cupy"], []),
    "from conda and a wheel": (["cupy", "cupy-cuda13x"], ["cupy and cupy-cuda13x"]),
}


@pytest.mark.parametrize(("names", "reported"), INSTALLED.values(), ids=INSTALLED)
def test_two_cupy_packages_are_reported(names: list[str], reported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `cuflash info` says of fake lists of installed packages; no wheel is a hard dependency of ours."""
    from importlib import metadata

    from cuflash import info

    class Fake:
        def __init__(self, name: str) -> None:
            self.metadata = {"Name": name}

    monkeypatch.setattr(metadata, "distributions", lambda: [Fake(name) for name in ("numpy", *names)])
    found = [row["what"] for row in info._missing("no GPU") if "single CuPy" in row["what"]]
    assert len(found) == len(reported) and all(part in found[0] for part in reported)
    hard = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("]")[0]
    assert "numpy" in hard and "cupy" not in hard


def test_missing_cupy_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash.backends import why_no_gpu

    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "cuflash[cuda12]" in why_no_gpu() and "cuflash[cuda13]" in why_no_gpu()


def test_a_cupy_that_breaks_at_import_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy makes its cache folder when it is imported; without a home that can be written it does not import."""
    from cuflash.backends import why_no_gpu

    (tmp_path / "cupy.py").write_text("raise NotADirectoryError(20, 'Not a directory', '/dev/null/.cupy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert "/dev/null/.cupy" in why_no_gpu()


def test_a_user_without_a_home_has_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run under numbers that no list of users knows: Path.home() raises."""
    from cuflash import emulator_build, info

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for name in ("HOME", "XDG_CACHE_HOME", "CUFLASH_CACHE_DIR", "CUFLASH_EMULATOR_CACHE"):
        monkeypatch.delenv(name, raising=False)
    folder = emulator_build.cache_folder()
    assert folder.parent.is_dir() and folder == emulator_build.cache_folder()
    assert info._caches()["emulator"]["path"] == str(folder)


def test_kernels_need_no_header_of_a_toolkit() -> None:
    """A wheel-only install has no cuda_fp16.h: every include of a kernel is one of our own."""
    sources = [p for p in (ROOT / "cuda_src").rglob("*.cuh") if "emulator" not in p.relative_to(ROOT).parts]
    assert sources
    assert [path.name for path in sources if "#include <" in path.read_text()] == []
