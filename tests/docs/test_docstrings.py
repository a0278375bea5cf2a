"""Docstrings stand on their own: none goes on with a phrase that the name above it began."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house import PACKAGE, PLUGINS, ROOT

FOLDERS = (PACKAGE, PLUGINS, ROOT / "aioserve_main")
NO_BEGINNING = frozenset(
    {
        *("Behind", "Beside", "Beyond", "By", "Nobody", "Of", "So", "Than", "That", "Those", "To"),
        *("Whoever", "Whom", "Whose"),
    }
)
"""What no docstring begins with. Name the thing first: "Tokens that ...", "Headers beside ..."."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes and functions, and of the attributes and
    constants that one stands behind."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text


def misbegun(source: str) -> list[tuple[int, str]]:
    """Line and first word of the docstrings that begin with one of `NO_BEGINNING`."""
    found = []
    for line, text in docstrings(source):
        first = re.match(r"\W*(\w*)", text)
        if first is not None and first[1] in NO_BEGINNING:
            found.append((line, first[1]))
    return found


def test_no_docstring_goes_on_with_what_a_name_began() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: a docstring begins with {word!r}"
        for folder in FOLDERS
        for path in sorted(folder.rglob("*.py*"))
        if path.suffix in {".py", ".pyi"}
        for line, word in misbegun(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Of a module."""', [(1, "Of")]),
        ('class A:\n    """Those."""', [(2, "Those")]),
        ('async def f():\n    """\n    That is\n    """', [(2, "That")]),
        ('class A:\n    x: int\n    """So many."""', [(3, "So")]),
        ('def f(self):\n    self.x = 1\n    """By id."""', [(3, "By")]),
        ('X = 1\n"""Whose it is."""', [(2, "Whose")]),
        ('X = 1\n"""Tokens of it."""\nY = "Of"\nZ = 2\n"""Often."""', []),
    ],
)
def test_such_docstrings_are_found(source: str, found: list[tuple[int, str]]) -> None:
    assert misbegun(source) == found
