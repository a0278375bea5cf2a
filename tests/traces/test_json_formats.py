"""Formats with a JSON value a line: what a file says is what is read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from aioserve.errors import TraceError
from aioserve.traces.formats import read_agentic, read_mooncake
from aioserve.traces.trace_request import TraceRequest


def mooncake_row(**changes: Any) -> dict[str, Any]:
    row = {"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [0, 4, 2]}
    return row | changes


def agentic_request(t: float, tokens: int, ids: list[int], **changes: Any) -> dict[str, Any]:
    entry = {"t": t, "type": "n", "model": "m", "in": tokens, "out": 3, "hash_ids": ids}
    return entry | changes


def session(name: str, *requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    row = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}
    return row | changes


def written(path: Path, *rows: dict[str, Any] | str) -> Path:
    lines = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    data = lines.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_mooncake_trace_is_read_as_written(tmp_path: Path, name: str) -> None:
    other = mooncake_row(input_length=1024 + 512, max_tokens=99)
    path = written(tmp_path / name, mooncake_row(), "", other)
    first, second = read_mooncake(path)
    assert first == TraceRequest(0, 1.5, 1025, 7, (0, 4, 2), 512)
    assert (second.number, second.prompt_tokens, second.max_tokens) == (1, 1536, 99)


def test_sessions_are_read_with_their_sub_agents_in_session_time(tmp_path: Path) -> None:
    inner = {"t": 1.0, "type": "subagent", "requests": [agentic_request(2.0, 128, [8, 9])]}
    agent = {
        "t": 10.0,
        "type": "subagent",
        "status": "completed",
        "requests": [agentic_request(0.0, 64, [8]), inner, agentic_request(9.0, 65, [8])],
    }
    path = written(
        tmp_path / "sessions.jsonl",
        session("a", agentic_request(0.0, 70, [1]), agent, agentic_request(15.0, 63, [], type="s")),
        session("b", agentic_request(0.0, 64, [1]), block_size=32, requests=[]),
        session("c", agentic_request(0.5, 40, [1, 2]), block_size=32),
    )
    requests = read_agentic(path)
    assert [(r.session, r.arrival_seconds, r.block_ids) for r in requests] == [
        ("a", 0.0, (1,)),
        ("a", 10.0, (8,)),
        ("a", 13.0, (8, 9)),
        ("a", 15.0, ()),
        ("a", 19.0, (8,)),
        ("c", 0.5, (1, 2)),
    ]
    assert [r.number for r in requests] == list(range(6))
    assert [r.block_tokens for r in requests] == [64] * 5 + [32]
    assert [(r.prompt_tokens, r.output_tokens) for r in requests[:2]] == [(70, 3), (64, 3)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r":2: Input data was truncated"),
        (b'{"timestamp": "\xff"}'.decode("latin1"), r":2: .*timestamp"),
        (mooncake_row(output_length="7"), r":2: Expected `int`, got `str` - at `\$.output_length`"),
        (mooncake_row(input_length=0), r":2: Expected `int` >= 1 - at `\$.input_length`"),
        (mooncake_row(hash_ids=[1, -1, 2]), r":2: Expected `int` >= 0 - at `\$.hash_ids\[1\]`"),
        ({"timestamp": 0}, r":2: Object missing required field `input_length`"),
        (mooncake_row(hash_ids=[1]), r":2: 1 hash_ids, but a prompt of 1025 tokens has 2 whole"),
        (mooncake_row(input_length=1024), r"3 hash_ids, but .* has 2 whole blocks of 512$"),
    ],
)
def test_a_bad_line_is_named_with_its_field(
    tmp_path: Path, row: dict[str, Any] | str, message: str
) -> None:
    path = written(tmp_path / "trace.jsonl", mooncake_row(), row)
    with pytest.raises(TraceError, match=message) as caught:
        read_mooncake(path)
    assert str(caught.value).startswith(f"{path}:")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (session("a", agentic_request(0, 64, [1], type="x")), r"Invalid value 'x' - at `\$.req"),
        (
            session("a", agentic_request(0, 64, [], out="1")),
            r"got `str` - at `\$.requests\[0\].out",
        ),
        (session("a", agentic_request(0, 128, [])), r"0 hash_ids, but a prompt of 128 tokens"),
        (session("a", hash_id_scope="global"), r"Invalid enum value 'global' - at `\$.hash_id"),
        (session("a", block_size=0), r"Expected `int` >= 1 - at `\$.block_size`"),
    ],
)
def test_a_bad_session_is_named_with_its_field(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = written(tmp_path / "sessions.jsonl.gz", row)
    with pytest.raises(TraceError, match=message) as caught:
        read_agentic(path)
    assert str(caught.value).startswith(f"{path}:1: ")


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl.gz", *[mooncake_row()] * 3)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TraceError, match="not a whole gzip file"):
        read_mooncake(path)
    path.write_bytes(b"plain text")
    with pytest.raises(TraceError, match="not a whole gzip file"):
        read_mooncake(path)


def test_an_id_too_large_for_int32_tokens_is_named_with_its_line(tmp_path: Path) -> None:
    row = mooncake_row(input_length=1024, hash_ids=[0, 2**55])
    path = written(tmp_path / "trace.jsonl", mooncake_row(), row)
    with pytest.raises(TraceError, match=rf"trace.jsonl:2: block_ids must be .*, got {2**55}$"):
        read_mooncake(path)
