"""`docs/guarantees.md` names a test for every promise, and each test that a page names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
TEST_ID = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+(?:::\w+)?))?`")


LATER = {"more", "slow"}
"""Marks of what `make test` leaves out, but for what watches the clock or needs a trained model."""


@cache
def marks_in(path: str) -> dict[str, set[str]]:
    """A file's test functions and classes, methods as `Class::method`, each with its marks."""
    marks: dict[str, set[str]] = {}
    of_file: set[str] = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            marks[node.name] = named_marks(*node.decorator_list)
        elif isinstance(node, ast.ClassDef):
            marks[node.name] = named_marks(*node.decorator_list)
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    of_method = named_marks(*method.decorator_list)
                    marks[f"{node.name}::{method.name}"] = marks[node.name] | of_method
        elif isinstance(node, ast.Assign):  # `TestPool = PagePoolMachine.TestCase`
            for target in node.targets:
                if isinstance(target, ast.Name):
                    marks[target.id] = named_marks(node.value)
                    if target.id == "pytestmark":
                        of_file = marks.pop("pytestmark")
    return {name: of_test | of_file for name, of_test in marks.items()}


def named_marks(*nodes: ast.expr) -> set[str]:
    """Names of marks, `slow` of `pytest.mark.slow`. Those of single parameters don't count."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.List):
            found |= named_marks(*node.elts)
        elif isinstance(node, ast.Call):
            found |= named_marks(node.func)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark":
            found.add(node.attr)
    return found


def defined_in(path: str) -> set[str]:
    return {*marks_in(path)}


def rows() -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith("| promise")]


def test_every_promise_names_a_test() -> None:
    assert len(rows()) > 15
    for row in rows():
        if not row.startswith("| ---"):
            assert TEST_ID.search(row), f"no test is named for: {row}"


def test_make_test_has_a_test_of_every_promise() -> None:
    assert [row for row in rows() if TEST_ID.search(row) and is_left_out(row)] == []


def is_left_out(row: str) -> bool:
    of_tests: list[set[str]] = []
    for path, name in TEST_ID.findall(row):
        marks = marks_in(path)
        tests = [name] if name else [each for each in marks if each.lower().startswith("test")]
        of_tests += [marks[each] for each in tests]
    return all(marks & LATER and "real" not in marks for marks in of_tests)


def test_every_named_test_exists() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {path} {name}"
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for path, name in TEST_ID.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).is_file() or (name and name not in defined_in(path))
    ]
    assert lost == []
