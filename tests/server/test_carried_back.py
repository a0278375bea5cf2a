"""Messages that clients send back: unknown fields are dropped, counted and logged."""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
import pytest

from aioserve.server.chat_parts.unknown_fields import MAX_NAMES, MAX_UNKNOWN, PLACES
from tests.server.scripts import scripted

pytestmark = pytest.mark.asyncio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "What is 1 and 2?"}
CALL = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
RESULT = {"role": "tool", "tool_call_id": "a1", "content": "3"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ITEM_CALL = {"type": "function_call", "call_id": "a1", "name": "add", "arguments": "{}"}
ITEM_RESULT = {"type": "function_call_output", "call_id": "a1", "output": "3"}
ITEM_USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "a1", "name": "add", "input": {"a": 1}}
USE_RESULT = {"type": "tool_result", "tool_use_id": "a1", "content": "3"}


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "It is 3.", **fields}


def calling(**fields: Any) -> dict[str, Any]:
    return {**CALLING, "tool_calls": [{**CALL, **fields}]}


def text(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "It is 3.", **fields}]


def output_text(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "output_text", "text": "It is 3.", **fields}]


def item(**fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": "It is 3.", **fields}


def blocks(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "x"}
PLAIN_TEXT = {"type": "document", "source": TEXT_SOURCE}
CITING = {**PLAIN_TEXT, "citations": {"enabled": True}}
PDF = {"type": "document", "source": {"type": "base64", "data": "x"}}
CITED = [{"type": "url_citation", "url": "x"}]
ODD = {"function": {**CALL["function"], "parsed_arguments": {"a": 1}}}
IN_CHAT: list[tuple[list[Any], list[Any], dict[str, int]]] = [
    # openai: .parse() and .stream()
    ([USER, said(parsed={"x": 1}, refusal=None, annotations=[])], [USER, said()], {"message": 1}),
    ([USER, said(refusal="")], [USER, said()], {}),
    (
        [USER, calling(index=0, **ODD), RESULT],
        [USER, CALLING, RESULT],
        {"tool_call": 2},
    ),
    ([USER, said(parsed=None, audio=None, function_call=None)], [USER, said()], {}),
    ([USER, {"role": "assistant", "refusal": "It is 3."}], [USER, said()], {}),
    ([USER, said(content=None, refusal="It is 3.", tool_calls=None)], [USER, said()], {}),
    ([USER, said(content="No.", refusal="And no.")], [USER, said(content="No.\nAnd no.")], {}),
    (
        [USER, said(content=[{"type": "refusal", "refusal": "It is 3.", "x": 1}])],
        [USER, said()],
        {"part": 1},
    ),
    ([USER, said(annotations=CITED)], [USER, said()], {"message": 1}),
    # litellm
    (
        [USER, said(provider_specific_fields={"a": 1}, thinking_blocks=[{}])],
        [USER, said()],
        {"message": 2},
    ),
    # cache marks of routers
    (
        [{**USER, "content": text(cache_control={"type": "ephemeral"})}, said()],
        [{**USER, "content": text()}, said()],
        {"part": 1},
    ),
    ([USER, said(tool_calls=None)], [USER, said()], {}),
    # instructor
    ([USER, {**CALLING, "content": []}, RESULT], [USER, CALLING, RESULT], {}),
    ([USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT], [USER, CALLING, RESULT], {}),
    ([{**USER, "tool_calls": []}, said()], [USER, said()], {}),
    ([USER, {**calling(type=None)}, RESULT], [USER, CALLING, RESULT], {}),
    (
        [USER, said(reasoning="Hm.", reasoning_content="Hm.", reasoning_details=[{}])],
        [USER, said(reasoning_content="Hm.")],
        {"message": 1},
    ),
    (
        [USER, {"role": "assistant", "content": None, "reasoning_content": "Hm."}, USER],
        [USER, {"role": "assistant", "content": "", "reasoning_content": "Hm."}, USER],
        {},
    ),
]
IN_RESPONSES: list[tuple[list[Any], list[Any], dict[str, int]]] = [
    ([ITEM_USER, item(id="m", status="completed", phase="x")], [ITEM_USER, item()], {"message": 1}),
    (
        [ITEM_USER, item(content=output_text(annotations=CITED, logprobs=[{}], parsed=5))],
        [ITEM_USER, item()],
        {"part": 3},
    ),
    (
        [ITEM_USER, item(content=output_text(annotations=[], logprobs=None, parsed=None))],
        [ITEM_USER, item()],
        {},
    ),
    (
        [ITEM_USER, {**ITEM_CALL, "parsed_arguments": {}, "namespace": None}, ITEM_RESULT],
        [ITEM_USER, ITEM_CALL, ITEM_RESULT],
        {"message": 1},
    ),
    (
        [ITEM_USER, item(content=[{"type": "refusal", "refusal": "It is 3."}])],
        [ITEM_USER, item()],
        {},
    ),
    (
        [ITEM_USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, item()],
        [ITEM_USER, item()],
        {"message": 1},
    ),
]
IN_MESSAGES: list[tuple[list[Any], list[Any], dict[str, int]]] = [
    (
        [USER, blocks("assistant", *text(citations=CITED, parsed_output={})), USER],
        [USER, said(), USER],
        {"part": 2},
    ),
    (
        [
            USER,
            blocks("assistant", {"type": "redacted_thinking", "data": "x"}, *text()),
            USER,
        ],
        [USER, said(), USER],
        {"part": 1},
    ),
    (
        [
            blocks(
                "user",
                {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": "What is 1"},
                    "citations": {"enabled": False},
                },
                {
                    "type": "document",
                    "source": {"type": "content", "content": text(x=1)},
                    "title": "A sum",
                    "context": None,
                    "citations": None,
                    "cache_control": {"type": "ephemeral"},
                },
            ),
        ],
        [blocks("user", *text(text="What is 1\nA sum\nIt is 3."))],
        {"part": 1},
    ),
    (
        [USER, said(id="m", model="x", usage={}, stop_reason=None), USER],
        [USER, said(), USER],
        {"message": 3},
    ),
    (
        [
            USER,
            blocks(
                "assistant",
                {"type": "thinking", "thinking": "Hm.", "signature": "s", "x": 1},
                {**USE, "index": 0},
            ),
            blocks(
                "user",
                {
                    **USE_RESULT,
                    "content": text(y=1),
                    "cache_control": {"type": "ephemeral", "scope": "global"},
                },
            ),
        ],
        [
            USER,
            blocks("assistant", {"type": "thinking", "thinking": "Hm."}, USE),
            blocks("user", {**USE_RESULT, "content": "It is 3."}),
        ],
        {"part": 4},
    ),
]
CASES = [
    *((CHAT, "messages", *case) for case in IN_CHAT),
    *(("/tokenize", "messages", *case) for case in IN_CHAT),
    *((RESPONSES, "input", *case) for case in IN_RESPONSES),
    *((MESSAGES, "messages", *case) for case in IN_MESSAGES),
    *(("/v1/messages/count_tokens", "messages", *case) for case in IN_MESSAGES),
]


def body_of(path: str, field: str, turns: list[Any]) -> dict[str, Any]:
    more = {MESSAGES: {"max_tokens": 99}, RESPONSES: {"store": False}}
    return {"model": "scripted", field: turns, **more.get(path, {})}


def counted(metrics: str) -> dict[str, int]:
    """Counts of dropped fields by place, without zeros."""
    rows = re.findall(r'dropped_message_fields_total{place="(\w+)"} ([\d.]+)', metrics)
    assert {place for place, _ in rows} == set(PLACES)
    return {place: int(float(count)) for place, count in rows if float(count)}


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("path", "field", "carried", "plain", "counts"), CASES)
async def test_what_is_unknown_in_messages_changes_nothing_and_is_counted(
    path: str, field: str, carried: list[Any], plain: list[Any], counts: dict[str, int]
) -> None:
    async with scripted() as (seen, _, client):
        for turns in (carried, plain):
            answer = await client.post(path, json=body_of(path, field, turns))
            assert answer.status_code == 200, answer.text
        assert len(seen.prompts) == 2
        assert seen.prompts[0] == seen.prompts[1]
        assert counted((await client.get("/metrics")).text) == counts


