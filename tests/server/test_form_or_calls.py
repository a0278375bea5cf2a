"""Form of JSON beside tools that the model may call, in all APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.server.serving import served
from tests.server.talking import (
    ASK,
    CHAT_BODY,
    HERMES,
    TOOLS,
    chat_joined,
    chat_whole,
    post,
    pyhelp_with,
    scripted,
)
from tests.server.test_strict_tools import BLOCKS, CALL, FLAT, LLAMA, ONE_BY_ONE, SCHEMAS, STRICT

pytestmark = pytest.mark.asyncio

PATH, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
FLAT_FORM = {"type": "json_schema", "name": "a", "schema": SCHEMA}
QUOTED = '{"answer": "<tool_call>{} </think>"}'
BODIES: dict[str, dict[str, Any]] = {
    PATH: CHAT_BODY | {"tools": TOOLS, "response_format": FORM},
    RESPONSES: {"model": "scripted", "input": "Rain?", "tools": FLAT, "seed": 0}
    | {"text": {"format": FLAT_FORM}},
    MESSAGES: {"model": "scripted", "messages": ASK, "tools": BLOCKS, "max_tokens": 400}
    | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


def told_of(answer: dict[str, Any]) -> tuple[str, list[Any]]:
    """Content and arguments of calls of an answer, in any API."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        calls = [each["function"]["arguments"] for each in message.get("tool_calls") or ()]
        return message["content"] or "", list(map(json.loads, calls))
    if "output" in answer:
        items = answer["output"]
        texts = [one["content"][0]["text"] for one in items if one["type"] == "message"]
        calls = [one["arguments"] for one in items if one["type"] == "function_call"]
        return "".join(texts), list(map(json.loads, calls))
    blocks = answer["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return "".join(texts), [block["input"] for block in blocks if block["type"] == "tool_use"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("thought", ["", "<think>hm</think>\n\n"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (QUOTED, (QUOTED, [])),
        (CALL, ("", [{"city": "Oslo"}])),
        ("Let me see.", None),
        (f"Let me see. {CALL}", None),
        (f"{CALL}\n{QUOTED}", None),
    ],
)
async def test_an_answer_is_calls_or_of_the_form(
    path: str, thought: str, text: str, told: tuple[str, list[Any]] | None
) -> None:
    async with scripted(thought + text, **ONE_BY_ONE) as (_, client):
        answer = await client.post(path, json=BODIES[path])
    if told is None:
        assert answer.status_code == 500, answer.text
    else:
        assert answer.status_code == 200, answer.text
        assert told_of(answer.json()) == told


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", [QUOTED, CALL, f"{CALL}\n{CALL}"])
async def test_a_streamed_answer_of_chat_is_the_whole_one(text: str) -> None:
    async with scripted(text, **ONE_BY_ONE) as (_, client):
        whole = chat_whole(await post(client, PATH, BODIES[PATH]))
        streamed = chat_joined(await post(client, PATH, BODIES[PATH] | {"stream": True}))
    assert streamed == whole
    assert bool(whole[0]["calls"]) is (text != QUOTED)


@pytest.mark.parametrize("text", [QUOTED, CALL])
async def test_a_streamed_response_is_the_whole_one(text: str) -> None:
    async with scripted(text, **ONE_BY_ONE) as (_, client):
        whole = (await client.post(RESPONSES, json=BODIES[RESPONSES])).json()
        answer = await client.post(RESPONSES, json=BODIES[RESPONSES] | {"stream": True})
    ends = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: ") and '"response.completed"' in line
    ]
    assert told_of(ends[-1]["response"]) == told_of(whole)
    assert whole["text"]["format"]["type"] == "json_schema"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_model_draws_is_calls_or_of_the_form(tmp_path: Path, stream: bool) -> None:
    model = pyhelp_with(HERMES.replace("{# </think> #}", ""), tmp_path)
    num_forms = num_calls = 0
    async with served(model=model, num_pages=256) as (engine, client):
        (begins,) = engine.tokenizer.encode("<")
        for bias in (-100, 100):
            body = BODIES[PATH] | {"model": "pyhelp", "tools": STRICT, "stream": stream}
            body |= {"n": 4, "temperature": 1.5, "max_tokens": 120}
            answer = await post(client, PATH, body | {"logit_bias": {str(begins): bias}})
            for choice in (chat_joined(answer) if stream else chat_whole(answer)).values():
                calls, is_cut = choice["calls"], choice["finish_reason"] == "length"
                assert not (choice["content"] and calls)
                if not is_cut and not calls:
                    jsonschema.validate(json.loads(choice["content"]), SCHEMA)
                    num_forms += 1
                for name, arguments in calls[: -1 if is_cut else None]:
                    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
                    num_calls += 1
    assert num_forms
    assert num_calls


