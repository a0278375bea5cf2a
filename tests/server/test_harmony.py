"""Model that writes harmony: all APIs read its channels, and continue from them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server import event_checks
from tests.server.scripts import scripted
from tests.server.talking import chat_joined, chat_whole, events_of

pytestmark = pytest.mark.asyncio

TEMPLATE = """
{%- set called = namespace(name="") -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort or "medium" }}
{%- if builtin_tools %} Tools: {{ builtin_tools | join(",") }}{% endif %}<|end|>
{%- if messages[0].role in ["system", "developer"] %}<|start|>developer<|message|>
{{- messages[0].content }}<|end|>{% endif %}
{%- if tools %}<|start|>developer<|message|>namespace functions {
{%- for tool in tools %} type {{ tool.function.name }} = (_: {
{%- for name, of in tool.function.parameters.properties.items() %}{{ name }}: {{ of.type }}
{%- endfor %}}) => any;{% endfor %} }<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|start|>functions.{{ called.name }} to=assistant
{{- "<|channel|>commentary<|message|>" + message.content | tojson }}<|end|>
{%- elif message.role == "assistant" and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception("one of them") }}{% endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- message.thinking }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}{% set called.name = call.name %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>
{{- message.content }}<|end|>
{%- elif message.role == "user" %}<|start|>user<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""
ANALYSIS = "<|channel|>analysis<|message|>Hm, \u00c5.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"


def call(city: str) -> str:
    head = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    return f'{head}{{"city": "{city}"}}'


FINAL = "<|channel|>final<|message|>"


def final(text: str) -> str:
    return f"{FINAL}{text}<|return|>"


CALLS = f"{ANALYSIS}{PREAMBLE}{call('Oslo')}<|end|><|start|>assistant{call('Bonn')}<|call|>"
ANSWERS = (CALLS, ANALYSIS + final("It rains."), final("Yes."), "Plain.", f"{ANALYSIS}<|chan", "")
TOOL: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
ASK = {"role": "user", "content": "How is it outside?"}
CHAT = {"model": "scripted", "messages": [ASK], "tools": TOOLS}
RESPONSES = {
    "model": "scripted",
    "input": "How?",
    "tools": [TOOL | {"type": "function", "strict": False}],
}
MESSAGES = {
    "model": "scripted",
    "messages": [ASK],
    "max_tokens": 900,
    "tools": [{"name": "weather", "input_schema": TOOL["parameters"]}],
}


async def posted(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def test_each_api_tells_reasoning_content_and_calls() -> None:
    async with scripted(CALLS, template=TEMPLATE) as (_, _, client):
        chat = (await posted(client, "/v1/chat/completions", CHAT)).json()["choices"][0]
        response = (await posted(client, "/v1/responses", RESPONSES)).json()
        message = (await posted(client, "/v1/messages", MESSAGES)).json()
    said = chat["message"]
    assert (said["reasoning_content"], said["content"]) == ("Hm, \u00c5.", "Let me see.")
    calls = [json.loads(one["function"]["arguments"]) for one in said["tool_calls"]]
    assert calls == [{"city": "Oslo"}, {"city": "Bonn"}]
    assert chat["finish_reason"] == "tool_calls"
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    blocks = [block["type"] for block in message["content"]]
    assert blocks == ["thinking", "text", "tool_use", "tool_use"]
    assert message["stop_reason"] == "tool_use"
    assert "<|" not in json.dumps([said, response["output"], message["content"]])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(len(ANSWERS)))
async def test_a_stream_says_the_same_as_a_whole_answer(seed: int) -> None:
    stream = {"stream": True}
    async with scripted(ANSWERS[seed], template=TEMPLATE) as (_, _, client):
        for more in ({}, {"max_tokens": 30}):
            body = CHAT | more
            whole = (await posted(client, "/v1/chat/completions", body)).json()
            told = events_of((await posted(client, "/v1/chat/completions", body | stream)).text)
            assert chat_joined(told[:-1]) == chat_whole(whole)
        whole = (await posted(client, "/v1/responses", RESPONSES)).json()
        told = (await posted(client, "/v1/responses", RESPONSES | stream)).text
        response = event_checks.checked_response(event_checks.events_of(told))
        assert event_checks.without_ids(response["output"]) == event_checks.without_ids(
            whole["output"]
        )
        whole = (await posted(client, "/v1/messages", MESSAGES)).json()
        told = (await posted(client, "/v1/messages", MESSAGES | stream)).text
        message = event_checks.checked_message(event_checks.events_of(told))
        assert event_checks.without_ids(message["content"]) == event_checks.without_ids(
            whole["content"]
        )


HISTORY = (
    "<|start|>assistant<|channel|>analysis<|message|>Hm, \u00c5.\nLet me see.<|end|>"
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}'
    "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
    '"rain"<|end|>'
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}'
    "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
    '"sun"<|end|><|start|>assistant'
)


