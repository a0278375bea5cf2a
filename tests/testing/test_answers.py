"""A fake model with answers in an engine: each request has its own, whole and once, whatever runs
beside it; and what can't be an answer ends its own request by name."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import (
    ConfigError,
    Engine,
    FinishReason,
    RequestFailedError,
    SamplingParams,
    Speculation,
    StructuredOutput,
)
from aioserve.engine.stream import collect
from aioserve.testing import FakeModel, FakeRequest, Fault, Faults, run_simulated
from aioserve.testing.embeddings import vector_of
from tests.engine.idle import all_given_back

ASK: list[dict[str, Any]] = [{"role": "user", "content": "What's the weather in Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("weather", "climate")
]
OSLO = {"name": "weather", "arguments": {"city": "Oslo \u00c5 \U0001f30d"}}
TEXTS = (
    st.text(max_size=30)
    | st.just("ab" * 15)
    | st.sampled_from(["<|im_end|>", "<tool_call>", "\U0001f468\u200d\U0001f33e\ufe0f"])
)


def served(
    model: FakeModel, main: Callable[[Engine], Any], *, seed: int | None = 0, **options: Any
) -> Any:
    """What `main` comes to, with an engine that has nothing left to do then: on a simulated loop,
    or where forms are compiled on one of asyncio's own (`seed=None`)."""

    async def running() -> Any:
        async with Engine(model, **options) as engine:
            result = await main(engine)
            assert await all_given_back(engine)
            return result

    return asyncio.run(running()) if seed is None else run_simulated(running, seed=seed)


def asked(
    model: FakeModel, *prompts: Any, params: SamplingParams | None = None, **options: Any
) -> list[Any]:
    """What requests, one after the other, come to: an answer's text, or the error."""

    async def main(engine: Engine) -> list[Any]:
        found: list[Any] = []
        for prompt in prompts:
            try:
                completion = await engine.generate(prompt, params)
            except Exception as error:
                found.append(error)
            else:
                found.append(completion.text)
        return found

    return served(model, main, **options)


@settings(max_examples=12)
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
def test_guesses_of_a_drafter_change_no_answer(answer, some_right):
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


# -- forms


def form(**ways: Any) -> SamplingParams:
    return SamplingParams(structured_output=StructuredOutput(**ways))


@pytest.mark.parametrize("jump_forward", [True, False])
@pytest.mark.parametrize(
    ("params", "answer", "why"),
    [
        (form(json_schema=SCHEMA), json.dumps(OSLO["arguments"], ensure_ascii=False), None),
        (form(json_schema=SCHEMA), '{"city":"Oslo","days":3}', None),
        (form(json_schema=SCHEMA), "Rain.", "at character 0 comes 'R', and the form allows '{'"),
        (form(json_schema=SCHEMA), '{"town": ""}', r"""behind '{"', comes 't', .* allows 'c'"""),
        (form(json_schema=SCHEMA), '{"city": 1}', "at character 9, behind .* comes '1'"),
        (
            form(json_schema=SCHEMA),
            '{"city": "Oslo"',
            r"comes the end, and the form allows ',', '}'",
        ),
        (form(json_schema=SCHEMA), '{"city": ""}!', "comes '!', and the form allows the end"),
        (form(json_schema={"const": "bar"}), '"bar"', None),
        # All behind the first character is forced: what was written is told from that all the same.
        (form(json_schema={"const": "bar"}), '"baz"', "at character 3, .* comes 'z'"),
        (form(regex="ab.*"), "abzw", None),
        (form(regex="ab.*"), "axzw", "comes 'x', and the form allows 'b'"),
        (form(regex="[\u00e5\u00f8]+"), "\u00e5\u00e6", "comes byte 0xa6"),
        (form(choice=["yes", "no"]), "no", None),
        (
            form(choice=["yes", "no"]),
            "",
            "at character 0 comes the end, and the form allows 'n', 'y'",
        ),
    ],
)
def test_an_answer_fits_the_form_or_its_error_says_where_not(params, answer, why, jump_forward):
    other, found = asked(
        FakeModel(answers=lambda prompt: answer),
        *"ab",
        params=params,
        jump_forward=jump_forward,
        seed=None,
    )
    if why is None:
        assert other == found == answer
    else:
        with pytest.raises(RequestFailedError, match=f"(?s)doesn't fit the form .*{why}"):
            raise found


