"""The glossary explains each word once, briefly, and no word that nobody uses."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "glossary.md"
ENTRY = re.compile(r"^- \*\*(.+?)\*\*: (.+?)(?=^- \*\*|^$)", flags=re.MULTILINE | re.DOTALL)
ENTRIES = ENTRY.findall(PAGE.read_text(encoding="utf-8"))


@cache
def written_elsewhere() -> str:
    """All other pages and all strings of the package, in small letters, names as words."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages if page != PAGE]
    for path in (ROOT / "aioserve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return " ".join(" ".join(texts).lower().replace("*", "").replace("_", " ").split())


def test_every_line_of_the_glossary_is_read_as_an_entry() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(ENTRIES) == sum(line.startswith("- ") for line in lines) > 50


def test_a_word_has_one_entry() -> None:
    terms = [term.lower() for term, _ in ENTRIES]
    assert sorted(set(terms)) == sorted(terms)


def test_an_entry_is_brief_and_of_a_word_that_is_used() -> None:
    wrong = [
        term
        for term, meaning in ENTRIES
        if not meaning.strip().endswith((".", ".)"))
        or len(re.findall(r"[.)](?:\s|$)", meaning)) > 4
        or not re.search(rf"\b{re.escape(term.lower())}s?\b", written_elsewhere())
    ]
    assert wrong == []
