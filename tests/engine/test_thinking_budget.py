"""A budget of reasoning in an engine: the tag comes in time, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve import Engine, InvalidSamplingError, SamplingParams
from aioserve.structured_output import StructuredOutput
from aioserve.testing import FakeModel, check_invariants
from tests.engine.idle import all_given_back
from tests.engine.scripted import ScriptedModel

pytestmark = pytest.mark.asyncio

ASK = [{"role": "user", "content": "What does os.path.join do?"}]
OPTIONS: dict[str, Any] = {"num_pages": 256, "reasoning_parser": "deepseek_r1"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


def params(most: int | None, **more: Any) -> SamplingParams:
    given = {"max_tokens": 40, "min_tokens": 40, "temperature": 0.7, "seed": 3}
    return SamplingParams(**{**given, "thinking_token_budget": most, **more})


@pytest.mark.parametrize("jump_forward", [False, True])
async def test_reasoning_has_as_many_tokens_as_it_may_and_goes_on_with_content(
    jump_forward: bool,
) -> None:
    async with Engine("pyhelp", **OPTIONS, jump_forward=jump_forward) as engine:
        free = await engine.chat(ASK, params(None, n=2)).completion()
        for most in (0, 1, 7, 60):
            stream = engine.chat(ASK, params(most, n=2, logprobs=1))
            found = await stream.completion()
            for answer, unbound in zip(found.answers, free.answers, strict=True):
                ids = [token.id for token in answer.tokens]
                assert ids[:most] == [token.id for token in unbound.tokens][:most]
                assert (answer.content == "") == (most > 40)
                tag = engine.tokenizer.encode("</think>", add_special_tokens=False)
                assert (ids[most : most + len(tag)] == tag) == (most < 40)
                assert "<" not in answer.content
                assert all(token.logprobs is not None for token in answer.tokens)
        assert await all_given_back(engine)
        check_invariants(engine)


async def test_tokens_are_the_same_however_they_are_asked_for() -> None:
    found: list[list[int]] = []
    for jump_forward, overlap in ((False, False), (True, False), (True, True)):
        options = {**OPTIONS, "jump_forward": jump_forward, "overlap": overlap}
        async with Engine("pyhelp", **options) as engine:
            done = await engine.generate("os.path.join", params(5))
            found.append(list(done.token_ids))
            assert "</think>" in done.text
            streamed = [t.id async for t in engine.stream("os.path.join", params(5))]
            assert streamed == found[-1]
    assert found[0] == found[1] == found[2]


async def test_a_model_that_ends_its_reasoning_itself_is_let() -> None:
    answers = ("<think>ab</think>cd", "<think>ab</think>cd<think>efghijk", "abcdefghijk")
    template = "{{ messages[0].content }}"
    async with Engine(ScriptedModel(template, *answers), reasoning_parser="qwen3") as engine:
        for seed, text in enumerate(answers):
            done = await engine.chat(ASK, params(2, seed=seed, min_tokens=0)).completion()
            assert done.content == text.removeprefix("<think>ab</think>")
            assert done.reasoning == ("ab" if seed < 2 else "")


async def test_a_budget_goes_with_strict_tools_and_with_structured_output() -> None:
    async with Engine("pyhelp", **OPTIONS) as engine:
        done = await engine.chat(
            ASK, params(6), tools=[TOOL], tool_parser="hermes", strict_tools=["look"]
        ).completion()
        assert done.reasoning
        assert done.content
        form: Any = {"structured_output": StructuredOutput(choice=["page", "slot"])}
        form["min_tokens"] = 0
        plain = await engine.chat(ASK, params(None, **form)).completion()
        bound = await engine.chat(ASK, params(0, **form)).completion()
        assert bound.content == plain.content
        assert bound.reasoning == ""


async def test_where_nothing_tells_of_reasoning_it_is_refused_by_name() -> None:
    async with Engine("pyhelp", num_pages=64) as engine:
        for call in (engine.chat, engine.stream):
            with pytest.raises(InvalidSamplingError, match="nothing tells how it writes") as told:
                call(ASK, params(3))
            assert told.value.argument == "thinking_token_budget"
        with pytest.raises(InvalidSamplingError, match="nothing tells how it writes"):
            engine.chat(ASK, params(3), reasoning_parser="none")
        done = await engine.chat(ASK, params(3), reasoning_parser="deepseek_r1").completion()
        assert done.content
    async with Engine(FakeModel(), reasoning_parser="deepseek_r1") as engine:
        if not engine.has_tokenizer:
            with pytest.raises(InvalidSamplingError, match="nothing tells how it writes"):
                engine.stream([1, 2, 3], params(3))


async def test_other_parameters_that_leave_no_tag_are_named() -> None:
    async with Engine("pyhelp", **OPTIONS) as engine:
        (letter, *_) = engine.tokenizer.encode("a")
        with pytest.raises(InvalidSamplingError, match="thinking_token_budget and allowed_token"):
            await engine.generate("a", params(3, allowed_token_ids=[letter]))
