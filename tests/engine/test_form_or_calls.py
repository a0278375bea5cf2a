"""`Engine.chat` with tools and a JSON form: an answer is calls, or else of the form."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve import Engine, InvalidSamplingError, RequestFailedError, SamplingParams
from aioserve.structured_output import StructuredOutput
from aioserve.testing import check_invariants
from tests.engine.idle import all_given_back
from tests.engine.scripted import ScriptedModel
from tests.engine.test_strict_tools import ASK, FORMS, TEMPLATE, TOOLS, call_in

pytestmark = pytest.mark.asyncio

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
OF_FORM = SamplingParams(structured_output=StructuredOutput(json_schema=SCHEMA))
MARKED = [name for name in FORMS if name != "llama3_json"]
HERMES = TEMPLATE + "{# tool_parser: hermes #}{# </think> #}"


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(structured_output=params.structured_output, seed=seed)


@pytest.mark.parametrize("strict", [[], ["weather"]])
@pytest.mark.parametrize("parser", MARKED)
async def test_an_answer_is_calls_or_of_the_form(parser: Any, strict: list[str]) -> None:
    good, bad = '{"city": "Oslo"}', '{"city": "Reykjavik"}'
    quoted = call_in(parser, "weather", good).replace('"', "'").replace("\n", " ")
    form = f'{{"answer": "{quoted}"}}'
    if parser == "mistral":  # its mark would be a special token, which no string contains
        form = form.replace("[TOOL_CALLS]", "[TOOL_CALL")
    texts = {
        call_in(parser, "weather", good): ("", [("weather", good)]),
        call_in(parser, "weather", bad): None if strict else ("", [("weather", bad)]),
        call_in(parser, "other", good): None,
        form: (form, []),
        "Rain.": None,
        f"I think: {form}": None,
        f"{form}{call_in(parser, 'weather', good)}": None,
        '{"reply": ""}': None,
    }
    async with Engine(ScriptedModel(TEMPLATE, *texts), jump_forward=False) as engine:
        for seed, told in enumerate(texts.values()):
            stream = engine.chat(
                ASK, seeded(OF_FORM, seed), tools=TOOLS, tool_parser=parser, strict_tools=strict
            )
            if told is None:
                with pytest.raises(RequestFailedError, match="its mask doesn't allow"):
                    await stream.completion()
            else:
                answer = await stream.completion()
                calls = [(call.name, call.arguments) for call in answer.tool_calls]
                assert (answer.content, calls) == told
        assert await all_given_back(engine)
        check_invariants(engine)


async def test_reasoning_comes_before_either() -> None:
    call = call_in("hermes", "weather", '{"city": "Oslo"}')
    form = '{"answer": "<tool_call>"}'
    texts = [f"<think>hm</think>\n\n{rest}" for rest in (form, call)]
    async with Engine(ScriptedModel(HERMES, *texts), jump_forward=False) as engine:
        first, second = [
            await engine.chat(ASK, seeded(OF_FORM, seed), tools=TOOLS).completion()
            for seed in range(2)
        ]
    assert (first.reasoning, first.content, first.tool_calls) == ("hm", form, ())
    assert (second.reasoning, second.content) == ("hm", "")
    assert [call.name for call in second.tool_calls] == ["weather"]


async def test_reasoning_before_either_has_as_many_tokens_as_it_may() -> None:
    params = SamplingParams(
        structured_output=OF_FORM.structured_output,
        thinking_token_budget=5,
        temperature=1.0,
        max_tokens=150,
        n=3,
        seed=0,
    )
    async with Engine("pyhelp", num_pages=256, reasoning_parser="deepseek_r1") as engine:
        stream = engine.chat(ASK, params, tools=TOOLS, tool_parser="hermes")
        done = await stream.completion()
        tag = engine.tokenizer.encode("</think>", add_special_tokens=False)
        for answer in done.answers:
            ids = [token.id for token in answer.tokens]
            assert ids[5 : 5 + len(tag)] == tag
            assert answer.content.startswith("{") or answer.tool_calls


async def test_one_call_and_white_space_go_with_a_form_beside_tools() -> None:
    call = call_in("hermes", "weather", '{"city":"Oslo"}').replace(" ", "")
    spaced = call.replace(":", ":  ")
    options: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    async with Engine(ScriptedModel(HERMES, call, call * 2, spaced), jump_forward=False) as engine:
        for seed, max_whitespace in ((0, 0), (2, 2)):
            stream = engine.chat(
                ASK, seeded(OF_FORM, seed), max_whitespace=max_whitespace, **options
            )
            assert len((await stream.completion()).tool_calls) == 1
        for seed, max_whitespace in ((1, 0), (2, 0)):
            stream = engine.chat(
                ASK, seeded(OF_FORM, seed), max_whitespace=max_whitespace, **options
            )
            with pytest.raises(RequestFailedError, match="its mask doesn't allow"):
                await stream.completion()


@pytest.mark.parametrize("name", ["llama3_json", "json"])
async def test_where_calls_are_json_themselves_either_is_told(name: str) -> None:
    template = TEMPLATE + f"{{# tool_parser: {name} #}}"
    key = "arguments" if name == "json" else "parameters"
    form, call = '{"answer": "{}"}', f'{{"name": "weather", "{key}": {{"city": "Oslo"}}}}'
    texts = (form, call, "Rain.", call.replace("weather", "rain"), '{"name": "weather"}')
    async with Engine(ScriptedModel(template, *texts), jump_forward=False) as engine:
        told = [
            await engine.chat(ASK, seeded(OF_FORM, seed), tools=TOOLS).completion()
            for seed in range(2)
        ]
        for seed in range(2, len(texts)):
            with pytest.raises(RequestFailedError, match="its mask doesn't allow"):
                await engine.chat(ASK, seeded(OF_FORM, seed), tools=TOOLS).completion()
    assert (told[0].content, told[0].tool_calls) == (form, ())
    assert told[1].content == ""
    assert [(c.name, c.arguments) for c in told[1].tool_calls] == [("weather", '{"city": "Oslo"}')]


@pytest.mark.parametrize("name", ["llama3_json", "json"])
async def test_a_form_that_takes_a_call_is_refused_where_calls_have_no_mark(name: str) -> None:
    template = TEMPLATE + f"{{# tool_parser: {name} #}}"
    any_object = SamplingParams(structured_output=StructuredOutput(json_object=True))
    async with Engine(ScriptedModel(template, '{"answer": ""}')) as engine:
        with pytest.raises(InvalidSamplingError, match=rf"\({name}\) are JSON") as told:
            await engine.chat(ASK, any_object, tools=TOOLS).completion()
        assert told.value.argument == "json_object"
        answer = await engine.chat(ASK, any_object, tools=TOOLS, tool_parser="none").completion()
    assert (answer.content, answer.tool_calls) == ('{"answer": ""}', ())


@pytest.mark.parametrize("name", ["none", "llama3_json", "hermes"])
async def test_a_parser_that_the_engine_names_says_how_calls_are_written(name: Any) -> None:
    thinking = TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
    form = '{"answer": ""}'
    answers = (form if name == "none" else f"hm</think>{form}",)
    async with Engine(ScriptedModel(thinking, *answers), tool_parser=name) as engine:
        answer = await engine.chat(ASK, OF_FORM, tools=TOOLS).completion()
        assert (answer.content, answer.tool_calls) == (form, ())
        assert answer.reasoning == ("" if name == "none" else "hm")


async def test_other_forms_are_about_all_of_the_answer() -> None:
    of_regex = SamplingParams(structured_output=StructuredOutput(regex="<tool_call>.*"), seed=0)
    async with Engine(ScriptedModel(HERMES, "<tool_call>{}")) as engine:
        answer = await engine.chat(ASK, of_regex, tools=TOOLS).completion()
    assert (answer.content, answer.tool_calls) == ("<tool_call>{}", ())


async def test_forms_beside_the_same_tools_are_not_mixed_up() -> None:
    texts = ['{"answer": ""}', "{}", '{ "answer": ""}']
    forms = [
        OF_FORM.structured_output,
        StructuredOutput(json_schema={"type": "object", "maxProperties": 0}),
        StructuredOutput(json_schema=SCHEMA, max_whitespace=1),
    ]
    async with Engine(ScriptedModel(HERMES, *texts), jump_forward=False) as engine:
        for number, form in enumerate(forms):
            for seed, text in enumerate(texts):
                params = SamplingParams(structured_output=form, seed=seed)
                stream = engine.chat(ASK, params, tools=TOOLS)
                if seed == number or (number, seed) == (2, 0):
                    assert (await stream.completion()).content == text
                else:
                    with pytest.raises(RequestFailedError, match="its mask doesn't allow"):
                        await stream.completion()
