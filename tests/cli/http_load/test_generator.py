"""Times at which the load generator sends, on a simulated loop where a second is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve.cli._http_load.generator import Clock, Load, run_load
from aioserve.errors import TraceError
from aioserve.simulation.records import Ending
from aioserve.simulation.served import ServedRequest
from aioserve.testing.sim_loop import run_simulated
from aioserve.traces.trace_request import TraceRequest

EXACT = 1e-6


class FakeServer:
    """Server that answers each request after a number of seconds, by the request's number."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.sent: list[int] = []
        self.under_way = self.most_under_way = 0

    async def send(self, served: ServedRequest, body: bytes, clock: Clock) -> None:
        record = served.record
        assert body == str(record.request.number).encode()
        served.is_sent = True
        record.request = replace(record.request, arrival_seconds=clock())
        self.sent.append(record.request.number)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.seconds[record.request.number])
        finally:
            self.under_way -= 1
        record.end_seconds = clock()
        record.ending = Ending.FINISHED


def request(number: int, arrival: float, **fields: object) -> TraceRequest:
    return replace(TraceRequest(number, arrival, 1, 1, (), 1), **fields)


def body_of(one: TraceRequest) -> bytes:
    return str(one.number).encode()


def simulated(
    requests: Sequence[TraceRequest], server: FakeServer, *, seed: int = 0, **options: object
) -> Load:
    async def main() -> Load:
        clock = asyncio.get_running_loop().time
        return await run_load(requests, server.send, body_of, seconds_now=clock, **options)  # type: ignore[arg-type]

    return run_simulated(main, seed=seed)


ARRIVALS = st.lists(st.floats(0, 3), min_size=1, max_size=12)
SERVICE = st.lists(st.floats(0, 2), min_size=12, max_size=12)
SEEDS = st.integers(0, 100)


@given(ARRIVALS, SERVICE, SEEDS)
def test_an_open_loop_sends_each_request_when_it_is_due_whatever_the_server_does(
    arrivals: list[float], service: list[float], seed: int
) -> None:
    requests = [request(number, seconds) for number, seconds in enumerate(arrivals)]
    server = FakeServer(dict(enumerate(service)))
    load = simulated(requests, server, seed=seed)
    assert sorted(server.sent) == list(range(len(arrivals)))
    for one in load.served:
        due = arrivals[one.record.request.number]
        assert one.record.request.arrival_seconds == pytest.approx(due, abs=EXACT)
        assert one.late_seconds == pytest.approx(0, abs=EXACT)
        assert one.held_seconds == 0
    ends = [due + service[number] for number, due in enumerate(arrivals)]
    assert load.seconds == pytest.approx(max(ends), abs=EXACT)
    assert not load.interrupted


@given(ARRIVALS, SERVICE, st.integers(1, 4), SEEDS)
def test_no_more_than_the_limit_are_under_way_and_waiting_for_room_is_not_lateness(
    arrivals: list[float], service: list[float], concurrency: int, seed: int
) -> None:
    requests = [request(number, seconds) for number, seconds in enumerate(arrivals)]
    server = FakeServer(dict(enumerate(service)))
    load = simulated(requests, server, seed=seed, concurrency=concurrency)
    assert server.most_under_way <= concurrency
    assert len(server.sent) == len(arrivals)
    for one in load.served:
        due = arrivals[one.record.request.number]
        sent = one.record.request.arrival_seconds
        assert one.held_seconds + one.late_seconds == pytest.approx(sent - due, abs=EXACT)
        assert one.late_seconds == pytest.approx(0, abs=EXACT)


