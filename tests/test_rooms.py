"""How a line of code knows where it lives: the twelve rules of docs/architecture.md as assertions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "cuda_src"
FLOORS = ("ptx", "tile", "attention", "kernels")  # includes go downstairs: to a lower index or the same
PURE = [
    *("problem", "plan", "plan_sm80", "variant", "tiling", "masks", "scores", "dtypes", "architectures"),
    *("params", "score_keywords", "sources", "errors", "overlap", "presets", "specs", "access"),
    *("plan_sm80_backward", "plan_sm90", "plan_sm90_backward", "tiling_sm90", "tiling_sm90_backward"),
]
PYTHON_WALL, CUDA_WALL, FUNCTION_WALL = 250, 350, 60  # lines


def cuda_files() -> list[Path]:
    return sorted(path for path in CUDA.rglob("*") if path.suffix in {".cuh", ".h", ".cpp"})


def python_files() -> list[Path]:
    return sorted([*(ROOT / "cuflash").rglob("*.py"), *(ROOT / "interop").rglob("*.py"), ROOT / "cli.py"])


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def room_of(path: Path) -> str:
    parts = path.relative_to(CUDA).parts
    return parts[0]


def test_assembly_sleeps_in_one_room() -> None:
    """Rule 1: asm only under ptx/ (and the emulator's own fiber switch)."""
    guilty = [
        path
        for path in cuda_files()
        if room_of(path) not in {"ptx", "emulator"} and re.search(r"\basm\b", without_comments(path.read_text()))
    ]
    assert guilty == []


def test_includes_go_downstairs() -> None:
    """Rule 2: kernels -> attention -> tile -> ptx; attention names nothing of the machine but its plain types."""
    wrong = []
    for path in cuda_files():
        room = room_of(path)
        if room not in FLOORS:
            continue
        for include in re.findall(r'#include "([^"]+)"', path.read_text()):
            target = include.split("/")[0]
            if target not in FLOORS or FLOORS.index(target) > FLOORS.index(room):
                wrong.append(f"{path.relative_to(CUDA)} -> {include}")
    assert wrong == []


def test_kernels_use_no_platform_switch() -> None:
    """Rule 3: no #ifdef outside ptx/ and the emulator: the include path picks the platform."""
    wrong = [
        str(path.relative_to(CUDA))
        for path in cuda_files()
        if room_of(path) in {"tile", "attention", "kernels"}
        and re.search(r"^\s*#\s*if", path.read_text(), re.MULTILINE)
    ]
    assert wrong == []


def test_the_algorithm_does_not_know_the_machine() -> None:
    """Rule 4: attention/ names no barrier, no shared memory, no lane."""
    words = re.compile(
        r"\b(sync_cta|sync_warp|named_barrier\w*|load_shared|store_shared|lane_index|ldmatrix\w*|mma_\w+)\b"
    )
    wrong = [
        p.name for p in cuda_files() if room_of(p) == "attention" and words.search(without_comments(p.read_text()))
    ]
    assert wrong == []


@pytest.mark.parametrize("kind", ["masks", "scores"])
def test_twins_share_a_name(kind: str) -> None:
    """Rule 5: every mask and score class has a CUDA half of the same name, and the other way round."""
    from cuflash import masks, scores

    classes = masks.MASKS if kind == "masks" else scores.SCORES
    concept = {"masks": "mask", "scores": "score"}[kind]
    headers = {path.stem: path.read_text() for path in (CUDA / "attention" / kind).glob("*.cuh")}
    assert {cls.header for cls in classes} == set(headers) - {concept}
    for cls in classes:
        assert re.search(rf"struct {cls.__name__}\b", headers[cls.header]), cls


def test_choices_are_rows() -> None:
    """Rule 6: no comparison with an architecture outside the tables."""
    pattern = re.compile(r"\b(capability|arch|target|family)\s*(==|>=|<=|<|>|!=)\s*[\(\"'0-9]")
    allowed = {"architectures.py", "jit.py"}
    wrong = [path.name for path in python_files() if path.name not in allowed and pattern.search(path.read_text())]
    assert wrong == []


@pytest.mark.parametrize("name", PURE)
def test_pure_rooms_stay_pure(name: str) -> None:
    """Rule 7: they import no CuPy, no framework, and touch no device."""
    tree = ast.parse((ROOT / "cuflash" / f"{name}.py").read_text())
    modules = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    banned = {"cupy", "cupy_backends", "jax", "torch", "ctypes", "subprocess"}
    assert {module.split(".")[0] for module in modules} & banned == set()


def test_one_door_to_the_compiler_and_one_to_the_gpu() -> None:
    """Rule 8: RawModule is named in jit.py alone; launches leave from launch.py and from interop's own executor."""
    code = {path.name: without_docstrings(path) for path in python_files()}
    assert [name for name, text in code.items() if "RawModule" in text] == ["jit.py"]
    assert {name for name, text in code.items() if "cuLaunchKernel" in text} <= {"launch.py", "driver.py"}


def test_refusals_happen_at_the_door() -> None:
    """Rule 9: the arithmetic below the problem never blames a caller."""
    for name in ("variant", "params", "sources", "tiling"):
        assert "ArgumentError" not in (ROOT / "cuflash" / f"{name}.py").read_text(), name


def test_guests_do_not_wander() -> None:
    """Rule 10: cuflash opens interop only through dispatch; each framework is imported by its own adapter."""
    frameworks = {"jax": "jax", "torch": "torch"}
    for path in python_files():
        text = path.read_text()
        for framework, adapter in frameworks.items():
            if re.search(rf"^\s*(import|from) {framework}\b", text, re.MULTILINE):
                assert path.name.startswith(adapter) or path.name.startswith("peers"), path
        if path.parent.name == "cuflash" and path.name not in {"dispatch.py", "info.py"}:
            assert "cuflash.interop" not in without_docstrings(path), path


def test_rooms_have_walls() -> None:
    """Rule 11: a file at the wall holds two ideas; a function of two screens holds two."""
    sized = [(p, PYTHON_WALL) for p in python_files()] + [(p, CUDA_WALL) for p in cuda_files()]
    long_files = [f"{p.name}: {n}" for p, wall in sized if (n := len(p.read_text().splitlines())) > wall]
    long_functions = [
        f"{path.name}:{node.name}"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and code_lines(node) > FUNCTION_WALL
    ]
    assert long_files + long_functions == []


def test_nothing_in_git_was_written_by_a_program() -> None:
    """Rule 12: no generated sources, no binaries but the recorded vectors and pictures."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known = {".py", ".cuh", ".cpp", ".h", ".c", ".md", ".toml", ".json", ".npz", ".png", ".svg", ".txt", ".typed", ""}
    assert [name for name in files if Path(name).suffix not in known] == []


def test_public_functions_are_documented() -> None:
    """Every public function and class says what it is."""
    import cuflash

    bare = [name for name in cuflash.__all__ if not (getattr(cuflash, name).__doc__ or "").strip()]
    assert bare == []


def test_import_is_light() -> None:
    """Importing cuflash starts no CUDA, imports no framework and costs little on top of NumPy."""
    script = (
        "import numpy, sys, time; start = time.perf_counter(); import cuflash; cuflash.flash_attention;"
        "spent = time.perf_counter() - start; bad = {'cupy', 'jax', 'torch'} & set(sys.modules);"
        "assert not bad, bad; assert spent < 0.3, spent"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def without_docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value = ast.Constant("")
    return ast.unparse(tree)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = (first.end_lineno or 0) if documented else node.lineno
    return (node.end_lineno or 0) - start
