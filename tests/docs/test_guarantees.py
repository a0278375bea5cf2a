"""`docs/guarantees.md` names a test for every promise, and each test that a page names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
TEST_ID = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+(?:::\w+)?))?`")


@cache
def defined_in(path: str) -> frozenset[str]:
    """Names of a file's test functions and classes; methods as `Class::method`."""
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {
                f"{node.name}::{method.name}"
                for method in node.body
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.Assign):  # `TestPool = PagePoolMachine.TestCase`
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def rows() -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith("| promise")]


def test_every_promise_names_a_test() -> None:
    assert len(rows()) > 15
    for row in rows():
        if not row.startswith("| ---"):
            assert TEST_ID.search(row), f"no test is named for: {row}"


def test_every_named_test_exists() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {path} {name}"
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for path, name in TEST_ID.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).is_file() or (name and name not in defined_in(path))
    ]
    assert lost == []
