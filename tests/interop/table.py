"""The table of docs/frameworks.md, from the ``works`` marks of the tests beside this file: what works, and the proof.

python tests/interop/table.py          # rewrites the table in the page
"""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "frameworks.md"
BEGIN, END = "<!-- table: begin (tests/interop/table.py writes it) -->", "<!-- table: end -->"


def rows() -> list[tuple[str, str, str]]:
    """(library, what works, test), in the order of the files."""
    found = []
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.works":
                    library, what = (ast.literal_eval(argument) for argument in mark.args)
                    found.append((library, what, f"{path.stem}::{node.name}"))
    order = ["JAX", "torch", "NumPy", "DLPack"]
    return sorted(found, key=lambda row: order.index(row[0]))


def table() -> str:
    """Markdown."""
    lines = ["| library | what works | shown by |", "|---|---|---|"]
    lines += [f"| {library} | {what} | `{test}` |" for library, what, test in rows()]
    return "\n".join(lines)


def page_with_table() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table())
