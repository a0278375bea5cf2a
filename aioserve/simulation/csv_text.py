"""Writes rows as CSV that a spreadsheet takes for what they are.

A spreadsheet takes a cell that begins with one of `=+-@` for a formula. Names come from the maker
of the trace, so such names get an apostrophe in front, which spreadsheets don't show.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

__all__ = ["to_csv"]

NUMBER = re.compile(r"[+-]?[0-9][0-9.,]*%?")


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Write rows as RFC 4180 has it, but with line ends of one character. None is an empty cell."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([_cell(v) for v in row] for row in rows)
    return written.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    is_formula = value[:1] in ("=", "+", "-", "@", "\t", "\r") and not NUMBER.fullmatch(value)
    return f"'{value}" if is_formula and value != "-" else value
