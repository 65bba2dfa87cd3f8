"""Sizes that no linter holds: 250 lines for a module, 40 for a function below its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

MODULE_LINES = 250
FUNCTION_LINES = 40
RENDERED = ROOT / "tuner" / "runtime" / "moe" / "defaults"
MODULES = sorted(
    path
    for pattern in ("tuner/**/*.py", "templates/package/*.py.j2")
    for path in ROOT.glob(pattern)
    if RENDERED not in path.parents
)


def lengths(text: str) -> Iterator[tuple[str, int]]:
    """Yield each function of a module with its number of lines below its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node) is not None
            first = node.body[0].end_lineno + 1 if documented else node.body[0].lineno
            yield node.name, node.end_lineno - first + 1


def test_lengths_are_counted_below_the_docstring() -> None:
    text = 'def f(\n    a,\n):\n    """Say."""\n    b = 1\n    return b\ndef g():\n    return 1\n'
    assert dict(lengths(text)) == {"f": 2, "g": 1}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_and_its_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MODULE_LINES
    if path.suffix == ".py":
        long = {name: lines for name, lines in lengths(text) if lines > FUNCTION_LINES}
        assert not long
