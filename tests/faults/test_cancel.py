"""Cancellation at every moment of a request's life, in every way there is."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio
import pytest

from aioserve import Engine, SamplingParams, SchedulingPolicy
from aioserve.steps.plan import StepPlan
from aioserve.testing import FakeModel, StreamChecker, run_simulated
from tests.faults.harness import SEEDS, STEP_SECONDS, params, run, until, watched

IDS = list(range(200))
TEXT = "encoded off the loop " * 25
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
Moment = Callable[[], Awaitable[None]]


def model() -> FakeModel:
    return FakeModel(num_pages=64, max_model_len=640, step_seconds=lambda plan: STEP_SECONDS)


def phase_of(engine: Engine) -> str:
    """Return the phase of the request "victim"."""
    live = engine._lifecycle
    for request in live.core.table:
        if request.request_id == "victim" and request.state.value in ("encoding", "queued"):
            return request.state.value
    for request in engine.dump()["sequences"]:
        if request["request_id"] != "victim":
            continue
        if request["phase"] == "waiting":
            return "waiting"
        if request["computed_tokens"] < request["prompt_tokens"]:
            return "prefilling"
        last = request["known_tokens"] == request["max_length"] - 1
        return "finishing" if last else "decoding"
    return "gone"


async def cancel_task(checker: StreamChecker, moment: Moment, **request) -> None:
    task = asyncio.create_task(checker.read(request_id="victim", **request))
    await moment()
    task.cancel()
    await asyncio.wait([task])


async def cancel_twice(checker: StreamChecker, moment: Moment, **request) -> None:
    task = asyncio.create_task(checker.read(request_id="victim", **request))
    await moment()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def cancel_scope(checker: StreamChecker, moment: Moment, *, prompt, params) -> None:
    async def read() -> None:
        await checker.read(prompt, params, request_id="victim")

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await moment()
        group.cancel_scope.cancel()


async def cancel_generate(checker: StreamChecker, moment: Moment, *, prompt, params) -> None:
    generating = checker.engine.generate(prompt, params, request_id="victim")
    task = asyncio.create_task(generating)
    await moment()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def close_stream(checker: StreamChecker, moment: Moment, *, prompt, params) -> None:
    stream = checker.engine.stream(prompt, params, request_id="victim")
    await moment()
    stream.close()
    stream.close()
    await stream.aclose()
    assert [token async for token in stream] == []


async def drop_stream(checker: StreamChecker, moment: Moment, *, prompt, params) -> None:
    held = [checker.engine.stream(prompt, params, request_id="victim")]
    await moment()
    held.clear()


async def drop_generator(checker: StreamChecker, moment: Moment, *, prompt, params) -> None:
    """The caller wraps the stream in an async generator and drops that half-read."""

    async def tokens():
        async for token in checker.engine.stream(prompt, params, request_id="victim"):
            yield token

    generator = tokens()
    reading = asyncio.create_task(anext(generator, None))
    await moment()
    reading.cancel()
    await asyncio.wait([reading])
    del generator, reading
    gc.collect(1)


WAYS = [
    (cancel_task, 1),
    (cancel_task, 2),
    (cancel_twice, 1),
    (cancel_scope, 1),
    (cancel_generate, 1),
    (close_stream, 1),
    (close_stream, 2),
    (drop_stream, 1),
    (drop_generator, 1),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("prompt", "first"), [(IDS, "queued"), (TEXT, "encoding")])
@pytest.mark.parametrize(("way", "n"), WAYS)
def test_a_request_that_is_left_at_any_moment_frees_all_it_held(way, prompt, first, n):
    phases = set()

    async def main(steps: int) -> None:
        async with watched(model(), **OPTIONS) as checker:
            engine = checker.engine

            async def moment() -> None:
                if steps >= 0:
                    await asyncio.sleep(steps * STEP_SECONDS)
                phases.add(phase_of(engine))

            others = [asyncio.create_task(checker.read([1, i], params(6))) for i in range(2)]
            await until(lambda: engine.stats().num_running == 2)
            await way(checker, moment, prompt=prompt, params=params(8, n=n))
            left_after = engine.stats().steps_total
            await until(lambda: phase_of(engine) == "gone")
            assert engine.stats().steps_total <= left_after + 2
            await asyncio.gather(*others)
            assert await checker.read(IDS, params(8), request_id="victim") == "length"

    for steps in range(-1, 36):
        run(partial(main, steps), seed=WAYS.index((way, n)))
    expected = {"waiting", "prefilling", "decoding", "finishing", "gone"}
    if way in (close_stream, drop_stream):
        expected.add(first)
    if way is drop_generator:  # the generator closes the stream when its first token is there
        expected = {"waiting", "prefilling"}
    assert expected <= phases


@pytest.mark.parametrize("seed", SEEDS)
def test_cancelling_while_submitting_leaves_nothing(seed):
    """The scope is cancelled before it is entered, or as soon as it is."""

    async def main() -> None:
        async with watched(model()) as checker:
            engine = checker.engine
            for prompt in (IDS, TEXT):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await engine.generate(prompt, params())
                assert scope.cancelled_caught
                with anyio.move_on_after(0) as scope:
                    async with engine.stream(prompt, params()) as stream:
                        await anext(stream)
                assert scope.cancelled_caught
            await engine.drain()
            # A step or two may have begun before the cancellation came.
            assert engine.stats().tokens_generated_total <= 2 * 4

    run(main, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_cancelling_one_of_many_by_its_exact_id_leaves_the_others(seed):
    async def main() -> None:
        async with watched() as checker:
            reads = {
                name: asyncio.create_task(checker.read([1], params(), request_id=name))
                for name in ("r1", "r10", "r", "r1 ", "R1")
            }
            await asyncio.sleep(5 * STEP_SECONDS)
            reads.pop("r1").cancel()
            assert await asyncio.gather(*reads.values()) == ["length"] * 4

    run(main, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_policy_that_closes_streams_from_within_is_harmless(seed):
    """A policy's method closes streams in the middle of a plan or a commit."""
    streams = []

    class Closing(SchedulingPolicy):
        calls = 0

        def close_one(self) -> None:
            self.calls += 1
            if streams and self.calls % 3 == 0:
                streams.pop().close()

        def order(self, waiting, view):
            self.close_one()
            return waiting

        def chunk(self, request, budget_tokens, view):
            self.close_one()
            return budget_tokens

        def step_finished(self, step, tokens):
            self.close_one()

        def finished(self, requests):
            self.close_one()

    async def main() -> None:
        async with watched(policy=Closing(), max_num_seqs=3) as checker:
            streams.extend(checker.engine.stream([i] * 30, params()) for i in range(12))
            assert await checker.read([7], params()) == "length"
            await until(lambda: not streams)

    run(main, seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_dropped_with_its_loop_says_nothing(seed):
    """A stream may outlive its loop; dropping it then is no error."""
    kept = []

    async def main() -> None:
        async with Engine(model(), policy=SchedulingPolicy()) as engine:
            kept.append(engine.stream(IDS, params()))
            await anext(kept[0])

    run_simulated(main, seed=seed)
    kept[0].close()
    kept.clear()
    gc.collect()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_no_step_is_planned_for_a_request_that_was_left_and_those_in_flight_free_it(seed, overlap):
    async def main() -> None:
        launched: list[StepPlan] = []

        def step_seconds(plan: StepPlan) -> float:
            launched.append(plan)
            return 0.01

        options = {"overlap": overlap, "prefix_caching": False, "page_size": 4}
        async with Engine(FakeModel(step_seconds=step_seconds), **options) as engine:
            other = engine.stream([9], SamplingParams(max_tokens=100, seed=1))
            stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=100, seed=2))
            for _ in range(random.Random(seed).randint(1, 20)):
                await anext(stream)
            await asyncio.sleep(0.01 * random.Random(seed).random())
            (left,) = {
                sequence["sequence_id"]
                for sequence in engine.dump()["sequences"]
                if sequence["request_id"] == stream.request_id
            }
            stream.close()
            before = len(launched)
            in_flight = before - engine.stats().steps_total
            assert in_flight <= 1 + overlap
            await until(lambda: engine.stats().steps_total >= before)
            stats, pages = engine.stats(), engine.dump()["sequences"][0]["pages"]
            assert (stats.pages_held_by_requests, stats.pages_fenced) == (len(pages), 0)
            await anext(other)
            await asyncio.sleep(0.1)
            assert len(launched) > before + 2
            later = {item.sequence_id for plan in launched[before:] for item in plan.items}
            assert left not in later

    run(main, seed)
