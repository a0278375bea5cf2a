"""Deadlines that pass at every moment of a request's life."""

from __future__ import annotations

import asyncio
import random

import pytest

from aioserve import DeadlineExceededError, FinishReason, Token, TokenStream
from aioserve.testing import FakeModel
from tests.faults.harness import SEEDS, STEP_SECONDS, params, run, until, watched

IDS = list(range(200))
TEXT = "encoded off the loop " * 25


def model() -> FakeModel:
    return FakeModel(num_pages=64, max_model_len=640, step_seconds=lambda plan: STEP_SECONDS)


async def read_into(tokens: list[Token], stream: TokenStream) -> None:
    async for token in stream:
        tokens.append(token)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", [IDS, TEXT])
def test_a_request_whose_deadline_passes_at_any_moment_ends_then_and_frees_all_it_held(prompt, n):
    """Two others have the seats for 6 steps; then its prompt takes some, and its answer 8."""
    ends = set()

    async def main(steps: float) -> None:
        async with watched(model(), max_num_batched_tokens=64, max_num_seqs=2) as checker:
            engine = checker.engine
            others = [asyncio.create_task(checker.read([1, i], params(6))) for i in range(2)]
            await until(lambda: engine.stats().num_running == 2)
            began = asyncio.get_running_loop().time()
            deadline = steps * STEP_SECONDS
            end = await checker.read(
                prompt, params(8, n=n), request_id="late", deadline_seconds=deadline
            )
            ends.add(end)
            took = asyncio.get_running_loop().time() - began
            if end == "DeadlineExceededError":
                assert took == pytest.approx(deadline)
                assert await checker.read(IDS, params(8), request_id="late") == "length"
            else:
                assert took <= deadline
            await asyncio.gather(*others)

    for steps in (0.001, 0.5, *range(1, 24)):
        run(lambda steps=steps: main(steps), seed=0)
    assert ends == {"DeadlineExceededError", "length"}


def test_a_beam_search_whose_deadline_passes_at_any_moment_ends_then_and_frees_all_it_held():
    """Its prompt takes some steps, and then each token one."""
    ends: set[str] = set()

    async def main(steps: float) -> None:
        async with watched(model(), max_num_batched_tokens=64) as checker:
            engine, deadline = checker.engine, steps * STEP_SECONDS
            began = asyncio.get_running_loop().time()
            search = engine.beam_search(IDS, beam_width=3, max_tokens=8, deadline_seconds=deadline)
            (found,) = await asyncio.gather(search, return_exceptions=True)
            took = asyncio.get_running_loop().time() - began
            if isinstance(found, DeadlineExceededError):
                ends.add("late")
                assert found.deadline_seconds == deadline
                assert str(found).startswith(f"the beam search hadn't ended {deadline:g} s after")
                assert took == pytest.approx(deadline)
            else:
                ends.add("found")
                assert took <= deadline
                assert found == await engine.beam_search(IDS, beam_width=3, max_tokens=8)
            await until(lambda: not engine.dump()["sequences"])
            assert not engine.stats().pages_held_by_requests

    for steps in (0.001, 0.5, *range(1, 24)):
        run(lambda steps=steps: main(steps), seed=0)
    assert ends == {"late", "found"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_that_is_behind_gets_what_came_before_the_deadline(seed):
    async def main() -> None:
        async with watched(max_buffered_tokens=8, stall_timeout_seconds=60.0) as checker:
            stream = checker.engine.stream([1], params(100), deadline_seconds=5.0)
            await until(lambda: any(r["paused"] for r in checker.engine.dump()["sequences"]))
            await asyncio.sleep(5.0)
            assert stream.finish_reason is FinishReason.ABORT
            assert not checker.engine.dump()["sequences"]
            came = []
            with pytest.raises(DeadlineExceededError):
                await read_into(came, stream)
            assert 8 <= len(came) < 12
            with pytest.raises(DeadlineExceededError):
                await anext(stream)

    run(main, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_deadlines_of_requests_that_have_ended_or_left_end_nobody(seed):
    draw = random.Random(seed)

    async def main() -> None:
        async with watched(max_num_seqs=3) as checker:
            for _ in range(20):
                left = checker.read(
                    [1], params(20), leave_after=draw.randint(0, 9), deadline_seconds=1.0
                )
                assert await left == "left"
                ended = checker.read([2], params(5), request_id="again", deadline_seconds=1.0)
                assert await ended == "length"
            # Of the same id, and alive when the deadlines of those before it pass.
            assert await checker.read([3], params(400), request_id="again") == "length"

    run(main, seed)


def test_no_timer_is_left_of_a_request_that_has_ended(monkeypatch):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with watched() as checker:
            timers = []
            call_at = loop.call_at

            def noted(*args, **options):
                timers.append(call_at(*args, **options))
                return timers[-1]

            monkeypatch.setattr(loop, "call_at", noted)
            read = checker.read([2], params(1), deadline_seconds=1000.0)
            assert await read == "length"
            (deadline,) = [timer for timer in timers if timer.when() >= 1000.0]
            assert deadline.cancelled()

    run(main, 0)