async def test_some_of_their_names_are_in_the_log_and_in_no_label(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "aioserve.server")
    odd = {f"odd\n{number}": 1 for number in range(MAX_NAMES + 1)}
    async with scripted() as (_, _, client):
        body = body_of(CHAT, "messages", [USER, said(**odd), USER])
        await client.post(CHAT, json=body, headers={"x-request-id": "mine"})
        metrics = (await client.get("/metrics")).text
        await client.post(CHAT, json=body_of(CHAT, "messages", [USER]))
    (line,) = [one.getMessage() for one in caplog.records if "unknown fields" in one.getMessage()]
    assert "mine: dropped 9 unknown fields" in line
    assert "odd\\n7" in line
    assert "\n" not in line
    assert "odd\\n8" not in line
    assert "odd" not in metrics


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (RESPONSES, "input")])
async def test_more_than_anybody_carries_is_refused(path: str, field: str) -> None:
    async with scripted() as (_, _, client):
        for count, status in ((MAX_UNKNOWN, 200), (MAX_UNKNOWN + 1, 400)):
            odd = {f"odd{number}": 1 for number in range(count)}
            turns = [USER if path == CHAT else ITEM_USER, {**said(), **odd}]
            answer = await client.post(path, json=body_of(path, field, turns))
            assert answer.status_code == status, answer.text
    assert f"at most {MAX_UNKNOWN} unknown fields" in answer.json()["error"]["message"]


