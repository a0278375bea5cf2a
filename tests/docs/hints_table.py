"""Table of ignored values in docs/reference/ignored-fields.md, made of the tables of hints.

    python -m tests.docs.hints_table

writes it anew, between its two marks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from aioserve.server.hint_tables import TABLES, Hint

__all__ = ["PAGE", "parts_of", "table"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "ignored-fields.md"
BEGIN, END = "<!-- hints: begin -->\n", "<!-- hints: end -->\n"
TYPES = {
    bool: "true, false",
    int: "any integer",
    float: "any number",
    str: "any text",
    dict: "any object",
    list: "any list",
}


def table() -> str:
    """Rows of fields that have the same values, with the APIs in which they have them."""
    rows: dict[tuple[Hint, tuple[str, ...]], list[str]] = {}
    places: dict[tuple[str, Hint], list[str]] = {}
    for about, hints in TABLES.items():
        for name, hint in hints.items():
            places.setdefault((name, _keyed(hint)), []).append(about)
    for (name, hint), of in places.items():
        rows.setdefault((hint, tuple(of)), []).append(name)
    lines = ["| fields | values | more values without reasoning | API |\n"]
    lines.append("| --- | --- | --- | --- |\n")
    for (hint, of), names in rows.items():
        fields = ", ".join([f"`{name}`" for name in names])
        always, more = (_shown(values) for values in (hint.always, hint.without_reasoning))
        lines.append(f"| {fields} | {always} | {more} | {'; '.join(of)} |\n")
    return "".join(lines)


def _keyed(hint: Hint) -> Hint:
    """Return the hint as a key: with the text of values."""
    return Hint(tuple(map(_value, hint.always)), tuple(map(_value, hint.without_reasoning)))


def _value(value: Any) -> str:
    if isinstance(value, type):
        return TYPES[value]
    return f"`{msgspec.json.encode(value).decode()}`"


def _shown(values: tuple[str, ...]) -> str:
    return ", ".join(values)


def parts_of(text: str) -> tuple[str, str, str]:
    """Return the text before the table, the table, and the text behind it."""
    before, _, rest = text.partition(BEGIN)
    inside, _, behind = rest.partition(END)
    return before + BEGIN, inside, END + behind


if __name__ == "__main__":
    before, _, behind = parts_of(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + table() + behind, encoding="utf-8")
