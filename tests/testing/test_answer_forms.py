"""Scripted completions of a fake model under structured output and as calls of tools. Each fits its
request's form, or an error says where it doesn't."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioserve import (
    ConfigError,
    Engine,
    FinishReason,
    RequestFailedError,
    SamplingParams,
    StructuredOutput,
)
from aioserve.testing import FakeModel
from tests.testing.answered import ASK, OSLO, SCHEMA, TOOLS, asked, served


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
