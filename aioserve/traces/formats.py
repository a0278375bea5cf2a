"""Trace files: the formats in which others record requests, plain or `.gz`.

One JSON value a line:

- Mooncake (Qin et al., FAST 2025): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`,
  one id per 512 tokens, the last block perhaps partial. Ids are global.
- Agentic sessions (kv-cache-tester): one session of a coding agent, `id`, `block_size`, `requests`;
  a request has `t` in seconds since its agent began, `in`, `out` and `hash_ids`, one per whole
  block. Ids are local to the session. An entry may be a sub-agent with `requests` of its own.

A header line and one request a line, which share no blocks:

- Azure (Patel et al., "Splitwise", ISCA 2024): `TIMESTAMP,ContextTokens,GeneratedTokens`, the
  first a date and time; or `arrival_s,context_tokens,generated_tokens`, the first in seconds.
- ServeGen, as drawn from its distributions: `arrival_s,client,input_tokens,output_tokens`.

Further columns, and fields of Mooncake's, are passed over, but for `max_tokens`: the most that the
caller asked for, or nothing.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from aioserve.errors import TraceError
from aioserve.traces.request import TraceRequest, check_blocks

__all__ = [
    "MOONCAKE_BLOCK_TOKENS",
    "read_agentic",
    "read_azure",
    "read_mooncake",
    "read_servegen",
    "read_trace",
]

FORMATS = "Mooncake JSONL, agentic sessions JSONL, Azure CSV, ServeGen CSV"
MOONCAKE_BLOCK_TOKENS = 512
AZURE_HEADERS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("arrival_s", "context_tokens", "generated_tokens"),
)
SERVEGEN_HEADER = ("arrival_s", "client", "input_tokens", "output_tokens")

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Row = TypeVar("Row")


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Requests of a file, whose first line tells its format: by arrival, which counts from the
    first of them. Raises `TraceError`."""
    place, first = _first_line(Path(path))
    if _begins_with(AZURE_HEADERS, first):
        requests = read_azure(path)
    elif _begins_with((SERVEGEN_HEADER,), first):
        requests = read_servegen(path)
    elif first.startswith("{") and '"timestamp"' in first:
        requests = read_mooncake(path)
    elif first.startswith("{") and '"requests"' in first:
        requests = read_agentic(path)
    else:
        raise TraceError(
            f"{place}: not the beginning of a known format ({FORMATS}): {first[:60]!r}"
        )
    if not requests:
        raise TraceError(f"{path}: no request in it")
    requests.sort(key=attrgetter("arrival_seconds"))
    began = requests[0].arrival_seconds
    return [
        replace(request, number=number, arrival_seconds=request.arrival_seconds - began)
        for number, request in enumerate(requests)
    ]


def read_mooncake(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in Mooncake's format, as they are in it. Raises `TraceError`."""
    requests: list[TraceRequest] = []
    for place, row in _json_rows(Path(path), _MooncakeRow):
        request = TraceRequest(
            len(requests),
            row.timestamp / 1000,
            row.input_length,
            row.output_length,
            row.hash_ids,
            MOONCAKE_BLOCK_TOKENS,
            max_tokens=row.max_tokens,
        )
        check_blocks(place, request)
        requests.append(request)
    return requests


def read_agentic(path: str | Path) -> list[TraceRequest]:
    """Requests of a file of agentic sessions: session by session, in each by time, those of
    sub-agents among them. Raises `TraceError`."""
    requests: list[TraceRequest] = []
    for place, session in _json_rows(Path(path), _AgenticSession):
        flat = sorted(_flattened(session.requests, 0.0), key=attrgetter("t"))
        for entry in flat:
            request = TraceRequest(
                len(requests),
                entry.t,
                entry.input_tokens,
                entry.output_tokens,
                entry.hash_ids,
                session.block_size,
                session.id,
            )
            check_blocks(place, request)
            requests.append(request)
    return requests


def read_azure(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in Azure's format, as they are in it. Dates and times count from the
    first. Raises `TraceError`."""
    requests: list[TraceRequest] = []
    began: datetime | None = None
    for row in _csv_rows(Path(path), AZURE_HEADERS):
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
        limit = row.limit()
        request = TraceRequest(len(requests), arrival, prompt, output, (), prompt, max_tokens=limit)
        requests.append(request)
    return requests


def read_servegen(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in ServeGen's format, as they are in it. Raises `TraceError`."""
    requests: list[TraceRequest] = []
    for row in _csv_rows(Path(path), (SERVEGEN_HEADER,)):
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
                max_tokens=row.limit(),
            )
        )
    return requests


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: Seconds
    input_length: Positive
    output_length: Count
    hash_ids: tuple[Count, ...]
    max_tokens: Positive | None = None


class _AgenticRequest(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag="n",
    rename={"input_tokens": "in", "output_tokens": "out"},
):
    t: Seconds
    input_tokens: Positive
    output_tokens: Count
    hash_ids: tuple[Count, ...]


class _StreamedAgenticRequest(_AgenticRequest, frozen=True, tag="s"):
    """One whose answer was streamed; otherwise the same."""


class _SubAgent(msgspec.Struct, frozen=True, tag_field="type", tag="subagent"):
    t: Seconds
    requests: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...]


class _AgenticSession(msgspec.Struct, frozen=True):
    id: str
    block_size: Positive
    hash_id_scope: Literal["local"]
    requests: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...]


def _flattened(
    entries: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...], began: float
) -> Iterator[_AgenticRequest]:
    """The requests of an agent that began at `began`, and of its sub-agents, in session time."""
    for entry in entries:
        if isinstance(entry, _SubAgent):
            yield from _flattened(entry.requests, began + entry.t)
        else:
            yield replace(entry, t=began + entry.t)


class _CsvRow:
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

    def limit(self) -> int | None:
        return self.count("max_tokens", 1) if self.values.get("max_tokens") else None

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


def _csv_rows(path: Path, headers: tuple[tuple[str, ...], ...]) -> Iterator[_CsvRow]:
    """The lines of a file that begins with one of `headers`."""
    reader = csv.reader((line for _, line in _lines_of(path)), skipinitialspace=True)
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
            yield _CsvRow(
                place, header, dict(zip(_stripped(columns), _stripped(values), strict=True))
            )
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


def _begins_with(headers: tuple[tuple[str, ...], ...], line: str) -> bool:
    """Whether a line has the columns of one of `headers`, and perhaps further ones."""
    try:
        columns = next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error:
        return False
    return _header_of(columns, headers) is not None


def _lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """`file:line` and the text of every line, with its end but without a byte order mark. Raises
    `TraceError` for a file that can't be read."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}:{number}", line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}:{number}: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: not a whole gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def _json_rows(path: Path, row: type[Row]) -> Iterator[tuple[str, Row]]:
    """`file:line` and the value of every line that isn't blank."""
    decoder = msgspec.json.Decoder(row)
    for place, line in _lines_of(path):
        if not line.strip():
            continue
        try:
            value = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{place}: {error}") from error
        yield place, value


def _first_line(path: Path) -> tuple[str, str]:
    """`file:line` and the text of the first line that isn't blank, without blanks around it."""
    lines = ((place, line.strip()) for place, line in _lines_of(path))
    return next(((place, line) for place, line in lines if line), (f"{path}:1", ""))
