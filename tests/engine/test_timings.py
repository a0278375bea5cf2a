"""Times that a request reports, exact because the clock is virtual."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest
import uvloop

from aioserve import (
    AioserveError,
    Engine,
    PromptTooLongError,
    RequestRejectedError,
    SamplingParams,
    SchedulingPolicy,
    StepError,
    Timings,
    TokenStream,
    Verdict,
)
from aioserve.testing import FakeModel, Fault, Faults, random_step_seconds, run_simulated
from tests.faults.harness import silence

STEP_SECONDS = 0.5
PROMPT = [1, 2, 3]


def engine(**options) -> Engine:
    model = FakeModel(num_pages=256, step_seconds=lambda plan: STEP_SECONDS)
    return Engine(model, **options)


def answer(max_tokens: int = 5, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, n=n)


async def read(stream: TokenStream) -> None:
    async for _ in stream:
        pass


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-9)


def test_a_request_alone_has_the_device_to_itself():
    async def main() -> None:
        async with engine() as it:
            timings = (await it.generate(PROMPT, answer())).timings
            assert (timings.encoding_seconds, timings.queued_seconds) == (near(0.0), near(0.0))
            assert timings.prefill_seconds == timings.first_token_seconds == near(0.5)
            assert timings.total_seconds == timings.device_seconds == near(2.5)
            assert timings.preemptions == 0
            gaps = timings.inter_token_latency
            assert gaps is not None
            assert (gaps.count, gaps.mean_seconds, gaps.max_seconds) == (4, near(0.5), near(0.5))
            assert gaps.p50_seconds == gaps.p99_seconds == pytest.approx(0.5, rel=0.01)

    run_simulated(main)


def test_a_request_that_waits_for_another_is_queued_until_its_first_step_is_planned():
    async def main() -> None:
        async with engine(max_num_seqs=1, overlap=False) as it:
            streams = [it.stream(PROMPT, answer()), it.stream(PROMPT, answer(2))]
            await asyncio.gather(*map(read, streams))
            first, second = (stream.timings for stream in streams)
            assert (first.queued_seconds, first.device_seconds) == (near(0.0), near(2.5))
            assert second.encoding_seconds == near(0.0)
            assert second.queued_seconds == near(2.5)
            assert second.first_token_seconds == near(3.0)
            assert second.prefill_seconds == near(0.5)
            assert second.device_seconds == near(1.0)

    run_simulated(main)


def test_the_time_of_a_step_is_shared_out_by_tokens():
    async def main() -> None:
        async with engine(overlap=False) as it:
            streams = [it.stream([1], answer(2)), it.stream([2] * 9, answer(2))]
            await asyncio.gather(*map(read, streams))
            short, long = (stream.timings.device_seconds for stream in streams)
            # A step of 1 and 9 tokens, then one of 1 and 1.
            assert short == near(0.05 + 0.25)
            assert long == near(0.45 + 0.25)
            assert short + long == near(it.stats().step_seconds_total)

    run_simulated(main)


def test_samples_have_one_prefill_and_gaps_of_their_own():
    async def main() -> None:
        async with engine(overlap=False) as it:
            timings = (await it.generate(PROMPT, answer(5, n=3))).timings
            assert timings.completion_tokens == 15
            assert timings.first_token_seconds == near(0.5)
            assert timings.device_seconds == near(2.5)
            gaps = timings.inter_token_latency
            assert gaps is not None
            assert (gaps.count, gaps.mean_seconds, gaps.max_seconds) == (12, near(0.5), near(0.5))

    run_simulated(main)


def test_cached_tokens_are_those_found_when_the_request_started():
    prompt = [*range(100)]

    async def main() -> None:
        async with engine(page_size=16) as it:
            usage = (await it.generate(prompt, answer())).usage
            assert (usage.prompt_tokens, usage.cached_tokens, usage.total_tokens) == (100, 0, 105)
            stream = it.stream([*prompt, 7], answer())
            assert stream.usage.cached_tokens == 0
            await stream.started()
            before = it.stats().tokens_cached_total
            assert stream.usage.cached_tokens == before == 96  # whole pages
            await read(stream)
            assert stream.usage.cached_tokens == 96

    run_simulated(main)


def test_a_preempted_request_says_so_and_counts_no_cached_tokens_for_its_return():
    async def main() -> None:
        model = FakeModel(num_pages=8, step_seconds=lambda plan: STEP_SECONDS)
        policy = SchedulingPolicy()
        async with Engine(model, policy=policy, page_size=4, output_reserve_tokens=0) as it:
            streams = [it.stream([i] * 9, answer(20)) for i in range(2)]
            await asyncio.gather(*map(read, streams))
            stats = it.stats()
            preemptions = [stream.timings.preemptions for stream in streams]
            assert sum(preemptions) == stats.preemptions_total > 0
            assert preemptions[0] == 0
            assert [stream.usage.cached_tokens for stream in streams] == [0, 0]
            gaps = streams[1].timings.inter_token_latency
            assert gaps is not None
            assert gaps.max_seconds > 1.0

    run_simulated(main)


def test_while_a_request_goes_on_its_timings_are_as_far_as_it_has_come():
    async def main() -> None:
        async with engine(max_num_seqs=1) as it:
            ahead, stream = it.stream(PROMPT, answer(2)), it.stream(PROMPT, answer())
            await asyncio.sleep(0.75)
            timings = stream.timings
            assert timings.total_seconds == near(0.75)
            assert timings.queued_seconds is timings.first_token_seconds is None
            assert timings.prefill_seconds is timings.inter_token_latency is None
            assert (timings.device_seconds, timings.completion_tokens) == (0.0, 0)
            await read(ahead)
            await stream.started()
            assert stream.timings.prefill_seconds is not None
            assert stream.timings.completion_tokens == 1
            await read(stream)
            done = stream.timings
            await asyncio.sleep(5)
            assert stream.timings is done or stream.timings == done

    run_simulated(main)


def test_a_step_that_ends_after_its_request_changes_nothing():
    async def main() -> None:
        async with engine() as it:
            stream = it.stream(PROMPT, answer(50))
            await stream.started()
            await asyncio.sleep(0.25)
            stream.close()
            await asyncio.sleep(5)
            assert it.stats().step_seconds_total > 0.75
            assert stream.timings.device_seconds == near(0.5)
            assert stream.timings.total_seconds == near(0.75)

    run_simulated(main)


def test_a_step_that_fails_is_time_of_the_device_too():
    async def main() -> None:
        faults = Faults(at={2: Fault.STEP_RAISES})
        model = FakeModel(step_seconds=lambda plan: STEP_SECONDS, faults=faults)
        async with Engine(model, overlap=False) as it:
            stream = it.stream(PROMPT, answer())
            with pytest.raises(StepError):
                await read(stream)
            assert stream.timings.device_seconds == near(1.5)
            assert stream.timings.completion_tokens == 2

    with silence():
        run_simulated(main)


class Refusing(SchedulingPolicy):
    def admit(self, request, view):
        return Verdict.NEVER


def test_a_request_that_never_started_was_never_planned():
    async def main() -> None:
        async with engine(policy=Refusing()) as it:
            stream = it.stream(PROMPT, answer())
            with pytest.raises(RequestRejectedError):
                await read(stream)
            assert stream.timings.encoding_seconds == near(0.0)
            assert stream.timings.queued_seconds is None
            too_long = it.stream("x" * 5000, answer())
            with pytest.raises(PromptTooLongError):
                await read(too_long)
            assert too_long.timings.encoding_seconds is None
            assert too_long.timings.queued_seconds is None

    run_simulated(main)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_the_times_of_all_requests_add_up(seed, overlap):
    """Covers scarce pages, samples, failing steps, and readers that leave, some of them slow."""
    source = random.Random(f"{seed} {overlap}")
    leaving = source.random() < 0.5
    rates = {Fault.STEP_RAISES: 0.02, Fault.LAUNCH_RAISES: 0.02, Fault.BAD_ROW: 0.02}
    model = FakeModel(
        num_pages=24,
        max_model_len=64,
        step_seconds=random_step_seconds(0.1, 0.3, seed=seed),
        faults=Faults(rates=rates, seed=seed),
    )

    async def client(it: Engine, done: list[TokenStream]) -> None:
        await asyncio.sleep(source.uniform(0, 5))
        prompt = [source.randint(0, 1)] * source.randint(1, 30)
        params = answer(source.randint(1, 20), n=source.choice([1, 1, 3]))
        stream = it.stream("ab" * 10 if source.random() < 0.3 else prompt, params)
        done.append(stream)
        until = source.randint(1, 10) if leaving and source.random() < 0.3 else 100
        try:
            async for token in stream:
                if source.random() < 0.05:
                    await asyncio.sleep(source.uniform(0, 3))
                if token.index >= until:
                    break
        except AioserveError:
            pass
        stream.close()

    async def main() -> None:
        done: list[TokenStream] = []
        async with Engine(
            model,
            policy=SchedulingPolicy(),
            overlap=overlap,
            page_size=4,
            output_reserve_tokens=0,
            max_buffered_tokens=8,
        ) as it:
            await asyncio.gather(*[client(it, done) for _ in range(20)])
            await it.drain()
            stats = it.stats()
        assert sum(s.timings.preemptions for s in done) == stats.preemptions_total
        charged = sum(s.timings.device_seconds for s in done)
        if overlap or leaving:  # steps in flight computed for requests that had ended
            assert 0.5 * stats.step_seconds_total < charged
            assert charged <= stats.step_seconds_total * (1 + 1e-9)
        else:
            assert charged == pytest.approx(stats.step_seconds_total)
        for stream in done:
            check(stream, stream.timings)

    with silence():
        run_simulated(main, seed=seed)


def check(stream: TokenStream, timings: Timings) -> None:
    usage, queued = stream.usage, timings.queued_seconds
    assert timings.completion_tokens == usage.completion_tokens
    assert usage.cached_tokens < usage.prompt_tokens
    if queued is not None:
        assert timings.encoding_seconds is not None
        assert 0 <= timings.encoding_seconds <= queued <= timings.total_seconds
    if timings.first_token_seconds is None:
        assert timings.prefill_seconds is timings.inter_token_latency is None
        return
    assert queued is not None
    assert timings.prefill_seconds is not None
    assert timings.prefill_seconds > 0
    assert queued + timings.prefill_seconds == pytest.approx(timings.first_token_seconds)
    assert timings.device_seconds > 0
    gaps = timings.inter_token_latency
    samples = len(stream.finish_reasons)
    assert timings.completion_tokens - samples <= (gaps.count if gaps else 0)
    if gaps is not None:
        assert gaps.count < timings.completion_tokens
        since_first = timings.total_seconds - timings.first_token_seconds
        assert gaps.p50_seconds <= gaps.p99_seconds <= gaps.max_seconds <= since_first + 1e-9
        if samples == 1:
            assert gaps.count * gaps.mean_seconds <= since_first + 1e-9


def test_times_on_uvloop_come_from_the_systems_clock(monkeypatch: pytest.MonkeyPatch):
    """uvloop's own clock has whole milliseconds: a fast answer would take no time."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks) * 100.0)

    async def main() -> None:
        async with Engine(FakeModel(num_pages=256)) as it:
            timings = (await it.generate(PROMPT, answer(4))).timings
        gaps = timings.inter_token_latency
        assert gaps is not None
        assert gaps.mean_seconds >= 100.0
        assert timings.prefill_seconds is not None
        assert timings.prefill_seconds >= 100.0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_a_slow_policy_is_named_on_uvloop_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """uvloop's own clock stands still within one iteration."""
    monkeypatch.setattr(time, "monotonic", itertools.count(0, 100.0).__next__)

    class Slow(SchedulingPolicy):
        def order(self, waiting, view):
            return waiting

    async def main() -> None:
        async with Engine(FakeModel(num_pages=256), policy=Slow()) as it:
            await it.generate(PROMPT, answer(1))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert "scheduling policy Slow is slow" in caplog.text