@given(st.integers(1, 12), SERVICE, st.integers(1, 4))
def test_without_times_as_many_as_the_limit_are_always_under_way(
    count: int, service: list[float], concurrency: int
) -> None:
    server = FakeServer(dict(enumerate(service)))
    load = simulated([request(n, 0.0) for n in range(count)], server, concurrency=concurrency)
    assert server.most_under_way == min(count, concurrency)
    # A slot is never idle while a request waits: first come, first served, like on several
    # machines.
    free = [0.0] * concurrency
    for number in range(count):
        begin = min(free)
        free[free.index(begin)] = begin + service[number]
    assert load.seconds == pytest.approx(max(free), abs=1e-3)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6),
    st.floats(0, 2),
    SEEDS,
)
def test_a_turn_of_a_closed_loop_comes_after_the_answer_and_the_time_to_think(
    turns: list[tuple[float, float]], first: float, seed: int
) -> None:
    requests = [
        request(number, first, follows=number - 1 if number else None, think_seconds=think)
        for number, (think, _) in enumerate(turns)
    ]
    server = FakeServer({number: seconds for number, (_, seconds) in enumerate(turns)})
    load = simulated(requests, server, seed=seed, closed_loop=True)
    at = first
    for number, (think, seconds) in enumerate(turns):
        at += think if number else 0.0
        sent = load.served[number].record.request.arrival_seconds
        assert sent == pytest.approx(at, abs=EXACT)
        assert load.served[number].late_seconds == pytest.approx(0, abs=EXACT)
        at += seconds


@given(ARRIVALS, SERVICE, st.floats(0.01, 3), st.none() | st.integers(1, 3))
def test_nothing_is_sent_after_the_end_and_what_is_under_way_may_end(
    arrivals: list[float], service: list[float], max_seconds: float, concurrency: int | None
) -> None:
    requests = [request(number, seconds) for number, seconds in enumerate(arrivals)]
    server = FakeServer(dict(enumerate(service)))
    load = simulated(requests, server, max_seconds=max_seconds, concurrency=concurrency)
    for one in load.served:
        assert one.is_sent == (one.record.ending is Ending.FINISHED)
        if one.is_sent:
            assert one.record.request.arrival_seconds <= max_seconds + EXACT
        elif concurrency is None:
            assert arrivals[one.record.request.number] > max_seconds


def test_a_follower_is_sent_though_the_next_session_begins_after_the_end() -> None:
    requests = [
        request(0, 0.0),
        request(1, 0.0, follows=0, think_seconds=1.0),
        request(2, 100.0),
    ]
    server = FakeServer({0: 1.0, 1: 1.0, 2: 1.0})
    load = simulated(requests, server, closed_loop=True, max_seconds=10.0)
    assert server.sent == [0, 1]
    assert load.seconds == pytest.approx(3.0, abs=EXACT)


@given(st.integers(0, 50).map(lambda tenths: tenths / 10 + 0.05), SEEDS)
def test_a_load_that_is_interrupted_keeps_what_was_measured(after: float, seed: int) -> None:
    requests = [request(number, number * 0.5) for number in range(8)]
    server = FakeServer(dict.fromkeys(range(8), 0.7))

    async def main() -> Load:
        clock = asyncio.get_running_loop().time
        task = asyncio.create_task(run_load(requests, server.send, body_of, seconds_now=clock))
        await asyncio.sleep(after)
        task.cancel()
        return await task

    load = run_simulated(main, seed=seed)
    ended_all = after > 7 * 0.5 + 0.7
    assert load.interrupted != ended_all
    for number, one in enumerate(load.served):
        assert one.is_sent == (number * 0.5 < after)
        assert (one.record.ending is Ending.FINISHED) == (number * 0.5 + 0.7 < after)
    assert server.under_way == 0


def test_a_fault_of_the_generator_itself_is_raised() -> None:
    def no_body(_: TraceRequest) -> bytes:
        raise TraceError("no such prompt")

    async def main() -> None:
        server = FakeServer({0: 100.0, 1: 100.0})
        await run_load([request(0, 0.0), request(1, 0.5)], server.send, no_body)

    with pytest.raises(TraceError, match="no such prompt"):
        run_simulated(main)


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    server = FakeServer({0: 0.1, 1: 0.2})
    simulated(
        [request(0, 0.0), request(1, 0.0)],
        server,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 2), (2, 2)]
