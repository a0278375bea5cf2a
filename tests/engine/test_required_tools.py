"""`Engine.chat` with `required_tools`: what they go with, and that answers are calls of these."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioserve import Engine, InvalidRequestError, RequestFailedError, SamplingParams
from aioserve.structured_output import StructuredOutput
from aioserve.testing import check_invariants
from tests.engine.idle import all_given_back
from tests.engine.scripted import ScriptedModel
from tests.engine.test_strict_tools import ASK, TEMPLATE, TOOLS, call_in
from tests.engine.test_typed_marks import HARMONY
from tests.text.test_harmony import AGAIN, ANALYSIS, FINAL, MESSAGE

pytestmark = pytest.mark.asyncio

OSLO = '{"city": "Oslo"}'
HEAD = "<|channel|>commentary to=functions."
CALL = f"{HEAD}weather <|constrain|>json{MESSAGE}{OSLO}<|call|>"
RECIPIENT_FIRST = f" to=functions.weather<|channel|>commentary json{MESSAGE}{OSLO}<|call|>"


@pytest.mark.parametrize(
    ("parser", "text", "is_taken"),
    [
        ("hermes", call_in("hermes", "weather", OSLO), True),
        ("hermes", call_in("hermes", "loose", OSLO), False),
        ("hermes", call_in("hermes", "weather", "{}"), False),
        ("hermes", "It rains.", False),
        ("mistral", call_in("mistral", "weather", OSLO), True),
        ("harmony", CALL, True),
        ("harmony", f"{ANALYSIS}Hm.{AGAIN}{CALL}", True),
        ("harmony", CALL.replace("weather", "loose"), False),
        ("harmony", f"{FINAL}It rains.", False),
    ],
)
async def test_an_answer_is_a_call_of_a_required_tool(
    parser: Any, text: str, is_taken: bool
) -> None:
    template = HARMONY if parser == "harmony" else TEMPLATE
    async with Engine(ScriptedModel(template, text), jump_forward=False) as engine:
        stream = engine.chat(ASK, tools=TOOLS, tool_parser=parser, required_tools=("weather",))
        if is_taken:
            answer = await stream.completion()
            (call,) = answer.tool_calls
            assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
            assert answer.content == ""
            assert answer.reasoning == ("Hm." if "Hm." in text else "")
        else:
            with pytest.raises(RequestFailedError, match="its mask doesn't allow"):
                await stream.completion()
        assert await all_given_back(engine)
        check_invariants(engine)


@pytest.mark.parametrize("most", [0, 2, 5, 99])
async def test_behind_the_budget_of_its_reasoning_an_answer_calls(most: int) -> None:
    """The end of the budget closes the reasoning and begins a call, which the model finishes."""
    rest = f"{AGAIN}{CALL}"
    text = f"{ANALYSIS}{'hmm..'[:most]}{rest}"
    async with Engine(ScriptedModel(HARMONY, text)) as engine:
        params = SamplingParams(seed=0, thinking_token_budget=most)
        stream = engine.chat(ASK, params, tools=TOOLS, required_tools=("weather", "loose"))
        answer = await stream.completion()
        assert answer.reasoning == "hmm.."[:most]
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("weather", OSLO)]


@pytest.mark.parametrize("calls", ["required_tools", "strict_tools"])
async def test_behind_the_budget_calls_are_in_the_answer_where_they_are_read_there(
    calls: str,
) -> None:
    """The parser of another family reads calls in the channel `final`, which opens after the
    budget."""
    text = f"{ANALYSIS}hm{AGAIN}{FINAL}{call_in('hermes', 'weather', OSLO)}"
    async with Engine(ScriptedModel(HARMONY, text)) as engine:
        params = SamplingParams(seed=0, thinking_token_budget=2)
        options: dict[str, Any] = {"tool_parser": "hermes", calls: ("weather",)}
        answer = await engine.chat(ASK, params, tools=TOOLS, **options).completion()
        assert (answer.reasoning, answer.content) == ("hm", "")
        assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [
            ("weather", {"city": "Oslo"})
        ]


@pytest.mark.parametrize("reasoning", ["auto", "none", "qwen3"])
@pytest.mark.parametrize("text", [CALL, RECIPIENT_FIRST])
async def test_a_call_in_its_channel_is_read_whatever_reads_reasoning(
    text: str, reasoning: Any
) -> None:
    async with Engine(ScriptedModel(HARMONY, text)) as engine:
        options: dict[str, Any] = {"tools": TOOLS, "reasoning_parser": reasoning}
        answer = await engine.chat(ASK, required_tools=("weather",), **options).completion()
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("weather", OSLO)]
        assert (answer.content, answer.reasoning) == ("", "")


@pytest.mark.parametrize("reasoning", ["auto", "none"])
async def test_a_form_beside_calls_in_channels_is_read_whatever_reads_reasoning(
    reasoning: Any,
) -> None:
    form = SamplingParams(structured_output=StructuredOutput(json_object=True))
    async with Engine(ScriptedModel(HARMONY, f"{FINAL}{OSLO}")) as engine:
        stream = engine.chat(ASK, form, tools=TOOLS, reasoning_parser=reasoning)
        answer = await stream.completion()
        assert (answer.content, answer.tool_calls) == (OSLO, ())


async def test_what_required_tools_do_not_go_with_is_refused_by_name() -> None:
    form = SamplingParams(structured_output=StructuredOutput(json_object=True))
    endless = SamplingParams(ignore_eos=True, max_tokens=4)
    given: dict[str, Any] = {
        "tools": TOOLS,
        "tool_parser": "hermes",
        "required_tools": ["weather"],
    }
    wrong: list[tuple[str, SamplingParams | None, dict[str, Any]]] = [
        ("must be names of functions in tools", None, {"required_tools": ["x"]}),
        ("required_tools must be", None, {"required_tools": 5}),
        ("must be a str, got 5", None, {"required_tools": [5]}),
        ("must be empty beside a structured_output", form, {}),
        ("must be empty where no token id ends", endless, {}),
        ("go with tools, and a tool_parser", None, {"tool_parser": "none"}),
        ("calls as llama3_json reads them, without a mark", None, {"tool_parser": "llama3_json"}),
        ("must be names of functions in tools", None, {"tools": []}),
    ]
    async with Engine(ScriptedModel(TEMPLATE, "x")) as engine:
        for complaint, params, options in wrong:
            with pytest.raises(InvalidRequestError, match=complaint) as told:
                engine.chat(ASK, params, **{**given, **options})
            assert told.value.argument == "required_tools"
        assert engine.stats().num_waiting == 0
        check_invariants(engine)


@pytest.mark.parametrize("reasoning", ["auto", "none"])
async def test_a_head_that_was_cut_off_is_no_content(reasoning: Any) -> None:
    """A truncated head begins with words before any mark."""
    async with Engine(ScriptedModel(HARMONY, RECIPIENT_FIRST)) as engine:
        for most in range(1, RECIPIENT_FIRST.index("<") + 1):
            params = SamplingParams(max_tokens=most)
            options: dict[str, Any] = {"tools": TOOLS, "reasoning_parser": reasoning}
            stream = engine.chat(ASK, params, required_tools=["weather"], **options)
            assert (await stream.completion()).content == ""


@pytest.mark.parametrize("parser", ["hermes", "mistral", "harmony"])
async def test_what_was_cut_off_is_no_content(parser: Any) -> None:
    text = CALL if parser == "harmony" else call_in(parser, "weather", OSLO)
    template = HARMONY if parser == "harmony" else TEMPLATE
    async with Engine(ScriptedModel(template, text)) as engine:
        for most in range(1, len(text), 5):
            answer = await engine.chat(
                ASK,
                SamplingParams(max_tokens=most),
                tools=TOOLS,
                tool_parser=parser,
                required_tools=["weather"],
            ).completion()
            assert answer.content == ""