async def test_a_name_of_a_message_reaches_the_template_whatever_its_role() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.name }} {% endfor %}"
    turns = [
        {"role": role, "content": "x", "name": role.upper()}
        for role in ("system", "user", "assistant", "user")
    ]
    async with scripted(template=template) as (seen, _, client):
        answer = await client.post(CHAT, json=body_of(CHAT, "messages", turns))
        assert answer.status_code == 200, answer.text
    assert seen.prompts[0].split() == [
        "system:SYSTEM",
        "user:USER",
        "assistant:ASSISTANT",
        "user:USER",
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "field", "turns", "named"),
    [
        (CHAT, "messages", [USER, said(name=5)], "name"),
        (CHAT, "messages", [USER, said(function_call={"name": "f"})], "function_call"),
        (CHAT, "messages", [USER, said(audio={"id": "x"})], "audio"),
        (CHAT, "messages", [USER, said(reasoning="a", reasoning_content="b")], "reasoning"),
        (CHAT, "messages", [USER, said(reasoning_content=5)], "reasoning_content"),
        (CHAT, "messages", [{**USER, "tool_calls": [CALL]}, RESULT], "tool_calls"),
        (CHAT, "messages", [USER, calling(type="custom"), RESULT], "type"),
        (CHAT, "messages", [USER, calling(function={"arguments": "{}"}), RESULT], "name"),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "type"),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}], "text"),
        (CHAT, "messages", [USER, {"role": "assistant", "content": None}], "content"),
        (RESPONSES, "input", [{"type": "item_reference", "id": 5}], "input[0].id"),
        (RESPONSES, "input", [{"type": "web_search_call", "id": "x"}], "input[0].type"),
        (CHAT, "messages", [{**USER, "refusal": "No."}], "refusal"),
        (CHAT, "messages", [{**USER, "content": [{"type": "refusal", "refusal": "x"}]}], "type"),
        (CHAT, "messages", [USER, said(refusal=5)], "refusal"),
        (RESPONSES, "input", [{**ITEM_USER, "content": [{"type": "input_image"}]}], "type"),
        (RESPONSES, "input", [item(id=5)], "input[0].id"),
        (MESSAGES, "messages", [blocks("user", {"type": "image"})], "messages[0].content[0].type"),
        (MESSAGES, "messages", [blocks("user", {"type": "text", "text": 5})], "text"),
        (MESSAGES, "messages", [blocks("user", CITING)], "citations.enabled"),
        (MESSAGES, "messages", [blocks("user", PDF)], "source.type"),
        (MESSAGES, "messages", [USER, blocks("assistant", PLAIN_TEXT)], "can't have document"),
        (
            MESSAGES,
            "messages",
            [blocks("user", {"type": "redacted_thinking", "data": "x"})],
            "can't have redacted_thinking",
        ),
        (MESSAGES, "messages", [{"role": "user"}], "content"),
        (
            MESSAGES,
            "messages",
            [USER, blocks("assistant", {**USE, "caller": {"type": "x"}})],
            "caller.type",
        ),
    ],
)
async def test_what_is_known_and_wrong_or_not_supported_is_still_refused(
    path: str, field: str, turns: list[Any], named: str
) -> None:
    async with scripted() as (_, _, client):
        answer = await client.post(path, json=body_of(path, field, turns))
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 20},
    RESPONSES: {"input": "hi", "store": False},
    MESSAGES: {"messages": [USER], "max_tokens": 99},
    EMBEDDINGS: {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
ANSWERS = (CHAT, COMPLETIONS, RESPONSES)
NO_OPS: list[tuple[tuple[str, ...], str, list[Any], list[Any]]] = [
    (tuple(BODIES), "mm_processor_kwargs", [None], [{"a": 1}]),
    (tuple(BODIES), "odd", [None], [0, "", False, {}]),
    (ANSWERS, "skip_special_tokens", [True], [False, 1]),
    (ANSWERS, "service_tier", ["auto", "default", "flex"], ["mine", 1]),
    ((RESPONSES,), "length_penalty", [1, 1.0], [0.5]),
    ((RESPONSES,), "use_beam_search", [False], [True]),
    ((CHAT, RESPONSES), "add_special_tokens", [False], [True]),
    ((COMPLETIONS, EMBEDDINGS), "add_special_tokens", [True], [False]),
    (ANSWERS, "include_reasoning", [True], [False]),
    (ANSWERS, "separate_reasoning", [True], [False]),
    ((CHAT,), "stream_reasoning", [True], [False]),
    ((CHAT,), "best_of", [1], [2]),
    ((CHAT,), "suffix", [""], ["x"]),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("path", "field", "lets", "refuses"),
    [(path, *case) for paths, *case in NO_OPS for path in paths],
)
async def test_a_field_that_asks_for_what_is_done_anyway_is_let_through_and_else_refused(
    path: str, field: str, lets: list[Any], refuses: list[Any]
) -> None:
    async with scripted() as (_, _, client):
        for value in lets:
            body = {field: value, "model": "scripted", **BODIES[path]}
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        for value in refuses:
            body = {field: value, "model": "scripted", **BODIES[path]}
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            assert f"{field} isn't supported" in answer.json()["error"]["message"]


async def test_an_unknown_null_hides_nothing_that_comes_after_it() -> None:
    async with scripted() as (_, _, client):
        for wrong, named in (
            ({"odd": 1}, "odd"),
            ({"temperature": "x"}, "temperature"),
            ({"tools": [{"type": "function", "function": {"name": "f", "x": 0}}]}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": None}}]}, "tools"),
            ({"metadata": {"a": None, "b": 5}}, "metadata"),
        ):
            body = {"null": None, "model": "scripted", **BODIES[CHAT], **wrong}
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith(named)
        # The last of two fields with the same name counts.
        twice = b'{"odd": null , "odd": 1, "model": "scripted", "messages": []}'
        answer = await client.post(
            CHAT, content=twice, headers={"content-type": "application/json"}
        )
        assert answer.json()["error"]["param"] == "odd"


@pytest.mark.parametrize("path", [*ANSWERS, EMBEDDINGS])
@pytest.mark.parametrize("field", ["request_id", "rid"])
async def test_a_call_goes_by_the_id_of_its_body_where_its_head_has_none(
    path: str, field: str
) -> None:
    body = {"model": "scripted", **BODIES[path], field: "mine"}
    async with scripted() as (_, _, client):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-request-id"] == "mine"
        answer = await client.post(path, json=body, headers={"x-request-id": "head"})
        assert answer.headers["x-request-id"] == "head"
        for bad in ("", "a b", "x" * 129, "a\r\nset-cookie: x", "\u00e9", "\ud800", 5, ["x"]):
            content = (
                msgspec.json.encode({**body, field: bad})
                if bad != "\ud800"
                else (b'{"model":"scripted","%s":"\\ud800"}' % field.encode())
            )
            answer = await client.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, bad
            assert "set-cookie" not in answer.headers
