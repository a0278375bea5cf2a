"""Trace files: the formats in which others record requests, plain or `.gz`.

One JSON value a line:

- Mooncake (Qin et al., FAST 2025): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.
  There is one id per 512 tokens, the last block perhaps partial. Ids are global.
- Agentic sessions (kv-cache-tester): one session of a coding agent, `id`, `block_size`, `requests`.
  A request has `t` in seconds since its agent began, `in`, `out` and `hash_ids`, one per whole
  block. Ids are local to the session. An entry may be a sub-agent with `requests` of its own.

A header line and one request a line, without shared blocks:

- Azure (Patel et al., "Splitwise", ISCA 2024): `TIMESTAMP,ContextTokens,GeneratedTokens`, the first
  a date and time; or `arrival_s,context_tokens,generated_tokens`, the first in seconds.
- ServeGen, as drawn from its distributions: `arrival_s,client,input_tokens,output_tokens`, the
  second also called `tenant`.

A header line and the lengths of one request a line, without times:

- Vidur (Agrawal et al., MLSys 2024): `num_prefill_tokens,num_decode_tokens`; or the token columns
  of the formats above.

Further columns and fields are ignored, except the following ones. Each may be missing, and none is
derived from the recorded answer:

- `max_tokens`, the most that the caller asked for, `predicted_output_tokens`, the expected length;
- `tenant`, the sender, in a CSV also called `client`, and `class`, its class of service;
- `ttft_target_seconds`, `tpot_target_seconds` and `deadline_seconds`, the targets of its times;
- `acceptance`, in [0, 1]: the share of a drafter's tokens for it that were right, of those whose
  predecessors in the same step were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from aioserve.errors import TraceError
from aioserve.traces.files import CsvRow, Lines, begins_with, columns_missing, csv_rows, short
from aioserve.traces.trace_request import (
    MAX_ARRIVAL_SECONDS,
    MAX_ASKED_TOKENS,
    MAX_BLOCK_IDS,
    MAX_NAME_CHARS,
    MAX_REQUEST_TOKENS,
    MAX_TARGET_SECONDS,
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
    "with_turns",
]

FORMATS = "Mooncake JSONL, agentic sessions JSONL, Azure CSV, ServeGen CSV, a CSV of lengths"
MOONCAKE_BLOCK_TOKENS = 512
AZURE_HEADERS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("arrival_s", "context_tokens", "generated_tokens"),
)
SERVEGEN_HEADERS = (
    ("arrival_s", "client", "input_tokens", "output_tokens"),
    ("arrival_s", "tenant", "input_tokens", "output_tokens"),
)
LENGTHS_HEADERS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("ContextTokens", "GeneratedTokens"),
    ("context_tokens", "generated_tokens"),
    ("input_tokens", "output_tokens"),
)
JSON_FIELDS = (
    "it misses the fields timestamp, input_length, output_length and hash_ids, or, of a session, "
    "requests"
)
CSV_HEADERS = (*AZURE_HEADERS, *SERVEGEN_HEADERS, *LENGTHS_HEADERS)

Count = Annotated[int, msgspec.Meta(ge=0)]
Output = Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUEST_TOKENS)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_REQUEST_TOKENS)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_ASKED_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_ARRIVAL_SECONDS)]
Target = Annotated[float, msgspec.Meta(gt=0, le=MAX_TARGET_SECONDS)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1000 * MAX_ARRIVAL_SECONDS)]
Row = TypeVar("Row")


def read_trace(path: str | Path, *, timed: bool = True) -> list[TraceRequest]:
    """Read the requests of a file, whose first line tells its format.

    They are sorted by arrival, which counts from the first of them. If times will be drawn anyway,
    `timed=False` also takes a file of lengths: all its requests come at 0, in the file's order.
    Raises `TraceError`.
    """
    lines = Lines(path)
    first = lines.first()
    if not first:
        raise TraceError(f"{short(path)}: no request in it")
    if begins_with(AZURE_HEADERS, first):
        requests = _azure(lines)
    elif begins_with(SERVEGEN_HEADERS, first):
        requests = _servegen(lines)
    elif first.startswith("{") and '"timestamp"' in first:
        requests = _mooncake(lines)
    elif first.startswith("{") and '"requests"' in first:
        requests = _agentic(lines)
    elif begins_with(LENGTHS_HEADERS, first):
        if timed:
            raise TraceError(
                f"{lines.place}: lengths without times, since there is no column arrival_s or "
                "TIMESTAMP: give arrivals, poisson or gamma:CV, and a rate"
            )
        requests = _lengths(lines)
    else:
        lacks = JSON_FIELDS if first.startswith("{") else columns_missing(CSV_HEADERS, first)
        raise TraceError(
            f"{lines.place}: not the beginning of a known format ({FORMATS}): {first[:60]!r}"
            f"{lacks and '; '}{lacks}"
        )
    if not requests:
        raise TraceError(f"{short(path)}: no request in it")
    requests.sort(key=attrgetter("arrival_seconds"))
    began = requests[0].arrival_seconds
    number_of = {request.number: number for number, request in enumerate(requests)}
    return [
        replace(
            request,
            number=number,
            arrival_seconds=request.arrival_seconds - began,
            follows=None if request.follows is None else number_of[request.follows],
        )
        for number, request in enumerate(requests)
    ]


def read_mooncake(path: str | Path) -> list[TraceRequest]:
    """Read a file in Mooncake's format, unchanged. Raises `TraceError`."""
    return _mooncake(Lines(path))


