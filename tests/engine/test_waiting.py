"""Waiting tokens are counted exactly, bounded, and their wait is estimated from recent progress."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aioserve import Engine, QueueFullError, SamplingParams
from aioserve.engine.measures import Waiting
from aioserve.errors import DeadlineExceededError
from aioserve.testing import FakeModel, run_simulated
from tests.tiers import examples

COUNTS = st.integers(1, 10_000)
LONG = SamplingParams(max_tokens=60)


class WaitingCountsAsItsModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting()
        self.model: list[int] = []

    @rule(tokens=COUNTS)
    def came(self, tokens: int) -> None:
        self.waiting.came(tokens)
        self.model.append(tokens)

    @rule(place=st.integers(0, 100))
    def began(self, place: int) -> None:
        if self.model:
            self.waiting.began(self.model.pop(place % len(self.model)))

    @rule(place=st.integers(0, 100))
    def left(self, place: int) -> None:
        if self.model:
            self.waiting.left(self.model.pop(place % len(self.model)))

    @rule(seconds=st.floats(0, 100))
    def step_ended(self, seconds: float) -> None:
        self.waiting.step_ended(seconds)

    @invariant()
    def counts(self) -> None:
        assert self.waiting.tokens == sum(self.model)

    @invariant()
    def estimates_grow_with_what_waits(self) -> None:
        less, more = self.waiting.seconds_for(10), self.waiting.seconds_for(20)
        assert (less is None) == (more is None)
        if less is not None and more is not None:
            assert 0 < less < more


TestWaitingCountsAsItsModel = WaitingCountsAsItsModel.TestCase


@given(tokens=COUNTS, seconds=st.floats(0.001, 5), steps=st.integers(1, 50), ahead=COUNTS)
def test_a_steady_past_goes_on(tokens: int, seconds: float, steps: int, ahead: int) -> None:
    waiting = Waiting()
    for _ in range(steps):
        waiting.came(tokens)
        waiting.step_ended(seconds)
        waiting.began(tokens)
    assert waiting.seconds_for(ahead) == pytest.approx(ahead * seconds / tokens)


def test_what_lies_far_back_is_forgotten() -> None:
    waiting = Waiting()
    for tokens, steps in ((1, 100), (100, 100)):
        for _ in range(steps):
            waiting.step_ended(1)
            waiting.began(tokens)
    assert waiting.seconds_for(100) == pytest.approx(1, rel=0.01)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 20),  # answer tokens
        st.sampled_from(["read", "close", "deadline"]),
        st.integers(0, 5),  # milliseconds before the next one comes
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=examples(15), deadline=None)
@given(requests=REQUESTS)
def test_however_requests_end_what_waits_is_exact(
    requests: list[tuple[int, int, str, int]],
) -> None:
    async def use(engine: Engine, prompt: int, answer: int, end: str) -> None:
        deadline = 0.003 if end == "deadline" else None
        params = SamplingParams(max_tokens=answer)
        stream = engine.stream([1] * prompt, params, deadline_seconds=deadline)
        if end == "close":
            await asyncio.sleep(0.002)
            stream.close()
            return
        try:
            async for _ in stream:
                pass
        except DeadlineExceededError:
            assert end == "deadline"

    async def run() -> None:
        model = FakeModel(step_seconds=lambda _: 0.0005)
        async with Engine(model, max_num_seqs=2) as engine, asyncio.TaskGroup() as group:
            table = engine._lifecycle.core.table

            def check() -> None:
                unbegun = sum(
                    len(request.mailbox.prompt_ids)
                    for request in table
                    if request.mailbox.first_token_seconds is None
                    and request.state.value in ("queued", "running", "leaving")
                )
                assert table.waiting.tokens == unbegun

            for prompt, answer, end, milliseconds in requests:
                group.create_task(use(engine, prompt, answer, end))
                await asyncio.sleep(milliseconds / 1000)
                check()
            while engine.stats().num_running or engine.stats().num_waiting:
                await asyncio.sleep(0.001)
                check()
        assert table.waiting.tokens == 0

    asyncio.run(run())


# -- refusals


@pytest.mark.asyncio
async def test_tokens_that_wait_are_bounded_to_the_token() -> None:
    async with Engine(FakeModel(), max_num_seqs=1, max_waiting_tokens=50) as engine:
        streams = [engine.stream([1] * 30, LONG), engine.stream([1] * 20, LONG)]
        with pytest.raises(QueueFullError, match=r"max_waiting_tokens = 50") as caught:
            engine.stream([1], LONG)
        assert (caught.value.value, caught.value.limit, caught.value.unit) == (50, 50, "tokens")
        for stream in streams:
            stream.close()
        engine.stream([1] * 50, LONG).close()


@pytest.mark.asyncio
async def test_where_none_wait_a_prompt_of_any_length_is_taken() -> None:
    async with Engine(FakeModel(), max_waiting_tokens=1) as engine:
        for _ in range(3):
            completion = await engine.generate([1] * 100, SamplingParams(max_tokens=2))
            assert completion.usage.completion_tokens == 2


@settings(max_examples=examples(15), deadline=None)
@given(
    num_before=st.integers(0, 6),
    deadline=st.sampled_from([0.005, 0.05, 0.5, 5.0, 500.0]),
    refuse_late=st.booleans(),
)
def test_a_request_is_refused_for_its_deadline_exactly_where_the_estimate_is_past_it(
    num_before: int, deadline: float, refuse_late: bool
) -> None:
    async def run() -> None:
        model = FakeModel(step_seconds=lambda _: 0.001)
        async with Engine(model, max_num_seqs=1, refuse_late=refuse_late) as engine:
            await engine.generate([1] * 10, SamplingParams(max_tokens=20))
            before = [engine.stream([1] * 10, LONG) for _ in range(num_before)]
            waiting = engine._lifecycle.core.table.waiting
            estimate = waiting.seconds_for(waiting.tokens + 10)
            assert estimate is not None
            late = refuse_late and num_before > 0 and estimate > deadline
            if late:
                with pytest.raises(QueueFullError) as caught:
                    engine.stream([1] * 10, LONG, deadline_seconds=deadline)
                error = caught.value
                assert (error.unit, error.limit) == ("seconds", deadline)
                assert error.value == pytest.approx(estimate)
                assert error.retry_after_seconds == pytest.approx(estimate - deadline)
            else:
                engine.stream([1] * 10, LONG, deadline_seconds=deadline).close()
            # Without a deadline no request is late.
            engine.stream([1] * 10, LONG).close()
            for stream in before:
                stream.close()

    asyncio.run(run())


def test_the_estimate_is_about_what_a_request_then_waits() -> None:
    run_simulated(estimate_and_wait)


async def estimate_and_wait() -> None:
    model = FakeModel(step_seconds=lambda _: 0.002, num_pages=512)
    params = SamplingParams(max_tokens=20)
    async with Engine(model, max_num_seqs=2) as engine:
        waiting = engine._lifecycle.core.table.waiting
        # Six pairs of about 20 steps each: the last begins when five pairs have ended.
        first = [asyncio.ensure_future(engine.generate([1] * 10, params)) for _ in range(8)]
        await asyncio.gather(*first)
        later = [engine.stream([1] * 10, params) for _ in range(12)]
        estimate = waiting.seconds_for(waiting.tokens)
        last = later[-1]
        for stream in later:
            async for _ in stream:
                pass
        waited = last.timings.first_token_seconds
        assert estimate is not None
        assert waited is not None
        assert waited / 4 < estimate < waited * 4
