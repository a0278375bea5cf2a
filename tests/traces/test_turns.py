"""Turns of a conversation are recognized by blocks, in formats that don't mark them."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioserve.errors import TraceError
from aioserve.traces.formats import read_trace, with_turns
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.trace_request import TraceRequest
from tests import made_up_traces


def asking(number: int, seconds: float, *ids: int, rest: int = 1) -> TraceRequest:
    return TraceRequest(number, seconds, len(ids) * 4 + rest, 5, ids, 4)


def test_a_prompt_that_begins_with_anothers_own_words_follows_it() -> None:
    system = (0, 1)
    trace = [
        asking(0, 0.0, *system, 10),
        asking(1, 1.0, *system, 20),  # begins like the first, but with the system's words alone
        asking(2, 5.0, *system, 10, 11),
        asking(3, 9.0, *system, 10, 11, 12),
        asking(4, 9.5, *system, 20),  # asked once more
    ]
    found = with_turns(trace)
    assert [request.follows for request in found] == [None, None, 0, 2, 1]
    assert [request.think_seconds for request in found] == [0.0, 0.0, 5.0, 4.0, 8.5]


def test_a_text_that_many_begin_with_is_nobodys_turn() -> None:
    # The second's last whole block was in a prompt before.
    trace = [asking(0, 0.0, 0, 1), asking(1, 1.0, 0), asking(2, 2.0, 0, 7)]
    assert [request.follows for request in with_turns(trace)] == [None, None, None]


def test_a_partial_block_tells_nothing() -> None:
    trace = [asking(0, 0.0, 0, 1, rest=-2), asking(1, 1.0, 0, 1, 2)]
    assert [request.follows for request in with_turns(trace)] == [None, 0]
    assert [r.follows for r in with_turns([asking(0, 0.0, 0, rest=-1), trace[1]])] == [None, None]


@pytest.mark.parametrize("write", [made_up_traces.mooncake, made_up_traces.agentic])
def test_turns_of_a_file_come_after_what_they_follow(write, tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path))
    turns = [request for request in trace if request.follows is not None]
    assert len(turns) > len(trace) / 3
    for request in turns:
        before = trace[request.follows or 0]
        assert before.number < request.number
        assert before.arrival_seconds + request.think_seconds <= request.arrival_seconds + 1e-6
        assert before.session == request.session


def test_made_up_conversations_say_who_follows_whom() -> None:
    trace = synthetic_trace("conversations", 300)
    for request in trace:
        if request.follows is not None:
            before = trace[request.follows]
            assert before.arrival_seconds + request.think_seconds == request.arrival_seconds
            assert request.block_ids[: len(before.block_ids)] == before.block_ids


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("arrival_s,context_tokens", "misses the column generated_tokens$"),
        ("when,input_tokens,client", "misses the columns arrival_s, output_tokens$"),
        (
            "client,arrival_s,input_tokens,output_tokens",
            "must begin with arrival_s,client,input_tokens,output_tokens, in this order$",
        ),
        ("a,b", "has the columns TIMESTAMP,ContextTokens,GeneratedTokens or .*output_tokens$"),
    ],
)
def test_a_csv_says_which_columns_it_misses(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\n1,2,3,4\n")
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_lengths_without_times_are_read_where_times_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens,max_tokens\n30,5,9\n20,0,\n")
    with pytest.raises(
        TraceError, match=r"lengths.csv:1: lengths without times, since there is no"
    ):
        read_trace(path)
    first, second = read_trace(path, timed=False)
    assert (first.prompt_tokens, first.output_tokens, first.max_tokens) == (30, 5, 9)
    assert (second.arrival_seconds, second.max_tokens, second.number) == (0.0, None, 1)
