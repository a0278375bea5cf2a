"""`StreamChecker` believes no stream: wrong tokens, missing ends and second ends are noted."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from aioserve import (
    Engine,
    FinishReason,
    Logprobs,
    SamplingParams,
    SchedulingPolicy,
    StepError,
    Token,
    TokenStream,
)
from aioserve.engine.mailbox import Mailbox, ReaderEvent
from aioserve.testing import FakeModel, Fault, Faults, StreamChecker, run_simulated

PARAMS = SamplingParams(max_tokens=8, seed=1, n=2, logprobs=0, prompt_logprobs=0)


def checker_of(*, faults=None, **reading) -> StreamChecker:
    """A checker that has read one request."""

    async def main() -> StreamChecker:
        model = FakeModel(step_seconds=lambda plan: 0.01, faults=faults or Faults())
        async with Engine(model, policy=SchedulingPolicy()) as engine:
            checker = StreamChecker(engine)
            await checker.read([1, 2, 3], PARAMS, **reading)
        return checker

    return run_simulated(main)


def test_a_stream_that_keeps_its_contract_passes():
    checker = checker_of()
    checker.check()
    assert checker.ends == {"length": 1}


def test_how_requests_end_is_counted():
    assert checker_of(leave_after=3).ends == {"left": 1}
    assert checker_of(faults=Faults(at={2: Fault.STEP_RAISES})).ends == {"StepError": 1}
    assert checker_of(request_id="").ends == {"InvalidRequestError": 1}


def test_a_wrong_token_is_noted(monkeypatch):
    put = Mailbox.put
    changed = lambda it, token: put(it, msgspec.structs.replace(token, id=7))  # noqa: E731
    monkeypatch.setattr(Mailbox, "put", changed)
    with pytest.raises(AssertionError, match="sample 0 has wrong tokens"):
        checker_of().check()


@pytest.mark.parametrize("logprobs", [None, Logprobs(-0.123)])
def test_a_wrong_log_probability_is_noted(monkeypatch, logprobs):
    put = Mailbox.put

    def changed(it: Mailbox, token: Token) -> None:
        put(it, msgspec.structs.replace(token, logprobs=logprobs) if token.index == 3 else token)

    monkeypatch.setattr(Mailbox, "put", changed)
    with pytest.raises(AssertionError, match="sample 0 has wrong logprobs"):
        checker_of().check()


def test_a_lost_score_of_the_prompt_is_noted(monkeypatch):
    scores = TokenStream.prompt_logprobs.fget
    assert scores is not None
    monkeypatch.setattr(TokenStream, "prompt_logprobs", property(lambda it: scores(it)[:-1]))
    with pytest.raises(AssertionError, match="has wrong prompt_logprobs"):
        checker_of().check()


def test_a_lost_token_is_noted(monkeypatch):
    put = Mailbox.put

    def losing(it: Mailbox, token: Token) -> None:
        if (token.index, token.sample) != (7, 1):
            put(it, token)

    monkeypatch.setattr(Mailbox, "put", losing)
    with pytest.raises(AssertionError, match="sample 1 has 7 of 8 tokens"):
        checker_of().check()


def test_a_token_after_the_end_is_noted(monkeypatch):
    def leaving_some(it: Mailbox) -> None:
        tell = it._tell
        if it.finish(FinishReason.ABORT) and tell is not None:
            tell(ReaderEvent.LEFT)

    monkeypatch.setattr(Mailbox, "abort", leaving_some)
    with pytest.raises(AssertionError, match=r"ended as 'left' and then came \['token'"):
        checker_of(leave_after=1, pause_seconds=lambda count: 1.0).check()


def test_another_end_after_an_error_is_noted(monkeypatch):
    raise_error = Mailbox.raise_error

    def raising_once(it: Mailbox) -> None:
        try:
            raise_error(it)
        except StepError:
            it.error = None
            raise

    monkeypatch.setattr(Mailbox, "raise_error", raising_once)
    with pytest.raises(AssertionError, match=r"'StepError' and then came \['end'"):
        checker_of(faults=Faults(at={2: Fault.STEP_RAISES})).check()


def test_an_end_that_never_comes_is_noted():
    async def main() -> StreamChecker:
        async with Engine(FakeModel(), policy=SchedulingPolicy()) as engine:
            checker = StreamChecker(engine)
            pause = 1e6
            reading = checker.read([1], PARAMS, pause_seconds=lambda count: pause)
            task = asyncio.create_task(reading)
            await asyncio.sleep(1)
            with pytest.raises(AssertionError, match="1 requests have no end"):
                checker.check()
            task.cancel()
            await asyncio.wait([task])
            return checker

    checker = run_simulated(main)
    checker.check()
    assert checker.ends == {"cancelled": 1}