def chats(model: FakeModel, *options: dict[str, Any], **engine_options: Any) -> list[Any]:
    async def main(engine: Engine) -> list[Any]:
        found: list[Any] = []
        for each in options:
            try:
                found.append(await engine.chat(ASK, **each).completion())
            except Exception as error:
                found.append(error)
        return found

    return served(model, main, seed=None, **engine_options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strict_tools": ["weather"]},
        {"required_tools": ["weather"]},
        {"required_tools": ["weather", "climate"], "parallel_tool_calls": False},
        {"tool_parser": "hermes"},
        {"tool_parser": "json"},
        {"params": form(json_schema=SCHEMA)},
    ],
)
def test_a_call_is_written_as_the_request_reads_it(options):
    (done,) = chats(FakeModel(answers=[OSLO]), {"tools": TOOLS, **options})
    (call,) = done.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", OSLO["arguments"])
    assert (done.content, done.finish_reason) == ("", FinishReason.STOP)


def test_an_answer_has_texts_reasoning_and_several_calls():
    broken = {"name": "climate", "arguments": '{"city": '}
    answers = [["<think>Hm.</think>Let me look.", OSLO, broken], "<tool_call>none", "a < b"]
    many, text, plain = chats(FakeModel(answers=answers), *[{"tools": TOOLS}] * 3)
    assert (many.content, many.reasoning) == ("Let me look.", "Hm.")
    assert [call.name for call in many.tool_calls] == ["weather", "climate"]
    assert many.tool_calls[1].arguments.startswith('{"city": ')
    assert (text.content, text.tool_calls) == ("<tool_call>none", ())
    assert plain.content == "a < b"


@pytest.mark.parametrize(
    ("answer", "options", "why"),
    [
        (
            {**OSLO, "name": "wether"},
            {},
            "calls 'wether', and the tools of the request are: weather, clim",
        ),
        (
            ["Well.", OSLO],
            {"tool_parser": "json"},
            "has text, and the request asks for calls alone",
        ),
        (["Well.", OSLO], {"required_tools": ["weather"]}, "at character 0 comes 'W'"),
        (OSLO, {"required_tools": ["climate"]}, "comes 'w', and the form allows 'c'"),
        ("Rain.", {"required_tools": ["weather"]}, "at character 0 comes 'R', .* allows '<'"),
        (
            {"name": "weather", "arguments": {"town": ""}},
            {"strict_tools": ["weather"]},
            "comes 't', and the form allows 'c'",
        ),
        (
            [OSLO, OSLO],
            {"tool_parser": "none", "params": form(json_schema=SCHEMA)},
            "has 2 parts, and the request asks for the arguments of one call",
        ),
    ],
)
def test_a_call_that_the_request_does_not_take_ends_it(answer, options, why):
    model = FakeModel(answers=lambda messages: answer)
    (error,) = chats(model, {"tools": TOOLS, **options})
    with pytest.raises(RequestFailedError, match=why):
        raise error


def test_another_form_of_calls_is_refused_when_the_engine_is_entered():
    with pytest.raises(
        ConfigError, match="tool_parser must be one of auto, none, hermes with a Fa"
    ):
        chats(FakeModel(answers=""), tool_parser="mistral")


def test_beams_are_refused_by_name():
    async def main(engine: Engine) -> None:
        with pytest.raises(RequestFailedError, match="FakeModel: answers has none for beams"):
            await engine.beam_search("Say", beam_width=2, max_tokens=3)

    served(FakeModel(answers="Hi"), main)


# -- embeddings


@given(texts=st.lists(st.text(max_size=40), min_size=2, max_size=5))
def test_equal_texts_have_equal_vectors_and_others_have_others(texts):
    for one, other in itertools.product(texts, texts):
        assert (one == other) is np.allclose(vector_of(one), vector_of(other))


