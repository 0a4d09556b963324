"""docs/frameworks.md and the examples: the table is the tests' own, and the code runs."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from table import PAGE, page_with_table, rows

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_the_one_that_the_tests_make() -> None:
    assert len(rows()) > 20
    assert PAGE.read_text() == page_with_table(), "run python tests/interop/table.py"


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("library", ["jax", "torch"])
def test_code_of_a_library_runs(library: str) -> None:
    module = pytest.importorskip(library)
    has_gpu = library == "torch" and module.cuda.is_available()
    for code in re.findall(rf"^```py {library}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if "register_hf" in code:
            pytest.importorskip("transformers")
        runnable = code if has_gpu else code.replace(', device="cuda"', "")
        runnable = runnable.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')  # needs no compiler
        exec(compile(runnable, f"{library} code block", "exec"), {})


@pytest.mark.slow
def test_the_gpt_example_trains_alike_with_both_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.setattr(sys, "argv", ["train_gpt_jax.py", "--steps", "3"])
    runpy.run_path(str(ROOT / "examples" / "train_gpt_jax.py"), run_name="__main__")


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_the_transformers_example(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    runpy.run_path(str(ROOT / "examples" / "torch_hf.py"), run_name="__main__")
