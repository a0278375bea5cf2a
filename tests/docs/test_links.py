"""Links between the pages lead somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)]+)\)")


def test_relative_links_lead_to_files() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert lost == []


BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|cpp|cu|h|inl|toml))`")
PLACES = ("", "aioserve", "plugins/aioserve_plugins")
"""Folders that names of files begin in."""


def test_files_that_pages_name_are_there() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {file}"
        for page in PAGES
        for file in FILE.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
        if not any((ROOT / place / file).exists() for place in PLACES)
    ]
    assert lost == []


@cache
def slugs(page: Path) -> set[str]:
    """Return the anchors of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings}


def test_links_into_a_page_lead_to_its_headings() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in ANCHOR.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and anchor not in slugs(page.parent / target if target else page)
    ]
    assert lost == []


def test_every_page_is_reachable_from_the_index() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "docs" / "index.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if target.endswith(".md") and "://" not in target:
                todo.append((page.parent / target).resolve())
    assert seen >= {page.resolve() for page in (ROOT / "docs").rglob("*.md")}
