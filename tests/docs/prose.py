"""Rules on English prose that a parser can hold: first words of docstrings, lengths of sentences.

`python -m tests.docs.prose aioserve/kv` lists each docstring and comment that breaks a rule.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_WORDS = 25
"""Longest sentence of a docstring or comment, in words. A code span counts as one."""

NO_BEGINNING = frozenset(
    {
        *("After", "Also", "As", "At", "Because", "Before", "Behind", "Beside", "Beyond", "By"),
        *("During", "For", "From", "How", "If", "In", "Into", "Is", "Like", "Nobody", "None"),
        *("Nothing", "Of", "Off", "On", "Once", "Out", "Over", "Since", "So", "Than", "That"),
        *("These", "They", "This", "Those", "Though", "Through", "To", "Under", "Unless", "Until"),
        *("Up", "What", "Whatever", "When", "Where", "Whether", "Which", "While", "Who", "Whoever"),
        *("Whom", "Whose", "Why", "With", "Within", "Without"),
    }
)
"""Words that no docstring begins with: it begins with a noun or a verb, articles aside."""

SPAN = re.compile(r"``[^`]+``|`[^`]+`|\[\d[^]]*\]")
ENDS = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[`]*[A-Z0-9`_]|\")")
LISTED = re.compile(r"^\s*(?:[-*]|\d+[.)])\s+")
ABBREVIATED = re.compile(r"\b(e\.g|i\.e|vs|cf|et al|Sec|Fig|Eq|No|pp)\.\s")


class Prose(NamedTuple):
    """Docstring or block of comments."""

    line: int
    text: str
    is_docstring: bool


class Breach(NamedTuple):
    line: int
    says: str


def docstrings(source: str) -> Iterator[Prose]:
    """Docstrings of modules, classes and functions, and those behind attributes and constants."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield Prose(statement.lineno, text, True)


def comments(source: str) -> Iterator[Prose]:
    """Blocks of comment lines that stand one below the other, markers of tools left out."""
    block: list[str] = []
    begun = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#").removeprefix(":").strip()
        if re.match(r"type: |noqa|pyright: |ruff: |fmt: |!", text):
            continue
        alone = not token.line[: token.start[1]].strip()
        if block and alone and token.start[0] == last + 1:
            block.append(text)
        else:
            if block:
                yield Prose(begun, "\n".join(block), False)
            block, begun = [text], token.start[0]
        last = token.start[0]
    if block:
        yield Prose(begun, "\n".join(block), False)


def sentences(text: str) -> Iterator[str]:
    """Sentences of paragraphs and list items. Indented blocks, tables and doctests are no prose."""
    paragraph: list[str] = []
    margins = [len(line) - len(line.lstrip()) for line in text.splitlines()[1:] if line.strip()]
    margin = min(margins, default=0)
    fenced = False
    for line in [*text.splitlines(), ""]:
        if line.strip().startswith("```"):
            fenced = not fenced
            line = ""
        indent = len(line) - len(line.lstrip())
        listed = LISTED.match(line)
        drawn = fenced or line.lstrip().startswith(("|", ">>>", "...")) or "  " in line.strip()
        if not line.strip() or listed or drawn or (not paragraph and indent >= margin + 4):
            if paragraph:
                yield from ENDS.split(ABBREVIATED.sub(r"\1 ", " ".join(paragraph)))
            paragraph = []
        if line.strip() and not drawn and (paragraph or indent < margin + 4 or listed):
            paragraph.append(LISTED.sub("", line).strip())


def breaches(prose: Prose) -> Iterator[Breach]:
    """Rules that `prose` breaks."""
    first = re.match(r"\W*(\w*)", prose.text)
    if prose.is_docstring and first is not None and first[1] in NO_BEGINNING:
        yield Breach(prose.line, f"a docstring begins with {first[1]!r}")
    for sentence in sentences(SPAN.sub("Code", prose.text)):
        words = len(sentence.split())
        if words > MOST_WORDS:
            yield Breach(prose.line, f"{words} words: {sentence}")


def check(source: str) -> list[Breach]:
    """Breaches of all docstrings and comments of a module, by line."""
    prose = [*docstrings(source), *comments(source)]
    return sorted(breach for each in prose for breach in breaches(each))


def main(paths: list[str]) -> int:
    count = 0
    for given in map(Path, paths):
        for path in sorted(given.rglob("*.py*")) if given.is_dir() else [given]:
            if path.suffix in {".py", ".pyi"}:
                for breach in check(path.read_text(encoding="utf-8")):
                    print(f"{path}:{breach.line}: {breach.says}")
                    count += 1
    print(f"{count} breaches")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