async def test_what_was_told_goes_back_as_harmony_one_call_after_the_other() -> None:
    async with scripted(CALLS, template=TEMPLATE) as (seen, _, client):
        said = (await posted(client, "/v1/chat/completions", CHAT)).json()["choices"][0]["message"]
        said = {name: value for name, value in said.items() if value is not None}
        results = [
            {"role": "tool", "tool_call_id": one["id"], "content": text}
            for one, text in zip(said["tool_calls"], ("rain", "sun"), strict=True)
        ]
        for order in (results, results[::-1]):
            body = CHAT | {"messages": [ASK, said, *order]}
            await posted(client, "/v1/chat/completions", body)
            assert seen.prompts[-1].endswith(HISTORY)
        bare = said | {"content": None}
        body = CHAT | {"messages": [ASK, bare, *results]}
        await posted(client, "/v1/chat/completions", body)
        assert seen.prompts[-1].endswith(HISTORY.replace("\nLet me see.", ""))


async def test_a_message_that_is_to_go_on_is_left_open_in_its_channel() -> None:
    body = {
        "model": "scripted",
        "messages": [ASK, {"role": "assistant", "content": "It <|rains"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    async with scripted(" cats.<|return|>", template=TEMPLATE) as (seen, _, client):
        answer = (await posted(client, "/v1/chat/completions", body)).json()
        assert answer["choices"][0]["message"]["content"] == " cats."
        assert seen.prompts[-1].endswith("<|channel|>final<|message|>It <|rains")


async def test_instructions_behind_other_messages_are_refused() -> None:
    told = [{"role": "user", "content": "How?"}, {"role": "developer", "content": "Rhyme."}]
    async with scripted(final("Yes."), template=TEMPLATE) as (_, _, client):
        body = {"model": "scripted", "messages": told}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "messages[1] is of the role 'developer'" in answer.json()["error"]["message"]


async def test_instructions_of_the_system_and_of_the_developer_both_reach_the_template() -> None:
    told = [{"role": "developer", "content": "Rhyme."}, {"role": "user", "content": "How?"}]
    body = {"model": "scripted", "instructions": "Be kind.", "input": told}
    async with scripted(final("Yes."), template=TEMPLATE) as (seen, _, client):
        await posted(client, "/v1/responses", body)
    assert "<|start|>developer<|message|>Be kind.\n\nRhyme.<|end|><|start|>user" in seen.prompts[-1]


async def test_effort_and_builtin_tools_reach_the_template() -> None:
    body = CHAT | {
        "reasoning_effort": "high",
        "chat_template_kwargs": {"builtin_tools": ["python"]},
    }
    async with scripted(final("Yes."), template=TEMPLATE) as (seen, _, client):
        await posted(client, "/v1/chat/completions", body)
    assert "Reasoning: high Tools: python<|end|>" in seen.prompts[-1]
    assert "type weather = (_: {city: string}) => any;" in seen.prompts[-1]


CITY = json.dumps({"city": "Oslo"})
NAMED = {"type": "function", "function": {"name": "weather"}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": TOOL["parameters"]}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("text", "change", "content"),
    [
        (FINAL + CITY, {"tools": None, "response_format": FORM}, CITY),
        (FINAL + CITY, {"response_format": FORM}, CITY),
        (call("Oslo"), {"response_format": FORM}, ""),
        (call("Oslo"), {"tool_choice": "required"}, ""),
        (call("Oslo"), {"tool_choice": NAMED}, ""),
        (call("Oslo"), {"tools": [{"type": "function", "function": TOOL | {"strict": True}}]}, ""),
    ],
)
async def test_forms_hold_the_answer_or_its_calls_and_never_the_reasoning(
    text: str, change: dict[str, Any], content: str
) -> None:
    body = {name: value for name, value in (CHAT | change).items() if value is not None}
    async with scripted(ANALYSIS + text, template=TEMPLATE) as (_, _, client):
        answer = (await posted(client, "/v1/chat/completions", body)).json()
    said = answer["choices"][0]["message"]
    assert said["reasoning_content"] == "Hm, \u00c5."
    assert (said["content"] or "") == content
    calls = [json.loads(one["function"]["arguments"]) for one in said.get("tool_calls") or []]
    assert calls == ([] if content else [{"city": "Oslo"}])


REQUIRED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT | {"tool_choice": "required"},
        CHAT | {"tool_choice": NAMED},
        CHAT | {"tool_choice": "required", "structured_outputs": {"max_whitespace": 0}},
    ],
    "/v1/responses": [
        RESPONSES | {"tool_choice": "required"},
        RESPONSES | {"tool_choice": {"type": "function", "name": "weather"}},
    ],
    "/v1/messages": [
        MESSAGES | {"tool_choice": {"type": "any"}},
        MESSAGES | {"tool_choice": {"type": "tool", "name": "weather"}},
    ],
}


def calls_of(whole: dict[str, Any]) -> list[Any]:
    """Arguments of the calls of an answer, in any API."""
    if "choices" in whole:
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "tool_calls"
        told = choice["message"]["tool_calls"]
        return [json.loads(one["function"]["arguments"]) for one in told]
    if "output" in whole:
        calls = [item for item in whole["output"] if item["type"] == "function_call"]
        assert whole["output"][0]["type"] == "reasoning"
        assert whole["output"][1:] == calls
        return [json.loads(one["arguments"]) for one in calls]
    assert whole["content"][0]["type"] == "thinking"
    return [block["input"] for block in whole["content"][1:]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", REQUIRED)
async def test_a_call_that_must_be_made_is_one_in_its_channel(path: str) -> None:
    compact = ANALYSIS + call("Oslo").replace(": ", ":") + "<|call|>"
    async with scripted(compact, template=TEMPLATE) as (_, _, client):
        for body in REQUIRED[path]:
            whole = (await posted(client, path, body)).json()
            assert calls_of(whole) == [{"city": "Oslo"}]
            told = (await posted(client, path, body | {"stream": True})).text
            if path == "/v1/chat/completions":
                assert chat_joined(events_of(told)[:-1]) == chat_whole(whole)
            elif path == "/v1/responses":
                streamed = event_checks.checked_response(event_checks.events_of(told))
                assert calls_of(streamed) == calls_of(whole)
            else:
                streamed = event_checks.checked_message(event_checks.events_of(told))
                assert calls_of(streamed) == calls_of(whole)


@pytest.mark.parametrize("change", [{"tool_choice": "required"}, {"tool_choice": NAMED}])
async def test_a_call_that_must_be_made_has_its_form_and_is_cut_off_without_content(
    change: dict[str, Any],
) -> None:
    wrong = ANALYSIS + call("Oslo").replace("city", "town")
    async with scripted(wrong, template=TEMPLATE) as (_, _, client):
        answer = await client.post("/v1/chat/completions", json=CHAT | change)
        assert answer.status_code == 500, answer.text  # the script ignores its mask
    async with scripted(ANALYSIS + call("Oslo"), template=TEMPLATE) as (_, _, client):
        for most in (3, 12, 20, 40):
            body = CHAT | change | {"max_tokens": most}
            (choice,) = (await posted(client, "/v1/chat/completions", body)).json()["choices"]
            assert choice["finish_reason"] == "length"
            assert not choice["message"]["content"]


async def test_of_several_calls_that_must_be_made_one_is_told_where_one_is_asked_for() -> None:
    twice = f"{ANALYSIS}{call('Oslo')}<|end|><|start|>assistant{call('Bonn')}<|call|>"
    async with scripted(twice, template=TEMPLATE) as (_, _, client):
        body = CHAT | {"tool_choice": "required"}
        whole = (await posted(client, "/v1/chat/completions", body)).json()
        assert calls_of(whole) == [{"city": "Oslo"}, {"city": "Bonn"}]
        # The mask allows one call, and the script ignores it.
        for change in ({"tool_choice": NAMED}, {"parallel_tool_calls": False}):
            answer = await client.post("/v1/chat/completions", json=body | change)
            assert answer.status_code == 500, answer.text
