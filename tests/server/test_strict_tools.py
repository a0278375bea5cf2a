"""Strict tools that a model may call, in all APIs: text is free, and calls follow their schemas."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from aioserve.engine import compiling
from tests.server.serving import served
from tests.server.talking import (
    ASK,
    CHAT_BODY,
    TOOLS,
    TURNS,
    chat_joined,
    chat_whole,
    post,
    pyhelp_with,
    scripted,
)
from tests.waits import LIMIT_SECONDS

pytestmark = pytest.mark.asyncio
PATH = "/v1/chat/completions"
LLAMA = "{% if tools %}{{ tools | tojson }}<|python_tag|>{% endif %}" + TURNS
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
STRICT = [one | {"function": one["function"] | {"strict": True}} for one in TOOLS]
FLAT = [{"type": "function", **one["function"]} for one in STRICT]
BLOCKS = [{"name": one["name"], "input_schema": one["parameters"], "strict": True} for one in FLAT]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
GOOD = f"<think>hm</think>Let me see. {CALL}\n{CALL.replace('Oslo', 'Rome')}"
BAD = f"Let me see. {CALL.replace('Oslo', 'Reykjavik')}"
ONE_BY_ONE: dict[str, Any] = {"jump_forward": False}
"""A scripted model writes every token by itself."""
BODIES: dict[str, dict[str, Any]] = {
    PATH: CHAT_BODY | {"tools": STRICT},
    "/v1/responses": {"model": "scripted", "input": "Rain?", "tools": FLAT, "seed": 0},
    "/v1/messages": {"model": "scripted", "messages": ASK, "tools": BLOCKS, "max_tokens": 400},
}


@pytest.fixture(scope="module")
def with_braces(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Model for which an answer that begins with a brace is a call."""
    return pyhelp_with(LLAMA, tmp_path_factory.mktemp("model"))


@pytest.mark.more
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
async def test_what_is_drawn_of_a_call_has_its_form(
    with_braces: str, stream: bool, parallel: bool
) -> None:
    whole = 0
    async with served(model=with_braces, num_pages=256) as (engine, client):
        (brace,) = engine.tokenizer.encode("{")
        for seed in range(3):
            body = {
                "model": "pyhelp",
                "messages": ASK,
                "tools": STRICT,
                "parallel_tool_calls": parallel,
                "stream": stream,
                "seed": seed,
                "temperature": 1.5,
                "max_tokens": 120,
                "n": 4,
                "logit_bias": {str(brace): 100},
            }
            answer = await post(client, PATH, body)
            choices = chat_joined(answer) if stream else chat_whole(answer)
            for choice in choices.values():
                calls = choice["calls"]
                assert calls
                assert parallel or len(calls) == 1
                if choice["finish_reason"] == "length" and not _is_json(calls[-1][1]):
                    calls = calls[:-1]
                for name, arguments in calls:
                    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
                    whole += 1
    assert whole


async def test_streamed_and_whole_answers_are_the_same(with_braces: str) -> None:
    async with served(model=with_braces, num_pages=256) as (engine, client):
        (brace,) = engine.tokenizer.encode("{")
        for bias in (0, 100):
            body = {"model": "pyhelp", "messages": ASK, "tools": STRICT, "seed": 3, "n": 3}
            body |= {"max_tokens": 60, "logit_bias": {str(brace): bias}}
            whole = chat_whole(await post(client, PATH, body))
            assert chat_joined(await post(client, PATH, body | {"stream": True})) == whole


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", BODIES)
async def test_a_call_that_has_its_form_is_told_in_every_api(path: str) -> None:
    async with scripted(GOOD, **ONE_BY_ONE) as (_, client):
        answer = await client.post(path, json=BODIES[path])
        plain = await client.post(path, json=json.loads(_loose(BODIES[path])))
    assert answer.status_code == 200, answer.text
    assert _calls(answer.json()) == [{"city": "Oslo"}, {"city": "Rome"}]
    assert _calls(plain.json()) == _calls(answer.json())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", BODIES)
