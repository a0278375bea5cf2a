"""Lines of text files that others wrote, plain or `.gz`, within bounds.

Bounds are checked before anything of that size is held in memory, and only whole files are
accepted. For CSV files with a header, values are read by column, each as its type.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import os
import stat
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from aioserve.errors import TraceError
from aioserve.isolation import shown
from aioserve.traces.trace_request import (
    MAX_ARRIVAL_SECONDS,
    MAX_ASKED_TOKENS,
    MAX_REQUEST_TOKENS,
    MAX_TARGET_SECONDS,
)

__all__ = [
    "MAX_FILE_BYTES",
    "MAX_LINES",
    "MAX_LINE_BYTES",
    "CsvRow",
    "Lines",
    "begins_with",
    "columns_missing",
    "csv_rows",
    "open_file",
    "short",
]

MAX_FILE_BYTES = 1 << 30
"""Most bytes of a file, unpacked."""
MAX_LINE_BYTES = 64 << 20
MAX_LINES = 1 << 22
MAX_SHOWN_CHARS = 500


def short(text: object) -> str:
    """Return the text of an error or a path; of a long one the beginning."""
    whole = str(text)
    return whole if len(whole) <= MAX_SHOWN_CHARS else f"{whole[:MAX_SHOWN_CHARS]}..."


def open_file(path: Any) -> BinaryIO:
    """Open a regular file for reading. Raises `TraceError` for anything else.

    Data of a pipe or a device may never come, or never end.
    """
    if isinstance(path, str):
        path = Path(str.__str__(path))
    elif not isinstance(path, Path):
        raise TraceError(f"a trace must be a path, got {shown(path)}")
    try:
        # A pipe without a writer is opened at once, and refused.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise TraceError(f"{short(path)}: {error.strerror}") from error
    except ValueError as error:  # a character that no path has
        raise TraceError(f"{shown(str(path))}: {error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise TraceError(f"{short(path)}: not a regular file; a trace must be one")
    return file


class Lines:
    """The texts of the lines of a file, with their ends but without a byte order mark.

    The file is opened once. The next line raises `TraceError` for a file that can't be read. So
    does a line of over `MAX_LINE_BYTES`, one beyond `MAX_LINES`, or one beyond `MAX_FILE_BYTES`.
    """

    def __init__(self, path: Any) -> None:
        self.place: str = f"{short(path)}:1"
        """Place of the line that was returned last, as `file:line`."""
        self._lines: Iterator[tuple[str, str]] = _lines_of(path)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.place, line = next(self._lines)
        return line

    def first(self) -> str:
        """Return the first line that isn't blank, stripped. Iteration returns it once more."""
        for line in self:
            if line.strip():
                self._lines = itertools.chain([(self.place, line)], self._lines)
                return line.strip()
        return ""


def _lines_of(path: Any) -> Iterator[tuple[str, str]]:
    """Yield `file:line` and the text of every line."""
    number = total = 0
    name = short(path)
    try:
        with open_file(path) as file, _unpacked(file, path) as lines:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                total += len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"{name}:{number}: a line of over {MAX_LINE_BYTES:,} bytes")
                if number > MAX_LINES:
                    raise TraceError(f"{name}: a file of over {MAX_LINES:,} lines")
                if total > MAX_FILE_BYTES:
                    raise TraceError(f"{name}:{number}: a file of over {MAX_FILE_BYTES:,} bytes")
                yield f"{name}:{number}", line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}:{number}: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{name}: not a whole gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"{name}: {error.strerror}") from error


def _unpacked(file: BinaryIO, path: Any) -> BinaryIO | gzip.GzipFile:
    return gzip.GzipFile(fileobj=file) if str(path).endswith(".gz") else file


MAX_CSV_LINE_CHARS = 1 << 20


