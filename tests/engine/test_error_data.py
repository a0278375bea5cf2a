"""Data that the errors of an engine carry for programs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioserve import (
    DeadlineExceededError,
    DuplicateRequestError,
    Engine,
    EngineClosedError,
    EngineFailedError,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    Observer,
    PromptTooLongError,
    QueueFullError,
    Refusal,
    RequestRejectedError,
    SamplingParams,
    SchedulingPolicy,
    StepError,
    StreamStalledError,
    Verdict,
    hookimpl,
)
from aioserve.testing import FakeModel, run_simulated

PROMPT = [5, 6, 7, 8]
SHORT = SamplingParams(max_tokens=10)
LONG = SamplingParams(max_tokens=10_000)


def an_engine(**options: Any) -> Engine:
    model = FakeModel(num_pages=64, max_model_len=256, step_seconds=lambda plan: 0.01)
    return Engine(model, **options)


def test_the_end_of_a_prompt_that_is_too_long_is_told_in_tokens_or_characters():
    async def main():
        async with an_engine() as engine:
            with pytest.raises(PromptTooLongError) as caught:
                engine.stream([1] * 300)
            assert (caught.value.value, caught.value.limit) == (300, 255)
            assert caught.value.unit == "tokens"
            longest = [1] * (caught.value.limit or 0)
            assert len((await engine.generate(longest, SHORT)).token_ids) == 1
            with pytest.raises(PromptTooLongError) as caught:
                engine.stream("x" * 40_000)
            assert (caught.value.value, caught.value.limit) == (40_000, 32_768)
            assert caught.value.unit == "characters"

    run_simulated(main)


@pytest.mark.parametrize(
    ("kind", "argument", "value", "limit", "request_"),
    [
        (InvalidPromptError, "prompt", 999_999, 256, {"prompt": [1, 999_999]}),
        (InvalidPromptError, "prompt", None, None, {"prompt": []}),
        (InvalidRequestError, "tenant", 0, 1, {"tenant": ""}),
        (InvalidRequestError, "ttft_target_seconds", -1, 0, {"ttft_target_seconds": -1}),
        (InvalidSamplingError, "params", "{'n': 2}", None, {"params": {"n": 2}}),
        (InvalidSamplingError, "n", 500, 256, {"params": SamplingParams(n=500)}),
        (
            InvalidSamplingError,
            "stop_token_ids",
            999_999,
            256,
            {"params": SamplingParams(stop_token_ids=[999_999])},
        ),
    ],
)
def test_a_request_that_cannot_be_served_names_argument_value_and_limit(
    kind, argument, value, limit, request_
):
    async def main():
        async with an_engine() as engine:
            with pytest.raises(kind) as caught:
                engine.stream(**{"prompt": PROMPT} | request_)
            error = caught.value
            assert (error.argument, error.value, error.limit) == (argument, value, limit)

    run_simulated(main)


@pytest.mark.parametrize(
    ("argument", "value", "limit", "fields"),
    [
        ("max_tokens", 0, 1, {"max_tokens": 0}),
        ("max_tokens", "a", None, {"max_tokens": "a"}),
        ("temperature", 101, 100.0, {"temperature": 101}),
        ("top_p", 0.0, 0.0, {"top_p": 0.0}),
        ("seed", -1, 0, {"seed": -1}),
        ("seed", 2**64, 2**64 - 1, {"seed": 2**64}),
        ("stop", 17, 16, {"stop": ["a"] * 17}),
        ("stop", 300, 256, {"stop": "a" * 300}),
        ("stop", 7, None, {"stop": [7]}),
        ("stop_token_ids", "abc", None, {"stop_token_ids": "abc"}),
        ("ignore_eos", 1, None, {"ignore_eos": 1}),
    ],
)
def test_a_sampling_parameter_outside_its_range_is_named_with_the_bound(
    argument, value, limit, fields
):
    with pytest.raises(InvalidSamplingError) as caught:
        SamplingParams(**fields)
    error = caught.value
    assert (error.argument, error.value, error.limit) == (argument, value, limit)


def test_a_full_queue_says_how_many_wait_and_for_about_how_long():
    async def main():
        async with an_engine(max_num_seqs=1, max_waiting=2) as engine:
            streams = [engine.stream(PROMPT, LONG) for _ in range(2)]
            with pytest.raises(QueueFullError) as caught:
                engine.stream(PROMPT)
            assert (caught.value.value, caught.value.limit) == (2, 2)
            assert caught.value.retry_after_seconds is None
            await anext(streams[0])
            streams.append(engine.stream(PROMPT, LONG))
            with pytest.raises(QueueFullError) as caught:
                engine.stream(PROMPT)
            assert 0 < (caught.value.retry_after_seconds or 0) < 60

    run_simulated(main)


def test_a_request_id_in_use_is_told():
    async def main():
        async with an_engine() as engine:
            stream = engine.stream(PROMPT, LONG, request_id="mine")
            with pytest.raises(DuplicateRequestError) as caught:
                engine.stream(PROMPT, request_id="mine")
            assert (caught.value.argument, caught.value.value) == ("request_id", "mine")
            stream.close()

    run_simulated(main)


def test_a_closed_engine_says_where_in_its_life_it_is():
    async def main():
        engine = an_engine()
        with pytest.raises(EngineClosedError) as caught:
            engine.stream(PROMPT)
        assert caught.value.state == "new"
        async with engine:
            running = engine.stream(PROMPT, LONG)
            draining = asyncio.create_task(engine.drain(1.0))
            await asyncio.sleep(0.1)
            with pytest.raises(EngineClosedError) as caught:
                engine.stream(PROMPT)
            assert caught.value.state == "draining"
            await draining
            with pytest.raises(EngineClosedError) as caught:
                async for _ in running:
                    pass
            assert caught.value.state == "draining"
        with pytest.raises(EngineClosedError) as caught:
            engine.stream(PROMPT)
        assert caught.value.state == "closed"
        assert type(caught.value) is EngineClosedError

    run_simulated(main)


@pytest.mark.asyncio
async def test_an_engine_that_broke_is_told_from_one_that_was_closed(monkeypatch):
    async with an_engine() as engine:
        streams = [engine.stream(PROMPT, LONG) for _ in range(2)]
        await anext(streams[0])
        monkeypatch.setattr(engine._lifecycle.scheduler, "plan", lambda now: 1 / 0)
        errors = []
        for stream in streams:
            with pytest.raises(EngineFailedError) as caught:
                async for _ in stream:
                    pass
            errors.append(caught.value)
        with pytest.raises(EngineFailedError) as caught:
            engine.stream(PROMPT)
        errors.append(caught.value)
    assert len(set(map(id, errors))) == 3
    for error in errors:
        assert error.state == "failed"
        assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_refusal_of_the_policy_carries_who_refused_why_and_when_to_try_again():
    class Strict(SchedulingPolicy):
        def admit(self, request, view):
            if request.tenant is None:
                return Verdict.NOW
            return Verdict.NEVER if request.tenant == "x" else Refusal("no gold left", 2.5)

    async def main():
        async with an_engine(policy=Strict()) as engine:
            found = []
            for tenant in ("gold", "x"):
                with pytest.raises(RequestRejectedError) as caught:
                    await engine.generate(PROMPT, SHORT, tenant=tenant)
                error = caught.value
                found.append((error.refused_by, error.reason, error.retry_after_seconds))
            assert found == [("Strict", "no gold left", 2.5), ("Strict", None, None)]

    run_simulated(main)


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_is_dropped_ends_once_behind_its_tokens_and_others_go_on(n):
    class Dropping(SchedulingPolicy):
        def drop(self, request, view):
            late = request.tenant == "gold" and request.generated_tokens >= 4
            return Refusal("too long", 2.5) if late else None

    class Witness(Observer):
        def finished(self, requests):
            ended.extend((one.tenant, one.finish_reason, one.error) for one in requests)

    async def read(stream):
        tokens = []
        try:
            async for token in stream:
                tokens.append(token)
        except RequestRejectedError as error:
            return tokens, error
        raise AssertionError("nobody dropped it")

    async def main():
        async with an_engine(policy=Dropping()) as engine:
            engine.observe(Witness())
            params = SamplingParams(max_tokens=40, n=n)
            other = asyncio.create_task(engine.generate(PROMPT, params, tenant="tin"))
            tokens, error = await read(engine.stream(PROMPT, params, tenant="gold"))
            assert {token.sample for token in tokens} == set(range(n))
            assert 4 * n <= len(tokens) < 6 * n
            assert (error.refused_by, error.reason, error.retry_after_seconds) == (
                "Dropping",
                "too long",
                2.5,
            )
            await other
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.pages_held_by_requests == 0

    ended: list[tuple] = []
    run_simulated(main)
    assert [(tenant, reason.value) for tenant, reason, _ in ended] == [
        ("gold", "error"),
        ("tin", "length"),
    ]
    assert "too long" in ended[0][2]


class Closed:
    """A plugin that refuses everything."""

    @hookimpl
    def aioserve_admit(self, request):
        return Refusal("closed on Sundays", retry_after_seconds=86_400)


def test_a_refusal_of_a_plugin_carries_who_refused_why_and_when_to_try_again():
    async def main():
        async with an_engine(plugins=[Closed()]) as engine:
            with pytest.raises(RequestRejectedError) as caught:
                await engine.generate(PROMPT, SHORT)
            error = caught.value
            assert error.refused_by == "plugin Closed (given to the engine)"
            assert (error.reason, error.retry_after_seconds) == ("closed on Sundays", 86_400)

    run_simulated(main)


@pytest.mark.asyncio
async def test_a_failed_step_is_named_by_its_number():
    def disturb(index, plan, outcome):
        if index == 3:
            raise OSError("planted")
        return outcome

    async with Engine(FakeModel(num_pages=64, max_model_len=256, disturb=disturb)) as engine:
        with pytest.raises(StepError) as caught:
            await engine.generate(PROMPT, SHORT)
    assert caught.value.step == 3
    assert isinstance(caught.value.__cause__, OSError)


def test_a_stalled_stream_says_how_long_the_engine_waited():
    async def main():
        async with an_engine(max_buffered_tokens=4, stall_timeout_seconds=2.0) as engine:
            stream = engine.stream(PROMPT, LONG)
            await asyncio.sleep(10.0)
            with pytest.raises(StreamStalledError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.timeout_seconds == 2.0

    run_simulated(main)


def test_a_request_that_is_late_says_how_long_it_was_given():
    async def main():
        async with an_engine() as engine:
            with pytest.raises(DeadlineExceededError, match=r"'x'.* 1\.5 s .*deadline_") as caught:
                await engine.generate(PROMPT, LONG, request_id="x", deadline_seconds=1.5)
            assert caught.value.deadline_seconds == 1.5

    run_simulated(main)