def read_agentic(path: str | Path) -> list[TraceRequest]:
    """Read a file of agentic sessions: session by session, in each by time, sub-agents included.

    Raises `TraceError`.
    """
    return _agentic(Lines(path))


def read_azure(path: str | Path) -> list[TraceRequest]:
    """Read a file in Azure's format, unchanged. Dates and times count from the first.

    Raises `TraceError`.
    """
    return _azure(Lines(path))


def read_servegen(path: str | Path) -> list[TraceRequest]:
    """Read a file in ServeGen's format, unchanged. Raises `TraceError`."""
    return _servegen(Lines(path))


class _Collected:
    """Requests of a file, in order, at most as many as a trace may have."""

    def __init__(self) -> None:
        self.requests: list[TraceRequest] = []
        self._num_ids = 0

    def add(self, place: str, request: TraceRequest) -> None:
        check_request(place, request)
        self._num_ids += len(request.block_ids)
        if self._num_ids > MAX_BLOCK_IDS:
            raise TraceError(f"{place}: a trace of over {MAX_BLOCK_IDS:,} hash_ids")
        self.requests.append(request)

    def add_row(self, row: CsvRow, arrival: float, prompt_column: str, output_column: str) -> None:
        """Add a line of a CSV, whose request shares no blocks."""
        prompt = row.count(prompt_column, 1)
        request = TraceRequest(
            len(self.requests),
            arrival,
            prompt,
            row.count(output_column, 0),
            (),
            prompt,
            tenant=row.name("tenant", "client"),
            request_class=row.name("class"),
            max_tokens=row.optional("max_tokens"),
            predicted_output_tokens=row.optional("predicted_output_tokens"),
            ttft_target_seconds=row.target("ttft_target_seconds"),
            tpot_target_seconds=row.target("tpot_target_seconds"),
            deadline_seconds=row.target("deadline_seconds"),
            acceptance=row.share("acceptance"),
        )
        self.add(row.place, request)


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
            **row.asked,
        )
        check_blocks(lines.place, request)
        found.add(lines.place, request)
    return with_turns(found.requests)


def _agentic(lines: Lines) -> list[TraceRequest]:
    found = _Collected()
    for session in _json_rows(lines, _AgenticSession):
        turns = list(_flattened(session.requests))
        in_time = sorted(range(len(turns)), key=lambda place: turns[place].entry.t)
        numbers = {place: len(found.requests) + nth for nth, place in enumerate(in_time)}
        for place in in_time:
            entry, after = turns[place].entry, turns[place].after
            request = TraceRequest(
                len(found.requests),
                entry.t,
                entry.input_tokens,
                entry.output_tokens,
                entry.hash_ids,
                session.block_size,
                session.id,
                **entry.asked,
                follows=None if after is None else numbers[after],
                think_seconds=0.0 if after is None else _think_seconds(turns[after].entry, entry),
            )
            check_blocks(lines.place, request)
            found.add(lines.place, request)
    return found.requests


def _azure(lines: Lines) -> list[TraceRequest]:
    found = _Collected()
    began: datetime | None = None
    for row in csv_rows(lines, AZURE_HEADERS):
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
        found.add_row(row, arrival, row.header[1], row.header[2])
    return found.requests


def _servegen(lines: Lines) -> list[TraceRequest]:
    found = _Collected()
    for row in csv_rows(lines, SERVEGEN_HEADERS):
        found.add_row(row, row.seconds("arrival_s"), *SERVEGEN_HEADERS[0][2:])
    return found.requests


def _lengths(lines: Lines) -> list[TraceRequest]:
    found = _Collected()
    for row in csv_rows(lines, LENGTHS_HEADERS):
        found.add_row(row, 0.0, *row.header)
    return found.requests