class CsvRow:
    """One line: its values by column, and its place."""

    def __init__(self, place: str, header: tuple[str, ...], values: dict[str, str]) -> None:
        self.place = place
        self.header = header
        self.values = values

    def count(self, name: str, least: int, most: int = MAX_REQUEST_TOKENS) -> int:
        """Return a whole number. pandas writes it as `10.0` in a column with missing values."""
        text = self.values[name]
        value = _whole(text)
        if value is None or not least <= value <= most:
            limit = f"at most {most}" if value is not None and value > most else f"at least {least}"
            raise TraceError(
                f"{self.place}: {name} must be a whole number of {limit}, got {shown(text)}"
            )
        return value

    def optional(self, name: str) -> int | None:
        """Return the count in a column that may be missing, or empty."""
        return self.count(name, 1, MAX_ASKED_TOKENS) if self.values.get(name) else None

    def name(self, *columns: str) -> str:
        """Return the text in one of these columns, which mean the same; empty without any.

        Raises `TraceError` if there are several.
        """
        there = [column for column in columns if column in self.values]
        if len(there) > 1:
            raise TraceError(f"{self.place}: the columns {' and '.join(there)} mean the same")
        return self.values[there[0]] if there else ""

    def seconds(self, name: str) -> float:
        value = self._number(name)
        if not 0 <= value <= MAX_ARRIVAL_SECONDS:
            limit = f"at most {MAX_ARRIVAL_SECONDS:g}" if value > 0 else "from 0 on"
            raise self._no_seconds(name, limit)
        return value

    def target(self, name: str) -> float | None:
        """Return the seconds in a column that may be missing, or empty."""
        if not self.values.get(name):
            return None
        value = self._number(name)
        if not 0 < value <= MAX_TARGET_SECONDS:
            limit = f"at most {MAX_TARGET_SECONDS:g}" if value > 0 else "of more than 0"
            raise self._no_seconds(name, limit)
        return value

    def share(self, name: str) -> float | None:
        """Return the number in [0, 1] in a column that may be missing, or empty."""
        if not self.values.get(name):
            return None
        value = self._number(name)
        if not 0 <= value <= 1:
            text = shown(self.values[name])
            raise TraceError(f"{self.place}: {name} must be in [0, 1], got {text}")
        return value

    def _number(self, name: str) -> float:
        try:
            return float(self.values[name])
        except ValueError:
            return math.nan

    def _no_seconds(self, name: str, limit: str) -> TraceError:
        text = shown(self.values[name])
        return TraceError(f"{self.place}: {name} must be seconds {limit}, got {text}")

    def time(self, name: str) -> datetime:
        text = self.values[name]
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            raise TraceError(
                f"{self.place}: {name} must be a date and time, got {shown(text)}"
            ) from None


def csv_rows(lines: Lines, headers: tuple[tuple[str, ...], ...]) -> Iterator[CsvRow]:
    """Yield the rows of a file that begins with one of `headers`."""
    reader = csv.reader(_short_ones(lines), skipinitialspace=True)
    try:
        rows = (values for values in reader if not _is_blank(values))
        columns = next(rows, [])
        header = _header_of(columns, headers)
        if header is None:
            known = " or ".join(",".join(header) for header in headers)
            raise TraceError(
                f"{lines.place}: the columns must begin with {known}, got {shown(columns)}"
            )
        _check_names(lines.place, _stripped(columns))
        for values in rows:
            if len(values) != len(columns):
                raise TraceError(
                    f"{lines.place}: {len(values)} values in a file of {len(columns)} columns"
                )
            yield CsvRow(
                lines.place, header, dict(zip(_stripped(columns), _stripped(values), strict=True))
            )
    except csv.Error as error:
        raise TraceError(f"{lines.place}: {error}") from error


def _check_names(place: str, columns: list[str]) -> None:
    """Raise for a name of two columns: it is unknown which of them is meant."""
    for name in columns:
        if name and columns.count(name) > 1:
            raise TraceError(f"{place}: {columns.count(name)} columns are called {shown(name)}")


def _short_ones(lines: Lines) -> Iterator[str]:
    """Yield the lines; raises for one that is longer than any real one."""
    for line in lines:
        if len(line) > MAX_CSV_LINE_CHARS:
            raise TraceError(f"{lines.place}: a line of over {MAX_CSV_LINE_CHARS:,} characters")
        yield line


def _header_of(columns: list[str], headers: tuple[tuple[str, ...], ...]) -> tuple[str, ...] | None:
    names = tuple(_stripped(columns))
    return next((header for header in headers if names[: len(header)] == header), None)


def _stripped(values: list[str]) -> list[str]:
    return [value.strip() for value in values]


def _is_blank(values: list[str]) -> bool:
    return len(values) < 2 and not any(_stripped(values))


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() else None


def begins_with(headers: tuple[tuple[str, ...], ...], line: str) -> bool:
    """Return true if a line has the columns of one of `headers`, and perhaps further ones."""
    return _header_of(_columns_of(line), headers) is not None


def columns_missing(headers: tuple[tuple[str, ...], ...], line: str) -> str:
    """Return what the first line of a CSV lacks to begin with the most similar of `headers`.

    It may lack columns, or have them in another order. If it is like none, return all headers.
    Empty for a line without columns.
    """
    columns = _stripped(_columns_of(line))
    likeness = [len(set(header) & set(columns)) for header in headers]
    if not any(likeness):
        known = " or ".join(",".join(header) for header in headers)
        return f"a CSV has the columns {known}" if len(columns) > 1 else ""
    header = headers[likeness.index(max(likeness))]
    missing = [name for name in header if name not in columns]
    if missing:
        names = ", ".join(missing)
        return f"of {','.join(header)} it misses the column{'s'[: len(missing) - 1]} {names}"
    return f"its columns must begin with {','.join(header)}, in this order"


def _columns_of(line: str) -> list[str]:
    try:
        return next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error:
        return []
