"""`Engine.chat` with `strict_tools`: what they go with, and that answers are held to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioserve import Engine, InvalidRequestError, RequestFailedError, SamplingParams
from aioserve.structured_output import StructuredOutput
from aioserve.testing import check_invariants
from tests.engine.idle import all_given_back
from tests.engine.scripted import ScriptedModel

pytestmark = pytest.mark.asyncio

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}{% endif %}"
)
ASK = [{"role": "user", "content": "What's the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "loose", "parameters": PARAMETERS}},
]
FORMS = {
    "hermes": '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>',
    "mistral": '[TOOL_CALLS] [{{"name": "{}", "arguments": {}}}]',
    "llama3_json": '<|python_tag|>{{"name": "{}", "parameters": {}}}',
    "deepseek_v31": "<\uff5ctool▁call▁begin\uff5c>{}<\uff5ctool▁sep\uff5c>{}"
    "<\uff5ctool▁call▁end\uff5c>",
    "glm45": "<tool_call>{}\n{}</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
}
MEMBERS = {
    "glm45": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    "qwen3_coder": "<parameter={}>\n{}\n</parameter>\n",
}
"""An argument in each format that isn't JSON."""
CALLS = (
    ("weather", '{"city": "Oslo"}', True),
    ("weather", '{"city": "Reykjavik"}', False),
    ("weather", "{}", False),
    ("loose", '{"city": "Reykjavik"}', True),
    ("other", "{}", False),
)


def call_in(parser: str, name: str, given: str) -> str:
    if member := MEMBERS.get(parser):
        given = "".join([member.format(key, value) for key, value in json.loads(given).items()])
    return FORMS[parser].format(name, given)


@pytest.mark.parametrize("parser", FORMS)
async def test_an_answer_cannot_have_a_call_that_is_not_of_its_tool(parser: Any) -> None:
    texts = ["I think: " + call_in(parser, name, given) for name, given, _ in CALLS]
    async with Engine(ScriptedModel(TEMPLATE, *texts), jump_forward=False) as engine:
        for seed, (name, given, is_taken) in enumerate(CALLS):
            stream = engine.chat(
                ASK,
                SamplingParams(seed=seed),
                tools=TOOLS,
                tool_parser=parser,
                strict_tools=["weather"],
            )
            if is_taken:
                answer = await stream.completion()
                assert answer.content == "I think:"
                assert [(call.name, call.arguments) for call in answer.tool_calls] == [
                    (name, given)
                ]
            else:
                with pytest.raises(RequestFailedError, match="its mask doesn't allow"):
                    await stream.completion()
        assert await all_given_back(engine)
        check_invariants(engine)


@pytest.mark.parametrize("parser", MEMBERS)
async def test_values_without_quotes_are_what_the_schemas_of_tools_say(parser: Any) -> None:
    properties = {"code": {"type": "string"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = call_in(parser, "f", '{"code": "0123", "days": 5}')
    async with Engine(ScriptedModel(TEMPLATE, answer)) as engine:
        for strict in ([], ["f"]):
            stream = engine.chat(ASK, tools=[tool], tool_parser=parser, strict_tools=strict)
            (call,) = (await stream.completion()).tool_calls
            assert json.loads(call.arguments) == {"code": "0123", "days": 5}


async def test_what_strict_tools_do_not_go_with_is_refused_by_name() -> None:
    form = SamplingParams(structured_output=StructuredOutput(regex="a"))
    endless = SamplingParams(ignore_eos=True, max_tokens=4)
    strict: dict[str, Any] = {"tools": TOOLS, "tool_parser": "hermes", "strict_tools": ["weather"]}
    wrong: list[tuple[str, str, SamplingParams | None, dict[str, Any]]] = [
        ("strict_tools", "must be names of functions in tools", None, {"strict_tools": ["x"]}),
        ("strict_tools", "strict_tools must be", None, {"strict_tools": 5}),
        ("strict_tools", "must be a str, got 5", None, {"strict_tools": [5]}),
        ("strict_tools", "must be empty where structured_output", form, {}),
        ("strict_tools", "must be empty where no token id ends", endless, {}),
        ("strict_tools", "go with tools, and a tool_parser", None, {"tool_parser": "none"}),
        ("strict_tools", "must be names of functions in tools", None, {"tools": []}),
        ("parallel_tool_calls", "must be", None, {"parallel_tool_calls": "no"}),
        (
            "parallel_tool_calls",
            "must be True without strict_tools",
            None,
            {"parallel_tool_calls": False, "strict_tools": ()},
        ),
        ("max_whitespace", r"in \[0, 32\], got 33", None, {"max_whitespace": 33}),
        (
            "max_whitespace",
            "must be None without strict_tools",
            None,
            {"max_whitespace": 0, "strict_tools": ()},
        ),
        ("tools", "with names of their own", None, {"tools": [TOOLS[0], TOOLS[0]]}),
    ]
    async with Engine(ScriptedModel(TEMPLATE, "x")) as engine:
        for argument, complaint, params, options in wrong:
            with pytest.raises(InvalidRequestError, match=complaint) as told:
                engine.chat(ASK, params, **{**strict, **options})
            assert told.value.argument == argument
        assert engine.stats().num_waiting == 0
        check_invariants(engine)
