"""Edits of a request's logits, and their lack of effect on all other requests."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from aioserve import (
    Engine,
    InvalidSamplingError,
    RequestFailedError,
    SamplingParams,
    StructuredOutput,
)
from aioserve.engine import grammar_guides
from aioserve.engine.params_intake import no_token_left
from aioserve.testing.random_model import write_random_model
from tests.engine.idle import all_given_back
from tests.engine.test_structured_output import TINY
from tests.waits import LIMIT_SECONDS, until

PROMPT = [(7 * i) % 250 for i in range(64)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose config names an end-of-sequence id without logits."""
    path = tmp_path_factory.mktemp("model")
    config = {**TINY, "eos_token_id": [270, 100_000]}
    return str(write_random_model(path, config, seed=3, dtype="float32"))


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (
            SamplingParams(min_tokens=4, allowed_token_ids=[270]),
            "allowed_token_ids and min_tokens",
        ),
        (
            SamplingParams(
                structured_output=StructuredOutput(choice=["no"]), min_tokens=40, max_tokens=50
            ),
            "structured_output and min_tokens",
        ),
        (
            SamplingParams(
                structured_output=StructuredOutput(choice=["no"]), allowed_token_ids=[1, 2, 3]
            ),
            "structured_output and allowed_token_ids",
        ),
    ],
    ids=["allowed and min_tokens", "form and min_tokens", "form and allowed"],
)
@pytest.mark.asyncio
async def test_a_request_that_leaves_itself_nothing_ends_alone_and_the_cache_stays(
    tiny: str, params: SamplingParams, named: str
) -> None:
    async with Engine(tiny, num_pages=256) as engine:
        expected = await engine.generate(PROMPT, GREEDY)
        failing = engine.generate(PROMPT, params)
        neighbour = engine.generate([*PROMPT, 5], GREEDY)
        failed, other = await asyncio.gather(failing, neighbour, return_exceptions=True)
        assert isinstance(failed, InvalidSamplingError)
        assert str(failed).startswith(f"{named} must leave a token to draw")
        assert failed.argument == named.split(" and ")[0]
        assert not isinstance(other, BaseException)
        again = await engine.generate(PROMPT, GREEDY)

    assert again.token_ids == expected.token_ids
    assert again.usage.cached_tokens > 32


def test_parameters_that_forbid_no_token_are_not_to_blame() -> None:
    """No parameter is blamed if the model's own logits forbid all tokens."""
    params = SamplingParams(presence_penalty=1, logit_bias={1: -100}, seed=1, stop="x")
    assert no_token_left(params) is None


@pytest.mark.asyncio
async def test_ids_that_the_model_has_no_logits_of_end_nothing(tiny: str) -> None:
    form = StructuredOutput(choice=["yes", "no"])
    async with Engine(tiny) as engine:
        least, word, formed = await asyncio.gather(
            engine.generate(PROMPT, SamplingParams(min_tokens=6, max_tokens=8)),
            engine.generate(PROMPT, SamplingParams(bad_words=["?299"], max_tokens=4)),
            engine.generate(PROMPT, SamplingParams(structured_output=form)),
        )
    assert len(least.token_ids) >= 6
    assert word.token_ids
    assert formed.token_ids[-1] == 270


@pytest.mark.asyncio
async def test_what_is_forced_is_what_the_other_parameters_allow(tiny: str) -> None:
    """Answers or errors are the same with and without jumps."""
    text = "yes sir, it is"
    every = [
        {"allowed_token_ids": sorted({*text.encode(), 270})},
        {"allowed_token_ids": [text.encode()[0], 270]},
        {"logit_bias": {text.encode()[3]: -100}},
        {"min_tokens": 3},
    ]
    found: list[list[Any]] = []
    for jump_forward in (True, False):
        async with Engine(tiny, jump_forward=jump_forward) as engine:
            answers = await asyncio.gather(
                *(
                    engine.generate(
                        [1, 2],
                        SamplingParams(structured_output=StructuredOutput(choice=[text]), **one),
                    )
                    for one in every
                ),
                return_exceptions=True,
            )
            found.append([getattr(answer, "token_ids", type(answer)) for answer in answers])
    assert found[0] == found[1]
    assert found[0][1] is InvalidSamplingError


@pytest.mark.asyncio
async def test_what_is_forced_fills_no_mailbox_of_a_slow_reader(tiny: str) -> None:
    text = "".join(chr(97 + i * i % 26) for i in range(400))
    params = SamplingParams(structured_output=StructuredOutput(choice=[text]))
    async with Engine(tiny, max_buffered_tokens=8, num_pages=64) as engine:
        stream = engine.stream([1, 2], params)
        await stream.started()
        await until(lambda: stream.usage.completion_tokens >= 8)
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert 8 <= stream.usage.completion_tokens <= 8 + grammar_guides.MAX_JUMP + 2
        tokens = [token async for token in stream]
    assert bytes(token.id for token in tokens[:-1]).decode() == text


@pytest.mark.asyncio
async def test_health_shows_that_a_form_is_not_followed_any_more(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, after = threading.Event(), grammar_guides._after

    def stuck(*step: Any) -> grammar_guides.Guide:
        go_on.wait(LIMIT_SECONDS)
        return after(*step)

    monkeypatch.setattr(grammar_guides, "_after", stuck)
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    params = SamplingParams(structured_output=StructuredOutput(json_schema=schema))
    async with Engine(tiny) as engine:
        answer = asyncio.ensure_future(engine.generate([1, 2], params))
        try:
            await until(lambda: engine.stats().step_age_seconds > 0.1)
        finally:
            go_on.set()
        await answer
        assert await all_given_back(engine)
        assert engine.stats().step_age_seconds == 0


@pytest.mark.asyncio
async def test_a_form_that_breaks_in_the_middle_breaks_its_own_answer(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aioserve.grammars.matcher import GrammarMatcher

    accept, calls = GrammarMatcher.accept, []

    def breaking(self: GrammarMatcher, token_id: int) -> bool:
        calls.append(self)
        if self is calls[0]:
            raise RuntimeError("planted")
        return accept(self, token_id)

    monkeypatch.setattr(GrammarMatcher, "accept", breaking)
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    params = SamplingParams(structured_output=StructuredOutput(json_schema=schema))
    async with Engine(tiny) as engine:
        answers = await asyncio.gather(
            *(engine.generate([1, 2, i], params) for i in range(4)), return_exceptions=True
        )
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    assert [type(error) for error in failed] == [RequestFailedError]
    for answer in answers:
        if not isinstance(answer, BaseException):
            assert len(json.loads(bytes(answer.token_ids[:-1]))) == 3


@pytest.mark.asyncio
async def test_without_a_thread_for_forms_their_requests_fail_alone(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(grammar_guides, "StepThread", refused)
    form = SamplingParams(structured_output=StructuredOutput(choice=["a"]))
    async with Engine(tiny) as engine:
        answers = await asyncio.gather(
            engine.generate([1], form), engine.generate([1], GREEDY), return_exceptions=True
        )
        assert isinstance(answers[0], RequestFailedError)
        assert not isinstance(answers[1], BaseException)
        assert (await engine.generate([1], GREEDY)).token_ids == answers[1].token_ids
