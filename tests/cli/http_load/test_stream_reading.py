"""Streams that are cut into pieces anywhere are read the same."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from aioserve.cli._http_load.client import StreamReading
from aioserve.cli._http_load.events import EventLines
from aioserve.simulation.records import Ending, RequestRecord
from aioserve.simulation.served import ServedRequest
from aioserve.traces.trace_request import TraceRequest
from tests.cli.http_load.misbehaving import chunk, event

TEXTS = st.lists(st.sampled_from(["", "a", "ü", "\n", "data: x"]), max_size=8)
CUTS = st.lists(st.integers(0, 2000), max_size=10)
ENDS = st.sampled_from([b"\n", b"\r\n"])


def pieces_of(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[a:b] for a, b in pairwise(places)]


def read(pieces: list[bytes], asked: int) -> ServedRequest:
    served = ServedRequest(RequestRecord(TraceRequest(0, 0.0, 4, asked, (), 4)))
    reading = StreamReading(served)
    for number, piece in enumerate(pieces):
        reading.add(piece, float(number))
    reading.end()
    return served


@given(TEXTS, CUTS, ENDS, st.booleans())
def test_any_pieces_of_a_stream_say_the_same(
    texts: list[str], cuts: list[int], line_end: bytes, ends_in_a_line: bool
) -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 8}
    events = [
        b": a comment\n\n",
        *map(chunk, texts),
        chunk("", "length"),
        event({"choices": [], "usage": usage}),
        b"data: [DONE]\n\n" if ends_in_a_line else b"data: [DONE]",
    ]
    stream = b"".join(events).replace(b"\n", line_end)
    served = read(pieces_of(stream, cuts), 8)
    assert (served.failure, served.record.ending) == ("", Ending.FINISHED)
    assert served.chunks == sum(map(bool, texts))
    assert len(served.gap_seconds) == max(0, served.chunks - 1)
    assert (served.record.output_tokens, served.has_usage) == (8, True)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=10))
def test_gaps_and_the_first_token_are_those_of_chunks_with_tokens(
    came: list[tuple[bool, float]],
) -> None:
    served = ServedRequest(RequestRecord(TraceRequest(0, 0.0, 4, 10, (), 4)))
    reading = StreamReading(served)
    now, times = 0.0, []
    for has_text, pause in came:
        now += pause
        reading.add(chunk("a" if has_text else ""), now)
        times += [now] if has_text else []
    gaps = [b - a for a, b in pairwise(times)]
    assert served.record.first_token_seconds == (times[0] if times else None)
    assert list(served.gap_seconds) == gaps
    assert served.record.max_gap_seconds == (max(gaps) if gaps else None)
    assert reading.last_seconds == (times[-1] if times else None)


@given(st.binary(max_size=300), CUTS)
def test_lines_are_the_same_however_bytes_are_cut(stream: bytes, cuts: list[int]) -> None:
    whole, parts = EventLines(), EventLines()
    expected = [*whole.of(stream), *whole.end()]
    found = [data for piece in pieces_of(stream, cuts) for data in parts.of(piece)]
    assert [*found, *parts.end()] == expected
