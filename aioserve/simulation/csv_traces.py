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

__all__ = ["AZURE_HEADERS", "SERVEGEN_HEADER", "read_azure", "read_servegen"]

AZURE_HEADERS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("arrival_s", "context_tokens", "generated_tokens"),
)
SERVEGEN_HEADER = ("arrival_s", "client", "input_tokens", "output_tokens")


def read_azure(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in Azure's format, as they are in it (by time). Raises `TraceError`."""
    requests: list[TraceRequest] = []
    began: datetime | None = None
    for row in _rows(Path(path), AZURE_HEADERS):
        if row.header[0] == "TIMESTAMP":
            at = row.time("TIMESTAMP")
            began = at if began is None else began
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
    """Requests of a file in ServeGen's format, as they are in it (by time). Raises `TraceError`."""
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
        text = self.values[name]
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise TraceError(f"{self.place}: {name} must be {least} or more, got {text!r}")
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
    reader = csv.reader(line for _, line in lines_of(path))
    try:
        columns = next(filter(None, reader), [])
        for header in headers:
            if tuple(columns[: len(header)]) == header:
                break
        else:
            known = " or ".join(",".join(header) for header in headers)
            raise TraceError(f"{path}:1: the columns must begin with {known}, got {columns}")
        for values in filter(None, reader):
            place = f"{path}:{reader.line_num}"
            if len(values) != len(columns):
                raise TraceError(
                    f"{place}: {len(values)} values in a file of {len(columns)} columns"
                )
            yield _Row(place, header, dict(zip(columns, values, strict=True)))
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num}: {error}") from error
