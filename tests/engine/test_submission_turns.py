"""Requests that come at once are submitted in order, a few in each turn of the loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from unittest import mock

import pytest

from aioserve import Engine, SamplingParams
from aioserve.engine.event_loop import SUBMITTED_AT_ONCE, SubmissionTurns
from aioserve.engine.intake import Intake
from aioserve.engine.stream import TOKENS_AT_ONCE, collect, yield_before

ONE = SamplingParams(max_tokens=1)


class Ticks:
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.now = 0
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self.now += 1
        if self.now < 10_000_000:
            self._loop.call_soon(self._tick)


@pytest.mark.asyncio
async def test_so_many_have_a_turn_at_once_and_all_in_their_order() -> None:
    turns, ticks, taken = SubmissionTurns(), Ticks(), list[tuple[int, int]]()

    async def take(number: int) -> None:
        await turns.take()
        taken.append((number, ticks.now))

    await asyncio.gather(*(take(number) for number in range(10 * SUBMITTED_AT_ONCE)))
    assert [number for number, _ in taken] == list(range(10 * SUBMITTED_AT_ONCE))
    assert set(Counter(tick for _, tick in taken).values()) == {SUBMITTED_AT_ONCE}


@pytest.mark.asyncio
async def test_turns_of_cancelled_tasks_go_to_others() -> None:
    turns, taken = SubmissionTurns(), list[int]()

    async def take(number: int) -> None:
        await turns.take()
        taken.append(number)

    tasks = [asyncio.create_task(take(number)) for number in range(4 * SUBMITTED_AT_ONCE)]
    await asyncio.sleep(0)
    gone = range(SUBMITTED_AT_ONCE, 3 * SUBMITTED_AT_ONCE)
    for number in gone:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert taken == [number for number in range(len(tasks)) if number not in gone]


@pytest.mark.asyncio
async def test_a_lone_caller_waits_for_nothing() -> None:
    turns = SubmissionTurns()
    for _ in range(3):
        for _ in range(SUBMITTED_AT_ONCE):
            waiting = turns.take()
            with pytest.raises(StopIteration):
                waiting.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.mark.parametrize("call", ["generate", "embed", "score_each"])
@pytest.mark.asyncio
async def test_no_call_of_the_engine_submits_more_in_one_turn_of_the_loop(call: str) -> None:
    count = 5 * SUBMITTED_AT_ONCE
    submitted: Counter[int] = Counter()
    submit = Intake.submit
    async with Engine("pyhelp") as engine:
        ticks = Ticks()

        def noted(intake: Intake, *args: object, **options: object) -> object:
            submitted[ticks.now] += 1
            return submit(intake, *args, **options)  # pyright: ignore[reportArgumentType]

        with mock.patch.object(Intake, "submit", noted):
            if call == "generate":
                await asyncio.gather(*(engine.generate("x", ONE) for _ in range(count)))
            elif call == "embed":
                await engine.embed(["x"] * count)
            else:
                await engine.score_each("x", ["y"] * count)
    assert submitted.total() == count
    assert max(submitted.values()) <= SUBMITTED_AT_ONCE + 1


@pytest.mark.asyncio
async def test_beams_of_many_searches_are_submitted_in_turns() -> None:
    submit, at, ticks = Intake.submit, list[int](), None

    def noted(self: Intake, *arguments: object, **options: object) -> object:
        assert ticks is not None
        at.append(ticks.now)
        return submit(self, *arguments, **options)  # type: ignore[arg-type]

    async with Engine("pyhelp", max_num_seqs=64) as engine:
        ticks = Ticks()
        with mock.patch.object(Intake, "submit", noted):
            found = await asyncio.gather(
                *(engine.beam_search(text, beam_width=8, max_tokens=2) for text in "abcdefghijkl")
            )
    assert [len(beams) for beams in found] == [8] * 12
    assert len(at) == 12 + 12 * 8
    assert max(Counter(at).values()) <= SUBMITTED_AT_ONCE


@pytest.mark.asyncio
async def test_long_samples_are_put_together_in_turns() -> None:
    asked: list[int] = []

    async def before(num_tokens: int) -> None:
        asked.append(num_tokens)

    params = SamplingParams(n=3, max_tokens=5, ignore_eos=True)
    async with Engine("pyhelp") as engine:
        done = await collect(engine.stream("abc", params), params, before)
    assert asked == [5, 5, 5]
    assert [len(sample.token_ids) for sample in done.samples] == asked
    ticks = Ticks()
    await yield_before(TOKENS_AT_ONCE)
    assert ticks.now == 0
    await yield_before(TOKENS_AT_ONCE + 1)
    assert ticks.now > 0
