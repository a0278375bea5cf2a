"""Docstrings and comments keep the rules of prose that a parser can hold: see `prose.py`."""

from __future__ import annotations

import pytest

from tests.docs.prose import MOST_WORDS, check
from tests.house import PACKAGE, PLUGINS, ROOT

FOLDERS = (
    *(PACKAGE, PLUGINS),
    *(ROOT / name for name in ("aioserve_main", "tests", "benchmarks", "examples", "tools")),
)


def test_docstrings_begin_with_a_noun_or_a_verb_and_sentences_are_short() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{breach.line}: {breach.says}"
        for folder in FOLDERS
        for path in sorted(folder.rglob("*.py*"))
        if path.suffix in {".py", ".pyi"}
        for breach in check(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


LONG = " ".join(["Word"] * (MOST_WORDS + 1))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Of a module."""', [(1, "Of")]),
        ('class A:\n    """Whether it is."""', [(2, "Whether")]),
        ('async def f():\n    """\n    What is\n    """', [(2, "What")]),
        ('class A:\n    x: int\n    """How many."""', [(3, "How")]),
        ('def f(self):\n    self.x = 1\n    """By id."""', [(3, "By")]),
        ('X = 1\n"""Tokens of it."""\nY = "Of"\nZ = 2\n"""Often."""', []),
        (f'"""Tokens. {LONG}."""', [(1, "26 words")]),
        (f"x = 1\n# One.\n# {LONG}", [(2, "26 words")]),
        (f"x = 1  # noqa: {LONG}", []),
        (f'"""Code:\n\n        {LONG}\n\n    It ran.\n"""', []),
        ('"""Half here. `code` begins the other."""\n# e.g. this', []),
        (f'"""Lists:\n\n- {LONG[:60]}\n- {LONG[:60]}\n"""', []),
    ],
)
def test_such_prose_is_found(source: str, found: list[tuple[int, str]]) -> None:
    breaches = check(source)
    assert [breach.line for breach in breaches] == [line for line, _ in found]
    for breach, (_, said) in zip(breaches, found, strict=True):
        assert said in breach.says
