"""A fake model with scripted completions, in an engine. Each request gets its own, whole and once,
whatever runs beside it. An invalid one ends only its own request, by name."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import (
    ConfigError,
    Engine,
    FinishReason,
    RequestFailedError,
    SamplingParams,
    Speculation,
)
from aioserve.engine.stream import collect
from aioserve.testing import FakeModel, FakeRequest, Fault, Faults
from tests.testing.answered import ASK, OSLO, asked, served
from tests.tiers import examples

TEXTS = (
    st.text(max_size=30)
    | st.just("ab" * 15)
    | st.sampled_from(["<|im_end|>", "<tool_call>", "\U0001f468\u200d\U0001f33e\ufe0f"])
)


@settings(max_examples=examples(12))
@given(
    answers=st.lists(TEXTS, min_size=1, max_size=8),
    n=st.integers(1, 3),
    max_num_seqs=st.integers(3, 6),
    num_pages=st.integers(45, 70),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    speculation=st.sampled_from([None, Speculation(drafter="ngram", max_tokens=3)]),
    data=st.data(),
)
def test_each_request_has_its_own_answer_whole_and_once(
    answers, n, max_num_seqs, num_pages, overlap, prefix_caching, speculation, data
):
    prompts = [data.draw(st.sampled_from([[1, 2, 3], "One", "One and two", ASK])) for _ in answers]
    params = SamplingParams(n=n, temperature=1.0, seed=7, repetition_penalty=1.3)

    async def main(engine: Engine) -> list[Any]:
        # They are taken in this order, and begin in any.
        streams = [engine.stream(prompt, params) for prompt in prompts]
        return await asyncio.gather(*[collect(stream, params) for stream in streams])

    model = FakeModel(answers=answers)
    options = {
        "max_num_seqs": max_num_seqs,
        "num_pages": num_pages,
        "page_size": 4,
        "output_reserve_tokens": 0,
        "overlap": overlap,
        "prefix_caching": prefix_caching,
        "speculation": speculation,
    }
    completions = served(model, main, seed=data.draw(st.integers(0, 9)), **options)
    for answer, completion in zip(answers, completions, strict=True):
        assert [sample.text for sample in completion.samples] == [answer] * n
        assert {sample.finish_reason for sample in completion.samples} == {FinishReason.STOP}
        assert completion.usage.completion_tokens == n * (len(answer.encode()) + 1)
    assert [request.messages or request.prompt for request in model.requests] == [
        "\x01\x02\x03" if prompt == [1, 2, 3] else prompt for prompt in prompts
    ]


def test_a_request_that_begins_again_takes_no_second_answer():
    called: list[str] = []

    def answer(prompt: str) -> str:
        called.append(prompt)
        return f"{prompt} " * 12

    async def main(engine: Engine) -> tuple[list[str], int]:
        prompts = [f"Number {index}" for index in range(6)]
        done = await asyncio.gather(*[engine.generate(prompt) for prompt in prompts])
        return [one.text for one in done], engine.stats().preemptions_total

    options = {"num_pages": 40, "page_size": 4, "output_reserve_tokens": 0, "max_num_seqs": 6}
    texts, preemptions = served(FakeModel(answers=answer), main, **options)
    assert preemptions > 3
    assert texts == [f"Number {index} " * 12 for index in range(6)]
    assert sorted(called) == [f"Number {index}" for index in range(6)]


@pytest.mark.parametrize(("answer", "some_right"), [("abcabcabcabcX", True), ("aX", False)])
def test_drafts_of_a_drafter_change_no_answer(answer, some_right):
    async def main(engine: Engine) -> None:
        done = await engine.generate("abcabcabcabc")
        assert done.text == answer
        assert done.usage.accepted_draft_tokens < done.usage.drafted_tokens
        assert (done.usage.accepted_draft_tokens > 0) is some_right

    speculation = Speculation(drafter="ngram", max_tokens=4)
    served(FakeModel(answers=answer), main, speculation=speculation)


def test_tokens_come_one_by_one_and_parameters_hold():
    async def main(engine: Engine) -> None:
        async with engine.stream("Say", SamplingParams(logprobs=2)) as stream:
            tokens = [token async for token in stream]
        assert [token.text for token in tokens] == ["H", "i", " ", "", "", "", "\U0001f30d", ""]
        assert [token.logprob for token in tokens] == [0.0] * 8
        first = tokens[0].logprobs
        assert first is not None
        assert [(top.text, top.logprob) for top in first.top] == [("H", 0.0), ("\0", -100.0)]
        cut = await engine.generate("Say", SamplingParams(max_tokens=2))
        assert (cut.text, cut.finish_reason) == ("Hi", FinishReason.LENGTH)
        stopped = await engine.generate("Say", SamplingParams(stop="i \U0001f30d"))
        assert (stopped.text, stopped.finish_reason) == ("H", FinishReason.STOP)
        on = await engine.generate("Say", SamplingParams(ignore_eos=True, max_tokens=20))
        assert (on.text, len(on.token_ids)) == ("Hi \U0001f30d", 20)
        bent = SamplingParams(
            temperature=2.0, top_p=0.1, logit_bias={72: -100}, frequency_penalty=2, bad_words=["Ho"]
        )
        assert (await engine.generate("Say", bent)).text == "Hi \U0001f30d"

    served(FakeModel(answers="Hi \U0001f30d"), main)


def test_what_parameters_forbid_ends_the_request_by_their_name():
    for params, why in [
        (SamplingParams(allowed_token_ids=[72]), "allowed_token_ids forbids the answer: at charac"),
        (
            SamplingParams(bad_words=["i!"]),
            r"bad_words forbids .* character 2, behind 'Hi', .* '!'",
        ),
        (SamplingParams(bad_words=["yHi"]), r"bad_words forbids .* character 1, behind 'H', "),
        (SamplingParams(min_tokens=5), r"min_tokens = 5 forbids .* character 3, .* the end"),
    ]:
        (error,) = asked(FakeModel(answers="Hi!"), "Say", params=params)
        assert isinstance(error, RequestFailedError)
        with pytest.raises(RequestFailedError, match=why):
            raise error


def test_an_answer_longer_than_the_context_is_cut_where_that_ends():
    async def main(engine: Engine) -> None:
        done = await engine.generate("Say")
        assert (done.text, done.finish_reason) == ("a" * 61, FinishReason.LENGTH)

    served(FakeModel(answers="a" * 100, max_model_len=64), main)


# -- which answer


def test_answers_that_run_out_fail_the_request_and_a_text_never_does():
    two = FakeModel(answers=["One", ""])
    texts = asked(two, "a", "b", "c", "d")
    assert texts[:2] == ["One", ""]
    assert [str(error) for error in texts[2:]] == [
        f"FakeModel: answers has 2, and this is request {number}; "
        "a function answers any number, and so does one text"
        for number in (3, 4)
    ]
    assert asked(FakeModel(answers="One"), *"abc") == ["One"] * 3
    assert asked(FakeModel(answers=itertools.cycle(["One", "Two"])), *"abc") == [
        "One",
        "Two",
        "One",
    ]
    assert "came to its end before request 2" in str(asked(FakeModel(answers=iter("a")), *"ab")[1])
    assert "answers was left out" in str(asked(FakeModel(embeddings=lambda text: [1.0]), "a")[0])


def test_a_function_hears_messages_and_changes_none_of_them():
    heard: list[Any] = []

    def answer(messages: Any) -> str:
        heard.append(messages)
        if isinstance(messages, list):
            messages.clear()
        return "Yes"

    model = FakeModel(answers=answer)
    turns = [*ASK, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And?"}]
    assert asked(model, turns, "Text", [72, 105, 257]) == ["Yes"] * 3
    assert heard == [[], "Text", "Hi<|im_end|>"]
    first, second, third = model.requests
    assert isinstance(first, FakeRequest)
    assert (first.messages, first.prompt, first.tools) == (turns, None, [])
    assert (second.messages, second.prompt) == (None, "Text")
    assert third.prompt == "Hi<|im_end|>"
    assert first.params == SamplingParams(temperature=0.0)


def boom(messages: Any) -> str:
    raise KeyError("boom")


async def later(messages: Any) -> str:
    return "Late"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            boom,
            r"the function of answers failed in line \d+ of test_answers.py: KeyError\('boom'\)",
        ),
        (lambda messages: None, "an answer must be a text, a call or a list of these, got None"),
        (lambda messages: 3, "an answer must be a text, a call or a list of these, got 3"),
        (lambda messages: b"x", "an answer must be a text, a call or a list of these, got b'x'"),
        (lambda messages: ["a", 1], "an answer must be .* got 1 in a list"),
        (lambda messages: later(messages), "an answer must be .* got <coroutine object"),
        (lambda messages: "\ud800", "an answer must be what UTF-8 and JSON can write: Unicode"),
        (
            lambda messages: {"name": "f"},
            "an answer must be a call of a name and arguments, or JSON as text",
        ),
        (lambda messages: next(iter(())), "the function of answers came to its end before"),
        (lambda messages: OSLO, "calls 'weather', and the tools of the request are: none"),
    ],
)
def test_what_is_no_answer_ends_its_own_request(answer, why, caplog):
    def some(messages: Any) -> Any:
        return "Fine" if messages == "b" else answer(messages)

    before, error, after = asked(FakeModel(answers=some), "b", "a", "b")
    assert before == after == "Fine"
    with pytest.raises(RequestFailedError, match=why):
        raise error
    assert ("in boom" in caplog.text) is (answer is boom)  # with its traceback


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"answers": 3}, "answers must be a text, a call, a sequence or an iterator .* got 3"),
        ({"answers": later}, "a function of the messages that isn't async"),
        (
            {"answers": b"x"},
            "answers must be a text, a call, a sequence or an iterator .* got b'x'",
        ),
        ({"answers": ["a", None]}, r"answers\[1\] must be a text"),
        ({"answers": ["a", "\udc00"]}, r"answers\[1\] must be what UTF-8 and JSON can write"),
        ({"answers": {"name": "f", "arguments": 3}}, 'an object, or its JSON, as "arguments"'),
        ({"answers": {"name": "f", "arguments": {"a": {1}}}}, "what UTF-8 and JSON can write"),
        ({"answers": [{"name": 1, "arguments": {}}]}, r"answers\[0\] must be a call with a text"),
        ({"answers": {"name": "f", "arguments": {"a": math.nan}}}, "what UTF-8 and JSON can write"),
        ({"embeddings": 3}, "embeddings must be a function of a text that isn't async, got 3"),
        (
            {"embeddings": later},
            "embeddings must be a function of a text that isn't async, got <fun",
        ),
        ({"answers": "a", "eos_token_ids": frozenset({3})}, "eos_token_ids must be left out"),
    ],
)
def test_what_can_be_no_answer_is_refused_at_once(options, why):
    with pytest.raises(ConfigError, match=why):
        FakeModel(**options)


def test_a_failing_step_fails_as_that_of_any_model():
    model = FakeModel(answers="Hello", faults=Faults(at={2: Fault.STEP_RAISES}))
    error, text = asked(model, "a", "b", overlap=False)
    assert "step 2" in str(error)
    assert text == "Hello"


def test_beams_are_refused_by_name():
    async def main(engine: Engine) -> None:
        with pytest.raises(RequestFailedError, match="FakeModel: answers has none for beams"):
            await engine.beam_search("Say", beam_width=2, max_tokens=3)

    served(FakeModel(answers="Hi"), main)


def test_scores_are_told_as_without_answers():
    async def main(engine: Engine) -> None:
        score = await engine.score("Say", "Hi")
        assert score.token_ids == (72, 105)
        assert (await engine.generate("Say")).text == "Hi"

    served(FakeModel(answers=["Hi"]), main)
