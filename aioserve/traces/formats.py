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
import math
from collections.abc import Iterator
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from aioserve.errors import TraceError
from aioserve.isolation import shown
from aioserve.traces.files import Lines, short
from aioserve.traces.request import (
    MAX_ARRIVAL_SECONDS,
    MAX_ASKED_TOKENS,
    MAX_BLOCK_IDS,
    MAX_NAME_CHARS,
    MAX_REQUEST_TOKENS,
    TraceRequest,
    check_blocks,
    check_request,
)

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

MAX_CSV_LINE_CHARS = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=0)]
Output = Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUEST_TOKENS)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_REQUEST_TOKENS)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_ASKED_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_ARRIVAL_SECONDS)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1000 * MAX_ARRIVAL_SECONDS)]
Row = TypeVar("Row")


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Requests of a file, whose first line tells its format: by arrival, which counts from the
    first of them. Raises `TraceError`."""
    lines = Lines(path)
    first = lines.first()
    if _begins_with(AZURE_HEADERS, first):
        requests = _azure(lines)
    elif _begins_with((SERVEGEN_HEADER,), first):
        requests = _servegen(lines)
    elif first.startswith("{") and '"timestamp"' in first:
        requests = _mooncake(lines)
    elif first.startswith("{") and '"requests"' in first:
        requests = _agentic(lines)
    else:
        raise TraceError(
            f"{lines.place}: not the beginning of a known format ({FORMATS}): {first[:60]!r}"
        )
    if not requests:
        raise TraceError(f"{short(path)}: no request in it")
    requests.sort(key=attrgetter("arrival_seconds"))
    began = requests[0].arrival_seconds
    return [
        replace(request, number=number, arrival_seconds=request.arrival_seconds - began)
        for number, request in enumerate(requests)
    ]


def read_mooncake(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in Mooncake's format, as they are in it. Raises `TraceError`."""
    return _mooncake(Lines(path))


def read_agentic(path: str | Path) -> list[TraceRequest]:
    """Requests of a file of agentic sessions: session by session, in each by time, those of
    sub-agents among them. Raises `TraceError`."""
    return _agentic(Lines(path))


def read_azure(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in Azure's format, as they are in it. Dates and times count from the
    first. Raises `TraceError`."""
    return _azure(Lines(path))


def read_servegen(path: str | Path) -> list[TraceRequest]:
    """Requests of a file in ServeGen's format, as they are in it. Raises `TraceError`."""
    return _servegen(Lines(path))


class _Collected:
    """Requests of a file, in order, as many as a trace may have."""

    def __init__(self) -> None:
        self.requests: list[TraceRequest] = []
        self._num_ids = 0

    def add(self, place: str, request: TraceRequest) -> None:
        check_request(place, request)
        self._num_ids += len(request.block_ids)
        if self._num_ids > MAX_BLOCK_IDS:
            raise TraceError(f"{place}: a trace of over {MAX_BLOCK_IDS:,} hash_ids")
        self.requests.append(request)


def _mooncake(lines: Lines) -> list[TraceRequest]:
    found = _Collected()
    for row in _json_rows(lines, _MooncakeRow):
        request = TraceRequest(
            len(found.requests),
            row.timestamp / 1000,
            row.input_length,
            row.output_length,
            row.hash_ids,
            MOONCAKE_BLOCK_TOKENS,
            max_tokens=row.max_tokens,
        )
        check_blocks(lines.place, request)
        found.add(lines.place, request)
    return found.requests


def _agentic(lines: Lines) -> list[TraceRequest]:
    found = _Collected()
    for session in _json_rows(lines, _AgenticSession):
        for entry in sorted(_flattened(session.requests), key=attrgetter("t")):
            request = TraceRequest(
                len(found.requests),
                entry.t,
                entry.input_tokens,
                entry.output_tokens,
                entry.hash_ids,
                session.block_size,
                session.id,
            )
            check_blocks(lines.place, request)
            found.add(lines.place, request)
    return found.requests


def _azure(lines: Lines) -> list[TraceRequest]:
    found = _Collected()
    began: datetime | None = None
    for row in _csv_rows(lines, AZURE_HEADERS):
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
        number, prompt = len(found.requests), row.count(row.header[1], 1)
        output, limit = row.count(row.header[2], 0), row.limit()
        found.add(
            row.place,
            TraceRequest(number, arrival, prompt, output, (), prompt, max_tokens=limit),
        )
    return found.requests


def _servegen(lines: Lines) -> list[TraceRequest]:
    found = _Collected()
    for row in _csv_rows(lines, (SERVEGEN_HEADER,)):
        prompt = row.count("input_tokens", 1)
        request = TraceRequest(
            len(found.requests),
            row.seconds("arrival_s"),
            prompt,
            row.count("output_tokens", 0),
            (),
            prompt,
            client=row.values["client"],
            max_tokens=row.limit(),
        )
        found.add(row.place, request)
    return found.requests


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: Milliseconds
    input_length: Positive
    output_length: Output
    hash_ids: tuple[Count, ...]
    max_tokens: Limit | None = None


class _AgenticRequest(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag="n",
    rename={"input_tokens": "in", "output_tokens": "out"},
):
    t: Seconds
    input_tokens: Positive
    output_tokens: Output
    hash_ids: tuple[Count, ...]


class _StreamedAgenticRequest(_AgenticRequest, frozen=True, tag="s"):
    """One whose answer was streamed; otherwise the same."""


class _SubAgent(msgspec.Struct, frozen=True, tag_field="type", tag="subagent"):
    t: Seconds
    requests: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...]