async def test_a_call_that_has_not_cannot_be_drawn(path: str) -> None:
    async with scripted(BAD, **ONE_BY_ONE) as (_, client):
        answer = await client.post(path, json=BODIES[path])
        plain = await client.post(path, json=json.loads(_loose(BODIES[path])))
    assert answer.status_code == 500, answer.text
    assert _calls(plain.json()) == [{"city": "Reykjavik"}]


async def test_of_one_call_at_most_no_other_can_be_drawn() -> None:
    body = CHAT_BODY | {"tools": STRICT, "parallel_tool_calls": False}
    async with scripted(CALL, CALL + "Wait.", CALL + CALL, **ONE_BY_ONE) as (_, client):
        for seed, status in enumerate((200, 200, 500)):
            answer = await client.post(PATH, json=body | {"seed": seed})
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_a_schema_that_cannot_be_kept_is_refused_with_the_way_out(path: str) -> None:
    broken = json.dumps(BODIES[path]).replace('"type": "string"', '"type": "text"')
    async with scripted("Rain.", **ONE_BY_ONE) as (_, client):
        answer = await client.post(path, json=json.loads(broken))
        loose = await client.post(path, json=json.loads(_loose(json.loads(broken))))
    assert answer.status_code == 400
    assert "or not be strict" in answer.json()["error"]["message"]
    assert loose.status_code == 200, loose.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb"])
@pytest.mark.parametrize("of_strict", [True, False])
async def test_a_name_that_cannot_be_is_told_by_the_place_of_its_tool(
    path: str, name: str, of_strict: bool
) -> None:
    first, second = BODIES[path]["tools"]
    body = json.loads(_loose({"tools": [first, first, first]}))["tools"]
    tools = [_named(one, f"tool{place}") for place, one in enumerate(body)]
    tools.insert(2, _named(second, "other" if not of_strict else name))
    tools[3] = _named(tools[3], name if not of_strict else "other")
    async with scripted("Rain.", **ONE_BY_ONE) as (_, client):
        answer = await client.post(path, json=BODIES[path] | {"tools": tools})
    assert answer.status_code == 400, answer.text
    field = "['function']['name']" if path == PATH else ".name"
    told = f"tools[{2 if of_strict else 3}]{field} must be a str of 1 to 256 characters"
    assert told in answer.json()["error"]["message"]