def test_vectors_have_length_1_however_they_are_pooled_and_whatever_runs_beside_them():
    texts = ["Rain", "Rain in Oslo " * 5, "Rain"]

    async def main(engine: Engine) -> None:
        alone = [await engine.embed(text) for text in texts]
        np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, rtol=1e-5)
        assert np.array_equal(alone[0], alone[2])
        own = vector_of(texts[1])
        np.testing.assert_allclose(alone[1], own / np.linalg.norm(own), rtol=1e-5)
        for pooling in ("last", "mean", "cls"):
            vectors = await engine.embed(texts, pooling=pooling)
            np.testing.assert_allclose(vectors, alone, rtol=1e-5, atol=1e-6)

    served(FakeModel(answers=""), main, max_num_batched_tokens=16)


def test_texts_that_share_words_are_nearer_than_others():
    async def main(engine: Engine) -> Any:
        texts = ["How do I get a refund?", "A refund takes five days.", "We open at noon."]
        vectors = await engine.embed(texts)
        return vectors[0] @ vectors[1:].T

    near, far = served(FakeModel(answers=""), main)
    assert near > far + 0.1


def test_a_function_makes_vectors_and_what_is_none_ends_the_request():
    vectors: dict[str, Any] = {
        "a": [3, 4],
        "b": np.array([0.0, 1.0]),
        "zero": [0.0, 0.0],
        "long": [1.0, 2.0, 3.0],
        "text": "12",
        "nothing": [],
        "nan": [float("nan"), 1.0],
        "table": [[1.0]],
    }

    async def main(engine: Engine) -> None:
        both = await engine.embed(["a", "b", "zero"])
        np.testing.assert_allclose(both, [[0.6, 0.8], [0.0, 1.0], [0.0, 0.0]], atol=1e-6)
        raw = await engine.embed("a", normalize=False, pooling="mean")
        np.testing.assert_allclose(raw, [3, 4], atol=1e-6)
        for text, why in [
            ("long", "vectors of one length, got 3 numbers after 2"),
            ("text", "embeddings must give a list of finite numbers, got '12'"),
            ("nothing", r"embeddings must give a list of finite numbers, got \[\]"),
            ("nan", "embeddings must give a list of finite numbers"),
            ("table", "embeddings must give a list of finite numbers"),
            ("unknown", r"of embeddings failed in line \d+ of test_answers.py: KeyError\('unkn"),
        ]:
            with pytest.raises(RequestFailedError, match=why):
                await engine.embed(text)
        assert (await engine.embed("a")).shape == (2,)

    served(FakeModel(embeddings=lambda text: vectors[text]), main)


@pytest.mark.parametrize(
    "made",
    [
        [10**400],
        [1e300],
        [1 + 2j],
        np.array([1 + 2j]),
        ["1", "2"],
        [[1], [1, 2]],
        torch.ones(1, requires_grad=True),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_vector_ends_its_own_request_alone(made):
    async def main(engine: Engine) -> list[Any]:
        asked = [engine.embed(text) for text in ("fine", "odd", "fine")]
        return await asyncio.gather(*asked, return_exceptions=True)

    model = FakeModel(embeddings=lambda text: made if text == "odd" else [1])
    before, error, after = served(model, main)
    assert before == after == [1.0]
    assert isinstance(error, RequestFailedError)
    assert "embeddings must give a list of finite numbers" in str(error)


def test_a_function_of_embeddings_that_fails_the_test_ends_its_request():
    def vector(text: str) -> list[float]:
        if text == "odd":
            pytest.fail("asked for an odd one")
        return [1.0]

    async def main(engine: Engine) -> None:
        with pytest.raises(RequestFailedError, match="asked for an odd one"):
            await engine.embed("odd")
        assert await engine.embed("fine") == [1.0]

    served(FakeModel(embeddings=vector), main)


def test_scores_are_told_as_without_answers():
    async def main(engine: Engine) -> None:
        score = await engine.score("Say", "Hi")
        assert score.token_ids == (72, 105)
        assert (await engine.generate("Say")).text == "Hi"

    served(FakeModel(answers=["Hi"]), main)
