"""Pages of the documentation as their readers take them: blocks, commands, installs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "Command", "blocks", "commands", "installs", "relative"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
SHELLS = ("bash", "console", "sh")
INSTALL = re.compile(r"\bpip install ([^`\n]+)")
WITH_A_VALUE = ("--extra-index-url", "--index-url")
"""Options of `pip install` with the next word as their value."""
NAMED = re.compile(r"(?:^ {4}|(?<!`)`)(python [\w/]+\.py)")
VARIABLE = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    tag: str
    text: str


@dataclass(frozen=True)
class Command:
    """A line for a shell; `is_run` where it stands behind `$ ` in a block that runs."""

    page: Path
    line: int
    words: tuple[str, ...]
    is_run: bool


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; `line` is where the fence opens."""
    found, opening, body = [], None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if opening is None:
                opening, body = (number, line[3:].strip()), []
            else:
                language, _, tag = opening[1].partition(" ")
                found.append(Block(page, opening[0], language, tag.strip(), "\n".join(body)))
                opening = None
        else:
            body.append(line)
    if opening is not None:
        raise ValueError(f"{page}:{opening[0]}: this fence is never closed")
    return found


def commands(page: Path) -> Iterator[Command]:
    """Lines of the blocks for a shell, without the variables that they set and their comments; and
    programs for python that sentences name."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        for said in NAMED.findall(line):
            yield Command(page, number, tuple(said.split()), is_run=False)
    for block in blocks(page):
        if block.language not in SHELLS:
            continue
        prompt = "$ " if block.language == "console" else ""
        lines = enumerate(block.text.splitlines(), start=block.line + 1)
        for number, line in lines:
            if not line.startswith(prompt):
                continue
            while line.endswith("\\"):
                line = line[:-1] + next(lines)[1]
            words = shlex.split(line.removeprefix(prompt), comments=True)
            while words and VARIABLE.match(words[0]):
                words.pop(0)
            if words:
                is_run = block.language == "console" and not block.tag
                yield Command(page, number, tuple(words), is_run)


def installs(page: Path, line: int) -> list[str]:
    """Requirements, and directories of projects, that a page has installed above a line: in blocks
    and in sentences. A leading `.` is this repository."""
    above = page.read_text(encoding="utf-8").splitlines()[: line - 1]
    found: list[str] = []
    for said in INSTALL.findall("\n".join(above)):
        words = shlex.split(said, comments=True)
        while words:
            word = words.pop(0)
            if word in WITH_A_VALUE:
                words.pop(0)
            elif not word.startswith("-"):
                found.append(word)
    return found