def _named(tool: dict[str, Any], name: str) -> dict[str, Any]:
    if "function" in tool:
        return tool | {"function": tool["function"] | {"name": name}}
    return tool | {"name": name}


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Forms whose compilation has begun; none of them ends."""
    gate, begun = threading.Event(), list[Any]()

    def never(_: Any, form: Any) -> Any:
        begun.append(form)
        assert gate.wait(LIMIT_SECONDS)
        raise RuntimeError("nobody waits for it")

    monkeypatch.setattr(compiling, "compile_grammar", never)
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.05)
    yield begun
    gate.set()


def _other(body: dict[str, Any], number: int) -> Any:
    """Body with tools of another form."""
    return json.loads(json.dumps(body).replace("weather", f"weather{number}"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", BODIES)
async def test_where_all_forms_take_too_long_the_next_one_is_asked_to_come_back(
    path: str, stuck: list[Any]
) -> None:
    async with scripted("Rain.", **ONE_BY_ONE) as (_, client):
        for number in range(4):
            slow = await client.post(path, json=_other(BODIES[path], number))
            assert slow.status_code == 400, slow.text
        full = await client.post(path, json=_other(BODIES[path], 4))
        plain = await client.post(path, json=json.loads(_loose(BODIES[path])))
        again = await client.post(path, json=_other(BODIES[path], 3))
    assert (full.status_code, full.headers["retry-after"]) == (503, "1"), full.text
    assert "4 threads compile what takes too long" in full.json()["error"]["message"]
    assert full.json()["error"]["type"] == "overloaded_error"
    assert plain.status_code == 200, plain.text
    assert again.status_code == 400, again.text
    assert len(stuck) == 4


async def test_tools_that_do_not_say_are_not_strict_where_their_form_takes_too_long(
    stuck: list[Any],
) -> None:
    path = "/v1/responses"
    body = json.loads(json.dumps(BODIES[path]).replace('"strict": true', '"strict": null'))
    async with scripted("Rain.", **ONE_BY_ONE) as (_, client):
        for number in (0, 0, 0, 1, 2, 3, 4, 5):
            answer = await client.post(path, json=_other(body, number))
            assert answer.status_code == 200, answer.text
            assert [tool["strict"] for tool in answer.json()["tools"]] == [False, False]
    assert len(stuck) == 4


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _loose(body: dict[str, Any]) -> str:
    return json.dumps(body).replace('"strict": true', '"strict": false')


def _calls(answer: dict[str, Any]) -> list[Any]:
    """Arguments of the calls in an answer, in any API."""
    if "choices" in answer:
        calls = answer["choices"][0]["message"]["tool_calls"]
        return [json.loads(call["function"]["arguments"]) for call in calls]
    if "output" in answer:
        items = [item for item in answer["output"] if item["type"] == "function_call"]
        return [json.loads(item["arguments"]) for item in items]
    return [block["input"] for block in answer["content"] if block["type"] == "tool_use"]


SPACED = CALL.replace('"arguments": {', '"arguments":   {')


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        (None, False),
        ({"max_whitespace": 3}, True),
        ({"max_whitespace": 2}, False),
        ({"disable_any_whitespace": True}, False),
    ],
)
async def test_white_space_of_calls_that_the_model_makes_is_what_the_body_says(
    given: dict[str, Any] | None, is_taken: bool
) -> None:
    async with scripted(SPACED, **ONE_BY_ONE) as (_, client):
        body = CHAT_BODY | {"tools": STRICT, "structured_outputs": given}
        answer = await client.post(PATH, json=body)
    assert answer.status_code == (200 if is_taken else 500)


async def test_white_space_of_calls_that_must_be_made_is_what_the_body_says() -> None:
    async with served(num_pages=256) as (engine, client):
        (space,) = engine.tokenizer.encode(" ")
        lengths: list[list[int]] = []
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            for given in ({"max_whitespace": 0}, None, {"max_whitespace": 3}):
                body = {"model": "pyhelp", "messages": ASK, "tools": TOOLS, "tool_choice": choice}
                body |= {"logit_bias": {str(space): 100}, "max_tokens": 100, "seed": 1}
                body |= {"structured_outputs": given}
                answer = (await client.post(PATH, json=body)).json()
                (call,) = answer["choices"][0]["message"]["tool_calls"]
                arguments = call["function"]["arguments"]
                lengths.append([len(run) for run in re.findall(r"(?<=:) *", arguments)][:1])
    assert lengths == [[0], [1], [3]] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("more", "param", "why"),
    [
        ({"tools": TOOLS}, "structured_outputs", "nothing asks for JSON of some form"),
        ({}, "structured_outputs", "nothing asks for JSON of some form"),
        (
            {"tools": STRICT, "structured_outputs": {"max_whitespace": 33}},
            "structured_outputs",
            "33",
        ),
        (
            {
                "tools": STRICT,
                "structured_outputs": {"max_whitespace": 3, "disable_any_whitespace": True},
            },
            "structured_outputs",
            "must be 0 with disable_any_whitespace",
        ),
    ],
)
async def test_white_space_of_nothing_is_refused(
    more: dict[str, Any], param: str, why: str
) -> None:
    async with scripted("Rain.") as (_, client):
        body = CHAT_BODY | {"tools": None, "structured_outputs": {"max_whitespace": 1}} | more
        answer = await client.post(PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert why in answer.json()["error"]["message"]


async def test_white_space_of_a_response_format_is_what_the_body_says() -> None:
    async with served(num_pages=256) as (engine, client):
        (space,) = engine.tokenizer.encode(" ")
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": [1, 2]}}}
        body = {"model": "pyhelp", "messages": ASK, "response_format": form, "max_tokens": 50}
        body |= {"logit_bias": {str(space): 100}, "structured_outputs": {"max_whitespace": 2}}
        answer = (await client.post(PATH, json=body)).json()
    assert "  " in answer["choices"][0]["message"]["content"]