class _RequestFields(msgspec.Struct, frozen=True, kw_only=True, rename={"request_class": "class"}):
    """Fields of a request in any JSON format that may be missing."""

    tenant: Name = ""
    request_class: Name = ""
    max_tokens: Limit | None = None
    predicted_output_tokens: Limit | None = None
    ttft_target_seconds: Target | None = None
    tpot_target_seconds: Target | None = None
    deadline_seconds: Target | None = None
    acceptance: Share | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """Fields that may be missing, by the names that a `TraceRequest` has."""
        return {name: getattr(self, name) for name in _RequestFields.__struct_fields__}


class _MooncakeRow(_RequestFields, frozen=True):
    timestamp: Milliseconds
    input_length: Positive
    output_length: Output
    hash_ids: tuple[Count, ...]


class _AgenticRequest(
    _RequestFields,
    frozen=True,
    tag_field="type",
    tag="n",
    rename={"input_tokens": "in", "output_tokens": "out"},
):
    t: Seconds
    input_tokens: Positive
    output_tokens: Output
    hash_ids: tuple[Count, ...]
    api_time: Seconds = 0.0
    """Time that the completion took, in seconds."""
    think_time: Seconds | None = None
    """Time since the answer before, in seconds."""


class _StreamedAgenticRequest(_AgenticRequest, frozen=True, tag="s"):
    """Request whose answer was streamed; otherwise the same."""


class _SubAgent(msgspec.Struct, frozen=True, tag_field="type", tag="subagent"):
    t: Seconds
    requests: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...]


class _AgenticSession(msgspec.Struct, frozen=True):
    id: Name
    block_size: Positive
    hash_id_scope: Literal["local"]
    requests: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...]


class _Turn(msgspec.Struct, frozen=True):
    entry: _AgenticRequest
    after: int | None
    """Index of the turn before in its agent, or in the agent that started its agent."""


class _Agent(msgspec.Struct):
    began: float
    left: Iterator[_AgenticRequest | _StreamedAgenticRequest | _SubAgent]
    after: int | None


def _flattened(
    entries: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...],
) -> Iterator[_Turn]:
    """Yield the requests of an agent, and of its sub-agents, in session time."""
    agents = [_Agent(0.0, _in_time(entries), None)]
    count = 0
    while agents:
        agent = agents[-1]
        entry = next(agent.left, None)
        if entry is None:
            agents.pop()
        elif isinstance(entry, _SubAgent):
            agents.append(_Agent(agent.began + entry.t, _in_time(entry.requests), agent.after))
        else:
            yield _Turn(replace(entry, t=agent.began + entry.t), agent.after)
            agent.after, count = count, count + 1


def _in_time(
    entries: tuple[_AgenticRequest | _StreamedAgenticRequest | _SubAgent, ...],
) -> Iterator[_AgenticRequest | _StreamedAgenticRequest | _SubAgent]:
    return iter(sorted(entries, key=attrgetter("t")))


def _think_seconds(before: _AgenticRequest, turn: _AgenticRequest) -> float:
    """Return the recorded time to think, or the time between the answer before and this turn.

    A sub-agent's first turn has no recorded time: it knows nothing of the answer before.
    """
    if turn.think_time:
        return turn.think_time
    return max(0.0, turn.t - before.t - before.api_time)


def _json_rows(lines: Lines, row: type[Row]) -> Iterator[Row]:
    """Yield the value of every line that isn't blank."""
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


def with_turns(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return the trace with `follows` by arrival, and the time between the two as `think_seconds`.

    The duration of the answer isn't recorded, so that time includes it.

    A trace like Mooncake's names no conversations. But the id of a block stands for all tokens up
    to its end. So a prompt with the id of another's last whole block begins with that prompt. If no
    earlier prompt had that block, it is that request's own words, and not a text that many begin
    with. A later request with it continues the same conversation.
    """
    made = list(trace)
    last_of: dict[int, int] = {}
    """Index of the latest request with this last whole block, by the block. A block that another
    prompt had in its middle before is left out.
    """
    seen: set[int] = set()
    for index in sorted(range(len(trace)), key=lambda index: trace[index].arrival_seconds):
        request = trace[index]
        ids = request.block_ids[: request.prompt_tokens // request.block_tokens]
        before = next((last_of[id] for id in reversed(ids) if id in last_of), None)
        if before is not None:
            made[index] = replace(
                request,
                follows=trace[before].number,
                think_seconds=request.arrival_seconds - trace[before].arrival_seconds,
            )
        if ids and (ids[-1] not in seen or ids[-1] in last_of):
            last_of[ids[-1]] = index
        seen.update(ids)
    return made
