"""Embeddings and scores: their results, refusals, and that leaving frees everything."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from aioserve import (
    Engine,
    EngineClosedError,
    FinishReason,
    InvalidPromptError,
    InvalidRequestError,
    Observer,
    ObserverSpec,
    Pooling,
    PromptTooLongError,
    RequestFailedError,
    SamplingParams,
    StepError,
    hookimpl,
)
from aioserve.testing.fake_device import expected_hidden, expected_logprobs
from aioserve.testing.fake_model import FakeModel, expected_tokens
from tests.engine.idle import all_given_back

pytestmark = pytest.mark.asyncio

PROMPT = [1, 2, 3, 4, 5]
CONTINUATIONS = [[6], [7, 8, 9], list(range(20))]


POOLED: dict[Pooling, Any] = {
    "last": lambda states: states[-1],
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(axis=0),
}


def engine(disturb=lambda i, plan, outcome: outcome, **options: Any) -> Engine:
    model = FakeModel(num_pages=256, step_seconds=lambda plan: 0.001, disturb=disturb)
    return Engine(model, **options)


def scores_of(prompt: list[int], continuation: list[int]) -> list[float]:
    ids = [int(i) for i in (*prompt, *continuation)]
    return [one.logprob for one in expected_logprobs(ids, len(prompt))]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 2048])
async def test_pooling_takes_the_last_state_the_first_or_the_mean_of_all(overlap, chunk):
    prompts = [PROMPT, [9], [*PROMPT, *range(30)], PROMPT]
    async with engine(overlap=overlap, max_num_batched_tokens=chunk, page_size=2) as e:
        for pooling, pooled in POOLED.items():
            wanted = np.stack([pooled(expected_hidden(prompt)) for prompt in prompts])
            found = await e.embed(prompts, pooling=pooling, normalize=False)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, wanted.astype(np.float32))
            one = await e.embed(prompts[2], pooling=pooling)
            length = np.linalg.norm(wanted[2])
            np.testing.assert_array_equal(one, (wanted[2] / length).astype(np.float32))
        assert e.stats().tokens_generated_total == 0
        assert await all_given_back(e)


async def test_prompts_may_be_texts_ids_and_arrays_and_messages_are_one_prompt():
    long = "spam and eggs " * 17  # encoded on a thread
    async with engine() as e:
        ids = list(long.encode())
        found = await e.embed([long, ids, np.array(ids), tuple(ids)], pooling="mean")
        assert found.shape == (4, 2)
        assert (found == found[0]).all()
        assert (await e.embed(long, pooling="mean") == found[0]).all()
        with pytest.raises(InvalidPromptError, match="has no chat template"):
            await e.embed([{"role": "user", "content": "x"}])


async def test_a_score_is_of_the_two_encodings_one_behind_the_other():
    async with engine() as e:
        for prompt, continuation in [
            ("ab", "cd"),
            ("ab", list(b"cd")),
            (list(b"ab"), "cd"),
            ("ab" * 100, "cd" * 5),
            (np.array(list(b"ab")), np.array(list(b"cd"))),
        ]:
            score = await e.score(prompt, continuation, request_id="mine")
            before = prompt.encode() if isinstance(prompt, str) else prompt
            behind = continuation.encode() if isinstance(continuation, str) else continuation
            assert list(score.token_ids) == list(behind)
            wanted = scores_of(list(before), list(behind))
            assert [one.logprob for one in score.logprobs] == wanted
            assert score.logprob == math.fsum(wanted)
            assert score.request_id == "mine"
            assert score.usage.prompt_tokens == len(before) + len(behind)
            assert score.usage.completion_tokens == score.timings.completion_tokens == 0


async def test_several_continuations_compute_their_prompt_once():
    prompt = list(range(100))
    async with engine(page_size=4) as e:
        scores = await e.score_each(prompt, CONTINUATIONS, request_id="s")
        stats = e.stats()
        assert await e.score_each("a" * 60, ["b" * 40, "c"])  # on a thread
        assert await all_given_back(e)
    for index, (score, continuation) in enumerate(zip(scores, CONTINUATIONS, strict=True)):
        assert [one.logprob for one in score.logprobs] == scores_of(prompt, continuation)
        assert score.request_id == f"s-{index}"
    # For the others, the prompt's last token is computed again: it gives the first score.
    computed = len(prompt) + len(CONTINUATIONS) - 1 + sum(map(len, CONTINUATIONS))
    assert stats.tokens_prefilled_total == computed
    assert stats.tokens_generated_total == 0


async def test_observers_hear_of_them_as_of_requests_without_tokens():
    ended = []

    class Ears(Observer):
        def finished(self, requests):
            ended.extend(requests)

    class Plugin:
        @hookimpl
        def aioserve_observers(self):
            return [ObserverSpec("ears", Ears)]

    async with engine(plugins=[Plugin()]) as e:
        await e.embed([PROMPT, PROMPT], tenant="t", request_id="v")
        await e.score(PROMPT, [1], tenant="t")
    assert [s.request_id for s in ended[:2]] == ["v-0", "v-1"]
    assert {(s.tenant, s.finish_reason, s.completion_tokens) for s in ended} == {
        ("t", FinishReason.LENGTH, 0)
    }
    assert [s.prompt_tokens for s in ended] == [5, 5, 6]


REFUSED: dict[str, tuple[Any, type[Any], str, Any, Any]] = {
    "no continuation": (lambda e: e.score("a", ""), InvalidPromptError, "continuation", "", None),
    "no ids": (lambda e: e.score("a", []), InvalidPromptError, "continuation", None, None),
    "no prompt": (lambda e: e.score("", "a"), InvalidPromptError, "prompt", None, None),
    "an id too high": (
        lambda e: e.score("a", [5, 256]),
        InvalidPromptError,
        "continuation",
        256,
        256,
    ),
    "messages": (
        lambda e: e.score("a", [{"role": "x", "content": "y"}]),
        InvalidPromptError,
        "continuation",
        ...,
        None,
    ),
    "a number": (lambda e: e.score("a", 7), InvalidPromptError, "continuation", 7, None),
    "too long together": (
        lambda e: e.score([1] * 200, [2] * 56),
        PromptTooLongError,
        "prompt",
        256,
        255,
    ),
    "a text too long": (
        lambda e: e.score([1] * 200, "b" * 56),
        PromptTooLongError,
        "prompt",
        256,
        255,
    ),
    "too many characters": (
        lambda e: e.score([1], "b" * 40_000),
        PromptTooLongError,
        "continuation",
        40_000,
        256 * 128,
    ),
    "top": (
        lambda e: e.score("a", "b", top_logprobs=65),
        InvalidRequestError,
        "top_logprobs",
        65,
        64,
    ),
    "below": (
        lambda e: e.score("a", "b", top_logprobs=-1),
        InvalidRequestError,
        "top_logprobs",
        -1,
        0,
    ),
    "none of several": (
        lambda e: e.score_each("a", []),
        InvalidPromptError,
        "continuations",
        ...,
        1,
    ),
    "too many": (
        lambda e: e.score_each("a", [[1]] * 9),
        InvalidPromptError,
        "continuations",
        ...,
        8,
    ),
    "one text for many": (
        lambda e: e.score_each("a", "bcd"),
        InvalidPromptError,
        "continuations",
        "bcd",
        None,
    ),
    "too many prompts": (
        lambda e: e.embed(["a"] * 9),
        InvalidPromptError,
        "prompts",
        ...,
        8,
    ),
    "pooling": (
        lambda e: e.embed("a", pooling="max"),
        InvalidRequestError,
        "pooling",
        "max",
        None,
    ),
    "normalize": (
        lambda e: e.embed("a", normalize=1),
        InvalidRequestError,
        "normalize",
        1,
        None,
    ),
    "id": (lambda e: e.embed("a", request_id=""), InvalidRequestError, "request_id", ..., 1),
    "deadline": (
        lambda e: e.score("a", "b", deadline_seconds=0),
        InvalidRequestError,
        "deadline_seconds",
        ...,
        0,
    ),
    "an unknown option": (lambda e: e.score("a", "b", n=2), TypeError, "n", ..., None),
    "priority": (
        lambda e: e.embed("a", priority=2**31),
        InvalidRequestError,
        "priority",
        2**31,
        2**31 - 1,
    ),
}


@pytest.mark.parametrize("label", REFUSED)
async def test_what_is_refused_names_argument_value_and_limit(label):
    call, error, argument, value, limit = REFUSED[label]
    async with engine(max_waiting=8) as e:
        with pytest.raises(error) as caught:
            await call(e)
        assert argument in str(caught.value)
        if error is not TypeError:
            assert (caught.value.argument, caught.value.limit) == (argument, limit)
        if value is not ...:
            assert caught.value.value == value
        assert len(await e.score_each("a", [[1]] * 8, top_logprobs=0)) == 8
        assert (await e.embed(["a"] * 8)).shape == (8, 2)
        assert (await e.score([1] * 200, "b" * 55, top_logprobs=20)).logprobs
        assert await all_given_back(e)


async def test_an_error_in_one_of_several_says_which_and_ends_all():
    async with engine() as e:
        with pytest.raises(InvalidPromptError) as caught:
            await e.embed(["a", "b", ""])
        assert caught.value.__notes__ == ["of prompts[2]"]
        with pytest.raises(InvalidPromptError) as caught:
            await e.score_each("a", ["b", [999]])
        assert caught.value.__notes__ == ["of continuations[1]"]
        assert await all_given_back(e)


def planted(plan, outcome, error=None, **changes):
    if error is not None:
        raise error
    return msgspec.structs.replace(outcome, **changes) if plan.num_rows else outcome


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"error": RuntimeError("planted")}, StepError),
        ({"row_errors": {0: "NaN"}}, RequestFailedError),
        ({"pooled": (np.array([1, np.nan], np.float32),)}, RequestFailedError),
        ({"pooled": ()}, StepError),
    ],
    ids=["the step", "the logits", "the states", "no states"],
)
async def test_what_goes_wrong_with_a_request_is_raised(changes, error):
    async with engine(lambda i, plan, outcome: planted(plan, outcome, **changes)) as e:
        with pytest.raises(error):
            await e.embed(PROMPT, pooling="mean")
        assert await all_given_back(e)


async def test_a_runner_without_hidden_states_is_refused():
    class Without(FakeModel):
        async def load(self, config, *, num_slots):
            model = await super().load(config, num_slots=num_slots)
            return msgspec.structs.replace(model, pools=False, description={"device": "cuda"})

    async with Engine(Without()) as e:
        with pytest.raises(InvalidRequestError, match="can't be computed on cuda"):
            await e.embed(PROMPT)
        assert (await e.score(PROMPT, [1])).logprobs


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5, 8, 13, 40])
async def test_whoever_leaves_at_any_moment_frees_all(rounds):
    async with engine(max_num_batched_tokens=4) as e:
        calls = [
            lambda: e.embed([PROMPT * 9] * 70, pooling="mean"),
            lambda: e.score_each("a" * 150, ["b", [1] * 20, "c"]),
            lambda: e.score("a" * 600, "b"),
        ]
        for call in calls:
            task = asyncio.ensure_future(call())
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises((asyncio.CancelledError, PromptTooLongError)):
                await task
            assert await all_given_back(e)
        params = SamplingParams(max_tokens=9, temperature=0.0, seed=0)
        answer = await e.generate(PROMPT, params)
        assert list(answer.token_ids) == expected_tokens(PROMPT, 9)


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5, 8, 13, 40])
async def test_closing_the_engine_at_any_moment_ends_them_by_name(rounds):
    e = engine(max_num_batched_tokens=4)
    await e.__aenter__()
    tasks = [
        asyncio.ensure_future(e.embed([PROMPT * 9] * 70, pooling="mean")),
        asyncio.ensure_future(e.score_each("a" * 150, ["b", [1] * 20, "c"])),
    ]
    for _ in range(rounds):
        await asyncio.sleep(0)
    await e.__aexit__(None, None, None)
    for task in tasks:
        with pytest.raises(EngineClosedError):
            await task
