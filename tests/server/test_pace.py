"""Work for one request, and for many, lets the loop run others in between."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.server.pace import UNITS_AT_ONCE, LoopTurns, Pace


class CountedTurns(LoopTurns):
    """Counts the turns in which a request lets others run."""

    def __init__(self) -> None:
        super().__init__()
        self.num_turns = 0

    async def take(self) -> None:
        self.num_turns += 1


@given(st.lists(st.integers(0, 3 * UNITS_AT_ONCE), max_size=60))
@pytest.mark.asyncio
async def test_no_more_than_so_much_is_done_between_two_turns(works: list[int]) -> None:
    turns = CountedTurns()
    pace = Pace(turns)
    done = Counter[int]()
    for units in works:
        await pace.before(units)
        done[turns.num_turns] += units
        if units > UNITS_AT_ONCE:  # in one piece, and first in its turn
            assert done[turns.num_turns] == units
    assert all(units <= max(UNITS_AT_ONCE, *works) for units in done.values())
    # No turn is wasted: two neighbours together have more than one may have.
    for number in range(turns.num_turns):
        assert done[number] + done[number + 1] > UNITS_AT_ONCE


@pytest.mark.asyncio
async def test_work_that_was_done_before_counts() -> None:
    turns = CountedTurns()
    pace = Pace(turns)
    pace.spend(UNITS_AT_ONCE)
    await pace.before(1)
    assert turns.num_turns == 1


@pytest.mark.asyncio
async def test_of_many_requests_one_goes_on_in_each_turn_of_the_loop() -> None:
    now, ended, turns = 0, False, LoopTurns()
    went_on: list[tuple[int, int]] = []

    async def count() -> None:
        nonlocal now
        while not ended:
            now += 1
            await asyncio.sleep(0)

    async def work(number: int) -> None:
        pace = Pace(turns)
        pace.spend(UNITS_AT_ONCE)
        for _ in range(5):
            await pace.before(UNITS_AT_ONCE)
            went_on.append((now, number))

    counting = asyncio.create_task(count())
    await asyncio.gather(*(work(number) for number in range(20)))
    ended = True
    await counting
    assert len(went_on) == 100
    assert set(Counter(at for at, _ in went_on).values()) == {1}
    # First come, first served.
    assert [number for _, number in went_on[:20]] == list(range(20))


@pytest.mark.asyncio
async def test_a_request_that_is_cancelled_keeps_no_turn() -> None:
    turns = LoopTurns()
    waiting = [asyncio.create_task(turns.take()) for _ in range(3)]
    await asyncio.sleep(0)
    for one in waiting[:2]:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [one.cancelled() for one in waiting] == [True, True, False]
    await turns.take()
