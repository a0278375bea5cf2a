"""Request traces with a header line and one request a line, plain or `.gz`. They share no blocks.

- Azure (Patel et al., "Splitwise", ISCA 2024): `TIMESTAMP,ContextTokens,GeneratedTokens`, the
  first a date and time; or `arrival_s,context_tokens,generated_tokens`, the first in seconds.
- ServeGen, as drawn from its distributions: `arrival_s,client,input_tokens,output_tokens`, and
  perhaps further columns, which are passed over.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from aioserve.errors import TraceError
from aioserve.simulation.traces import TraceRequest, lines_of

__all__ = ["AZURE_HEADERS", "SERVEGEN_HEADER", "begins_with", "read_azure", "read_servegen"]

AZURE_HEADERS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("arrival_s", "context_tokens", "generated_tokens"),
)
SERVEGEN_HEADER = ("arrival_s", "client", "input_tokens", "output_tokens")


def begins_with(headers: tuple[tuple[str, ...], ...], line: str) -> bool:
    """Whether a line has the columns of one of `headers`, and perhaps further ones."""
    try:
        columns = next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error:
        return False
    return _header_of(columns, headers) is not None


def read_azure(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in Azure's format, as they are in it. Dates and times count from the
    first. Raises `TraceError`."""
    requests: list[TraceRequest] = []
    began: datetime | None = None
    for row in _rows(Path(path), AZURE_HEADERS):
        if row.header[0] == "TIMESTAMP":
            at = row.time("TIMESTAMP")
            began = at if began is None else began
            if (at.tzinfo is None) != (began.tzinfo is None):
                raise TraceError(
                    f"{row.place}: TIMESTAMP {at} and the first, {began}, can't be compared: one "
                    "has a time zone, and the other has none"
                )
            arrival = (at - began).total_seconds()
            if arrival < 0:
                raise TraceError(f"{row.place}: TIMESTAMP {at} is before the first, {began}")
        else:
            arrival = row.seconds("arrival_s")
        prompt = row.count(row.header[1], 1)
        output = row.count(row.header[2], 0)
        requests.append(TraceRequest(len(requests), arrival, prompt, output, (), prompt))
    return requests


def read_servegen(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in ServeGen's format, as they are in it. Raises `TraceError`."""
    requests: list[TraceRequest] = []
    for row in _rows(Path(path), (SERVEGEN_HEADER,)):
        prompt = row.count("input_tokens", 1)
        requests.append(
            TraceRequest(
                len(requests),
                row.seconds("arrival_s"),
                prompt,
                row.count("output_tokens", 0),
                (),
                prompt,
                client=row.values["client"],
            )
        )
    return requests


class _Row:
    """One line: its values by column, and where it is."""

    def __init__(self, place: str, header: tuple[str, ...], values: dict[str, str]) -> None:
        self.place = place
        self.header = header
        self.values = values

    def count(self, name: str, least: int) -> int:
        """A whole number; pandas writes it as `10.0` in a column where one was missing."""
        text = self.values[name]
        value = _whole(text)
        if value is None or value < least:
            raise TraceError(
                f"{self.place}: {name} must be a whole number of at least {least}, got {text!r}"
            )
        return value

    def seconds(self, name: str) -> float:
        text = self.values[name]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise TraceError(f"{self.place}: {name} must be seconds from 0 on, got {text!r}")
        return value

    def time(self, name: str) -> datetime:
        text = self.values[name]
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            raise TraceError(
                f"{self.place}: {name} must be a date and time, got {text!r}"
            ) from None


def _rows(path: Path, headers: tuple[tuple[str, ...], ...]) -> Iterator[_Row]:
    """The lines of a file that begins with one of `headers`."""
    reader = csv.reader((line for _, line in lines_of(path)), skipinitialspace=True)
    try:
        rows = (values for values in reader if not _is_blank(values))
        columns = next(rows, [])
        header = _header_of(columns, headers)
        if header is None:
            known = " or ".join(",".join(header) for header in headers)
            raise TraceError(
                f"{path}:{reader.line_num or 1}: the columns must begin with {known}, got {columns}"
            )
        for values in rows:
            place = f"{path}:{reader.line_num}"
            if len(values) != len(columns):
                raise TraceError(
                    f"{place}: {len(values)} values in a file of {len(columns)} columns"
                )
            yield _Row(place, header, dict(zip(_stripped(columns), _stripped(values), strict=True)))
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num}: {error}") from error


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