@pytest.mark.parametrize(
    ("more", "param", "why"),
    [
        (
            {"response_format": None, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "isn't about JSON",
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<a>", "end": "</a>"}],
                    "triggers": ["<a>"],
                }
            },
            "response_format",
            "isn't about JSON",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"unevaluatedItems": False}},
                }
            },
            "response_format",
            "unevaluatedItems",
        ),
    ],
)
async def test_forms_that_no_answer_beside_tools_can_have_are_refused_by_name(
    more: dict[str, Any], param: str, why: str
) -> None:
    async with scripted(QUOTED) as (_, client):
        answer = await client.post(PATH, json=BODIES[PATH] | more)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (PATH, "response_format"),
        (RESPONSES, "text.format"),
        (MESSAGES, "output_config.format"),
    ],
)
async def test_where_calls_are_json_themselves_a_form_that_takes_one_is_refused_by_name(
    path: str, field: str
) -> None:
    open_schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    bodies = {
        PATH: {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "a"}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema"}}},
    }
    more = bodies[path]
    inner = next(iter(more.values()))
    (inner["json_schema"] if path == PATH else inner["format"])["schema"] = open_schema
    async with scripted(QUOTED, template=LLAMA) as (_, client):
        answer = await client.post(path, json=BODIES[path] | more)
    assert answer.status_code == 400, answer.text
    assert "JSON without a mark" in answer.json()["error"]["message"]
    if path != MESSAGES:
        assert answer.json()["error"]["param"] == field


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", BODIES)
async def test_where_calls_are_json_themselves_an_answer_is_a_call_or_of_the_form(
    path: str,
) -> None:
    called = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    for text, told in ((QUOTED, (QUOTED, [])), (called, ("", [{"city": "Oslo"}]))):
        async with scripted(text, template=LLAMA, **ONE_BY_ONE) as (_, client):
            answer = await client.post(path, json=BODIES[path])
            assert answer.status_code == 200, answer.text
            assert told_of(answer.json()) == told


CHOICES: dict[str, list[Any]] = {
    PATH: ["required", {"type": "function", "function": {"name": "weather"}}],
    RESPONSES: ["required", {"type": "function", "name": "weather"}],
    MESSAGES: [{"type": "any"}, {"type": "tool", "name": "weather"}],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_call_that_must_be_made_comes_first_and_the_form_in_the_next_turn(
    path: str, stream: bool
) -> None:
    """Agents ask like this: the same form in both turns, and a call in the first."""
    arguments = '{"city": "Oslo"}'
    for number, choice in enumerate(CHOICES[path]):
        listed = f'[{{"name": "weather", "arguments": {arguments}}}]'
        async with scripted(arguments if number else listed, **ONE_BY_ONE) as (_, client):
            body = BODIES[path] | {"tool_choice": choice, "stream": stream}
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            if stream:
                assert "weather" in answer.text
            else:
                assert told_of(answer.json()) == ("", [{"city": "Oslo"}])
        async with scripted(QUOTED, **ONE_BY_ONE) as (_, client):
            kinds = {PATH: ["auto", "none"], RESPONSES: ["auto", "none"]}
            choices = kinds.get(path, [{"type": "auto"}, {"type": "none"}])
            for later in choices:
                answer = await client.post(path, json=BODIES[path] | {"tool_choice": later})
                assert answer.status_code == 200, answer.text
                assert told_of(answer.json()) == (QUOTED, [])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"structured_outputs": {"max_whitespace": 0}}, [0]),
        ({}, [0, 1]),
        ({"structured_outputs": {"max_whitespace": 2}}, [0, 1, 2]),
        (
            {"response_format": None, "structured_outputs": {"json": SCHEMA, "max_whitespace": 2}},
            [0, 1, 2],
        ),
    ],
)
async def test_white_space_of_either_is_what_the_body_says(
    given: dict[str, Any], taken: list[int]
) -> None:
    for text in ('{"answer":SPACE""}', CALL.replace(": ", ":SPACE").replace(", ", ",")):
        texts = [text.replace("SPACE", " " * count) for count in range(4)]
        async with scripted(*texts, **ONE_BY_ONE) as (_, client):
            good = [
                seed
                for seed in range(4)
                if (await client.post(PATH, json=BODIES[PATH] | given | {"seed": seed})).is_success
            ]
        assert good == taken, text


@pytest.mark.more
@pytest.mark.parametrize("spaces", [0, 2])
async def test_white_space_of_a_form_is_that_of_a_call_that_must_be_made(spaces: int) -> None:
    outputs = {"json": SCHEMA, "max_whitespace": spaces}
    more = {"response_format": None, "structured_outputs": outputs, "tool_choice": "required"}
    for count in range(4):
        gap = " " * count
        text = f'[{{"name":{gap}"weather","arguments":{{"city":"Oslo"}}}}]'
        async with scripted(text, **ONE_BY_ONE) as (_, client):
            answer = await client.post(PATH, json=BODIES[PATH] | more)
        assert answer.is_success is (count <= spaces), text
