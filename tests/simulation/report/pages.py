"""Contents of a page, for tests that check it."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import re
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

__all__ = ["Reader", "attributes", "downloads", "drawings", "read", "shown_texts"]

VOID = frozenset({"meta", "br", "link", "img", "input", "hr", "col"})
Attributes = dict[str, str | None]


class Reader(HTMLParser):
    """Collects text and elements, and holds that each one is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []
        self.elements: list[tuple[str, Attributes]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def drawings(text: str) -> list[ElementTree.Element]:
    """Every picture that means something, those of legends left out."""
    found: list[ElementTree.Element] = []
    depth = begin = 0
    for tag in re.finditer(r"<svg\b[^>]*>|</svg>", text[: text.index("<script>")]):
        if tag[0] == "</svg>":
            depth -= 1
            if not depth:
                found.append(ElementTree.fromstring(text[begin : tag.end()]))
        else:
            begin = begin if depth else tag.start()
            depth += 1
    return [drawing for drawing in found if drawing.get("aria-hidden") is None]


def shown_texts(drawing: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in drawing.iter() if element.tag == "text"]


def attributes(text: str, name: str) -> list[str]:
    """Every value of one attribute."""
    return [
        value or ""
        for _, found in read(text).elements
        for key, value in found.items()
        if key == name
    ]


def downloads(text: str) -> dict[str, list[list[str]]]:
    """Return the rows of the files that the page holds, by name. The first row is the head."""
    files: dict[str, list[list[str]]] = {}
    for tag, found in read(text).elements:
        if tag != "a" or "download" not in found:
            continue
        name, link = found["download"] or "", found["href"] or ""
        kind, _, data = link.partition(",")
        if kind == "data:application/gzip;base64":
            content = gzip.decompress(base64.b64decode(data)).decode()
        else:
            assert kind == "data:text/csv;charset=utf-8"
            content = unquote(data)
        assert name not in files
        files[name] = list(csv.reader(io.StringIO(content)))
    return files