class _AgenticSession(msgspec.Struct, frozen=True):
    id: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    block_size: Positive
    hash_id_scope: Literal["local"]
    requests: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...]


def _flattened(
    entries: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...],
) -> Iterator[_AgenticRequest]:
    """The requests of an agent, and of its sub-agents, in session time."""
    agents = [(0.0, iter(entries))]
    """When each began that is being looked at, and its entries that are left."""
    while agents:
        began, left = agents[-1]
        entry = next(left, None)
        if entry is None:
            agents.pop()
        elif isinstance(entry, _SubAgent):
            agents.append((began + entry.t, iter(entry.requests)))
        else:
            yield replace(entry, t=began + entry.t)


class _CsvRow:
    """One line: its values by column, and where it is."""

    def __init__(self, place: str, header: tuple[str, ...], values: dict[str, str]) -> None:
        self.place = place
        self.header = header
        self.values = values

    def count(self, name: str, least: int, most: int = MAX_REQUEST_TOKENS) -> int:
        """A whole number; pandas writes it as `10.0` in a column where one was missing."""
        text = self.values[name]
        value = _whole(text)
        if value is None or not least <= value <= most:
            limit = f"at most {most}" if value is not None and value > most else f"at least {least}"
            raise TraceError(
                f"{self.place}: {name} must be a whole number of {limit}, got {shown(text)}"
            )
        return value

    def limit(self) -> int | None:
        if not self.values.get("max_tokens"):
            return None
        return self.count("max_tokens", 1, MAX_ASKED_TOKENS)

    def seconds(self, name: str) -> float:
        text = self.values[name]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= MAX_ARRIVAL_SECONDS:
            limit = f"at most {MAX_ARRIVAL_SECONDS:g}" if value > 0 else "from 0 on"
            raise TraceError(f"{self.place}: {name} must be seconds {limit}, got {shown(text)}")
        return value

    def time(self, name: str) -> datetime:
        text = self.values[name]
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            raise TraceError(
                f"{self.place}: {name} must be a date and time, got {shown(text)}"
            ) from None


def _csv_rows(lines: Lines, headers: tuple[tuple[str, ...], ...]) -> Iterator[_CsvRow]:
    """The lines of a file that begins with one of `headers`."""
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
        for values in rows:
            if len(values) != len(columns):
                raise TraceError(
                    f"{lines.place}: {len(values)} values in a file of {len(columns)} columns"
                )
            yield _CsvRow(
                lines.place, header, dict(zip(_stripped(columns), _stripped(values), strict=True))
            )
    except csv.Error as error:
        raise TraceError(f"{lines.place}: {error}") from error


def _short_ones(lines: Lines) -> Iterator[str]:
    """The lines; raises for one with more columns than anybody writes."""
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


def _begins_with(headers: tuple[tuple[str, ...], ...], line: str) -> bool:
    """Whether a line has the columns of one of `headers`, and perhaps further ones."""
    try:
        columns = next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error:
        return False
    return _header_of(columns, headers) is not None


def _json_rows(lines: Lines, row: type[Row]) -> Iterator[Row]:
    """The value of every line that isn't blank."""
    decoder = msgspec.json.Decoder(row)
    for line in lines:
        if not line.strip():
            continue
        try:
            value = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{lines.place}: {short(error)}") from error
        except RecursionError as error:
            raise TraceError(f"{lines.place}: nested too deeply") from error
        yield value
