"""`/v1/responses`, over a real socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from aioserve import Engine
from aioserve.errors import RequestFailedError
from aioserve.server import ServerSettings
from aioserve.server.app_state import AppState, Call
from aioserve.server.call_log import CallLog
from aioserve.server.chat_parts.answering import Content
from aioserve.server.errors import ApiError
from aioserve.server.openai.responses_api import handlers
from aioserve.server.openai.responses_api.response import Response
from aioserve.server.openai.responses_api.response_request import ResponseRequest
from tests.engine.scripted import ScriptedModel
from tests.server.event_checks import checked_response, events_of, without_ids
from tests.server.scripts import CALL, CALLS, PLAIN, TEMPLATE, scripted, with_tools
from tests.server.serving import served
from tests.waits import until

pytestmark = pytest.mark.asyncio

TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]
STRICT = TOOLS[0] | {"strict": True}
BROKEN = TOOLS[0] | {"parameters": {"properties": {"a": {"type": "b"}}}}
BODY: dict[str, Any] = {"model": "scripted", "input": "How is it outside?", "seed": 0}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PYHELP: dict[str, Any] = {"model": "pyhelp", "input": "What is a list?", "temperature": 0}


async def test_an_answer_is_a_message_of_what_the_engine_says() -> None:
    async with scripted() as (_, engine, client):
        answer = (await client.post("/v1/responses", json=BODY)).json()
        prompt = [{"role": "user", "content": BODY["input"]}]
        whole = await engine.chat(prompt).completion()
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    (message,) = answer["output"]
    assert message["content"] == [
        {"type": "output_text", "text": PLAIN, "annotations": [], "logprobs": []}
    ]
    assert answer["usage"] == {
        "input_tokens": whole.usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": whole.usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": whole.usage.total_tokens,
    }


async def test_reasoning_text_and_calls_are_items_in_the_order_in_which_they_were_written() -> None:
    async with scripted(CALLS) as (_, _, client):
        answer = (await client.post("/v1/responses", json=BODY | {"tools": TOOLS})).json()
        one = BODY | {"tools": TOOLS, "parallel_tool_calls": False}
        alone = (await client.post("/v1/responses", json=one)).json()
        told = checked_response(
            events_of((await client.post("/v1/responses", json=one | {"stream": True})).text)
        )
        none = BODY | {"tools": TOOLS, "tool_choice": "none"}
        text = (await client.post("/v1/responses", json=none)).json()["output"]
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Let me see."
    for call in (first, second):
        assert (call["name"], call["arguments"]) == ("weather", '{"city": "Oslo \u00c5"}')
    assert first["call_id"] != second["call_id"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert without_ids(alone["output"]) == without_ids(answer["output"][:3])
    assert without_ids(told["output"]) == without_ids(alone["output"])
    assert alone["parallel_tool_calls"] is False
    assert [item["type"] for item in text] == ["reasoning", "message"]
    assert CALL in text[1]["content"][0]["text"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", [PLAIN, CALLS, f"<think>a</think>{CALL}", CALL, "", "<think>"])
async def test_a_stream_says_the_same_as_a_whole_answer(text: str) -> None:
    async with scripted(text) as (_, _, client):
        for max_output_tokens in (None, 1, 12, 60):
            await check_same(client, text, max_output_tokens)


async def check_same(client: httpx.AsyncClient, text: str, max_output_tokens: int | None) -> None:
    body = BODY | {"tools": TOOLS, "max_output_tokens": max_output_tokens, "metadata": {"a": "b"}}
    whole = (await client.post("/v1/responses", json=body)).json()
    answer = await client.post("/v1/responses", json=body | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = checked_response(events_of(answer.text))
    stored = (await client.get(f"/v1/responses/{told['id']}")).json()
    assert without_ids(told) == without_ids(whole)
    assert stored == told
    assert told["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    details = "output_tokens_details"
    assert told["usage"][details] == whole["usage"][details]
    is_cut_off = max_output_tokens is not None and len(text) >= max_output_tokens
    assert told["status"] == ("incomplete" if is_cut_off else "completed")
    reason = {"reason": "max_output_tokens"} if is_cut_off else None
    assert told["incomplete_details"] == reason
    assert told["output"][-1]["status"] == told["status"]


@pytest.mark.more
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_call_that_must_be_made_is_made(choice: Any, tmp_path: Path) -> None:
    parameters = CITY
    tools = [{"type": "function", "name": "weather", "parameters": parameters, "strict": True}]
    async with served(model=with_tools(tmp_path), num_pages=256) as (_, client):
        body = PYHELP | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        body["model"] = tmp_path.name
        whole = (await client.post("/v1/responses", json=body)).json()
        told = checked_response(
            events_of((await client.post("/v1/responses", json=body | {"stream": True})).text)
        )
        short = body | {"max_output_tokens": whole["usage"]["output_tokens"] - 2}
        cut = (await client.post("/v1/responses", json=short)).json()
    (call,) = whole["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
    assert without_ids(told) == without_ids(whole)
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")


async def test_a_conversation_goes_on_from_a_stored_response() -> None:
    async with scripted(CALLS, PLAIN) as (seen, _, client):
        first = {"tools": TOOLS, "instructions": "Be kind.", "parallel_tool_calls": False}
        asked = (await client.post("/v1/responses", json=BODY | first)).json()
        call = asked["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call, "output": "rain"}
        more = {"input": [result], "tools": TOOLS, "seed": 1}
        going_on = BODY | more | {"previous_response_id": asked["id"]}
        told = (await client.post("/v1/responses", json=going_on)).json()
        # The same conversation, with all items sent again.
        items = [{"role": "user", "content": BODY["input"]}, *asked["output"], result]
        again = (await client.post("/v1/responses", json=BODY | more | {"input": items})).json()
        last = {"input": "And now?", "previous_response_id": told["id"], "seed": 1}
        assert (await client.delete(f"/v1/responses/{asked['id']}")).status_code == 200
        third = await client.post("/v1/responses", json=BODY | last)
    prompt = seen.prompts[-1]
    assert told["previous_response_id"] == asked["id"]
    assert told["usage"]["input_tokens"] == again["usage"]["input_tokens"]
    assert told["output"][0]["content"][0]["text"] == PLAIN
    assert third.status_code == 200
    assert prompt.count("<|im_start|>") == 6
    assert "Be kind." not in prompt
    assert f"FOR{call}weather" in prompt
    assert "THINKHm.CALL" in prompt
    assert prompt.endswith(f"{PLAIN}<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n" + BEGUN)


async def test_a_response_that_was_cut_off_within_a_call_can_be_gone_on_from() -> None:
    begun = CALLS.index('"city"') + 11
    async with scripted(CALLS, PLAIN) as (seen, _, client):
        short = BODY | {"tools": TOOLS, "max_output_tokens": begun}
        cut = (await client.post("/v1/responses", json=short)).json()
        more = BODY | {"input": "And now?", "previous_response_id": cut["id"], "seed": 1}
        answer = await client.post("/v1/responses", json=more)
    assert (cut["status"], cut["output"][-1]["type"]) == ("incomplete", "function_call")
    assert answer.status_code == 200, answer.text
    city = json.loads(CALLS[CALLS.index('{"city"') : CALLS.index("}") + 1])["city"]
    cut_city = json.loads(cut["output"][-1]["arguments"] + '"}')["city"]
    assert city.startswith(cut_city)
    assert city != cut_city
    assert cut_city in seen.prompts[-1]
    assert city not in seen.prompts[-1]


async def test_a_response_with_a_call_that_is_no_json_can_be_gone_on_from() -> None:
    wrong = CALLS.replace('{"city": ', '{"city"; ')
    async with scripted(wrong, PLAIN) as (seen, _, client):
        told = (await client.post("/v1/responses", json=BODY | {"tools": TOOLS})).json()
        result = {"type": "function_call_output", "output": "That is no JSON."}
        calls = [item["call_id"] for item in told["output"] if item["type"] == "function_call"]
        given = [result | {"call_id": call_id} for call_id in calls]
        more = BODY | {"input": given, "previous_response_id": told["id"], "seed": 1}
        answer = await client.post("/v1/responses", json=more)
    assert answer.status_code == 200, answer.text
    assert calls
    assert '{\\"city\\"; ' in seen.prompts[-1]


BEGUN = "<|im_start|>assistant\n"


async def test_instructions_and_the_first_system_messages_are_one() -> None:
    items = [
        {"role": "developer", "content": "b"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]
    async with scripted() as (seen, _, client):
        body = BODY | {"input": items, "instructions": "a"}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
    turns = [("system", "a\n\nb"), ("user", "c"), ("user", "d")]
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert seen.prompts[-1] == shown + BEGUN


async def test_input_items_are_listed_page_by_page() -> None:
    items = [{"role": "user", "content": str(number)} for number in range(3)]
    async with scripted() as (_, _, client):
        answer = (await client.post("/v1/responses", json=BODY | {"input": items})).json()
        path = f"/v1/responses/{answer['id']}/input_items"
        listed = (await client.get(path)).json()
        page = (await client.get(path, params={"limit": 2, "order": "asc"})).json()
        after = {"after": page["last_id"], "order": "asc"}
        rest = (await client.get(path, params=after)).json()
        wrong = [
            await client.get(path, params=params)
            for params in ({"limit": 0}, {"limit": 101}, {"after": "x"}, {"order": "up"})
        ]
        unknown = await client.get(path, params={"include": "x"})
        twice = await client.get(path, params={"limit": [1, 2]})
    assert [item["content"][0]["text"] for item in listed["data"]] == ["2", "1", "0"]
    assert (listed["first_id"], listed["has_more"]) == (listed["data"][0]["id"], False)
    assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"]
    assert page["has_more"]
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2"]
    params = [answer.json()["error"]["param"] for answer in wrong]
    assert params == ["limit", "limit", "after", "order"]
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "include")
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "limit")


async def test_a_response_that_is_deleted_or_not_stored_is_not_there() -> None:
    async with scripted() as (_, _, client):
        kept = (await client.post("/v1/responses", json=BODY)).json()
        gone = (await client.post("/v1/responses", json=BODY | {"store": False})).json()
        assert (kept["store"], gone["store"]) == (True, False)
        path = f"/v1/responses/{kept['id']}"
        assert (await client.get(path)).json() == kept
        deleted = (await client.delete(path)).json()
        assert deleted == {"id": kept["id"], "object": "response", "deleted": True}
        for response_id in (kept["id"], gone["id"]):
            for method in ("GET", "DELETE"):
                answer = await client.request(method, f"/v1/responses/{response_id}")
                assert answer.status_code == 404
                assert answer.json()["error"]["code"] == "response_not_found"
            body = BODY | {"previous_response_id": response_id}
            answer = await client.post("/v1/responses", json=body)
            assert answer.status_code == 404
            assert answer.json()["error"]["param"] == "previous_response_id"


async def test_a_response_that_is_too_large_to_store_says_that_it_is_not_stored() -> None:
    async with scripted(settings=ServerSettings(max_stored_bytes=0)) as (_, _, client):
        whole = (await client.post("/v1/responses", json=BODY)).json()
        text = (await client.post("/v1/responses", json=BODY | {"stream": True})).text
        told = checked_response(events_of(text))
    assert (whole["store"], told["store"]) == (False, False)


async def test_a_tenant_reads_its_own_responses_alone() -> None:
    async with Engine(ScriptedModel(TEMPLATE, PLAIN)) as engine:
        shared = AppState(engine, ServerSettings())

        def call(tenant: str | None) -> Call:
            return Call(shared, CallLog(call_id="id", tenant=tenant))

        body = ResponseRequest(model="scripted", input="a")
        mine = await handlers.responses.handle(call("a"), body)
        assert isinstance(mine, Response)
        path = handlers.ResponsePath(response_id=mine.id)
        listing = handlers.ListPath(response_id=mine.id)
        going_on = ResponseRequest(model="scripted", input="b", previous_response_id=mine.id)
        for tenant in ("b", None):
            for handler, asked in (
                (handlers.response.handle, path),
                (handlers.delete_response.handle, path),
                (handlers.input_items.handle, listing),
                (handlers.responses.handle, going_on),
            ):
                with pytest.raises(ApiError) as refused:
                    await handler(call(tenant), asked)  # pyright: ignore[reportArgumentType]
                assert refused.value.status == 404
        assert await handlers.response.handle(call("a"), path)
        assert await handlers.responses.handle(call("a"), going_on)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": "", "status": "x"}]}, "input[0].status"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input[0]",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0] | {"async": True}]}, "tools[0].async"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "b"}}}},
            "text.format",
        ),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"truncation": "last"}, "truncation"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_tool_calls": "x"}, "max_tool_calls"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"service_tier": "mine"}, "service_tier"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"tools": [BROKEN | {"strict": True}]}, "tools"),
        ({"tools": [STRICT], "ignore_eos": True}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [BROKEN], "tool_choice": "required"}, "tools"),
    ],
)
async def test_what_is_wrong_or_not_supported_is_named(change: dict[str, Any], param: str) -> None:
    async with scripted() as (_, _, client):
        for stream in (False, True):
            answer = await client.post("/v1/responses", json=BODY | change | {"stream": stream})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
            assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_what_asks_for_nothing_is_let_through() -> None:
    nothing = {
        "background": False,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "reasoning": {"effort": None, "summary": "auto"},
        "service_tier": "auto",
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "top_logprobs": 0,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tool_calls": None,
    }
    async with scripted() as (_, _, client):
        answer = await client.post("/v1/responses", json=BODY | nothing)
    assert answer.status_code == 200, answer.text


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("settings", "change", "past", "param"),
    [
        (
            {"max_items": 2},
            {"input": [{"role": "user", "content": "a"}] * 2},
            {"input": [{"role": "user", "content": "a"}] * 3},
            "input",
        ),
        (
            {"max_metadata": 2},
            {"metadata": {"a": "", "b": ""}},
            {"metadata": {"a": "", "b": "", "c": ""}},
            "metadata",
        ),
        (
            {"max_metadata_key_chars": 3},
            {"metadata": {"abc": ""}},
            {"metadata": {"abcd": ""}},
            "metadata",
        ),
        ({"max_tools": 1}, {"tools": TOOLS}, {"tools": TOOLS * 2}, "tools"),
        ({"max_stops": 1}, {"stop": ["a"]}, {"stop": ["a", "b"]}, "stop"),
        (
            {"max_metadata_value_chars": 3},
            {"metadata": {"a": "abc"}},
            {"metadata": {"a": "abcd"}},
            "metadata.a",
        ),
    ],
)
async def test_limits_hold_one_past_them(settings: Any, change: Any, past: Any, param: str) -> None:
    async with scripted(settings=ServerSettings(**settings)) as (_, _, client):
        answer = await client.post("/v1/responses", json=BODY | change)
        assert answer.status_code == 200, answer.text
        assert answer.json()["metadata"] == change.get("metadata", {})
        answer = await client.post("/v1/responses", json=BODY | past)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_items_of_earlier_responses_count() -> None:
    async with scripted(settings=ServerSettings(max_items=3)) as (_, _, client):
        first = (await client.post("/v1/responses", json=BODY)).json()
        body = BODY | {"previous_response_id": first["id"]}
        second = (await client.post("/v1/responses", json=body)).json()
        body = BODY | {"previous_response_id": second["id"]}
        answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


@pytest.mark.parametrize("limit", [{"max_stored_responses": 2}, {"max_stored_bytes": 5000}])
async def test_the_least_recently_used_response_goes(limit: Any) -> None:
    async with scripted(settings=ServerSettings(**limit)) as (_, _, client):
        made = [(await client.post("/v1/responses", json=BODY)).json() for _ in range(9)]
        found = [
            (await client.get(f"/v1/responses/{one['id']}")).status_code == 200 for one in made
        ]
    kept = sum(found)
    assert 1 < kept < 9
    assert found == [False] * (9 - kept) + [True] * kept


async def test_an_answer_has_the_form_that_is_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "description": "An a.", "schema": schema}
    text = {"format": form | {"strict": True}}
    async with served(num_pages=256) as (_, client):
        body = PYHELP | {"text": text, "max_output_tokens": 100, "presence_penalty": 0.5}
        answer = (await client.post("/v1/responses", json=body)).json()
        told = checked_response(
            events_of((await client.post("/v1/responses", json=body | {"stream": True})).text)
        )
    assert answer["output"][0]["content"][0]["text"].startswith("{")
    assert answer["text"] == text | {"verbosity": "medium"}
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.5, 0)
    assert without_ids(told["output"]) == without_ids(answer["output"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
async def test_who_asks_is_named_in_as_many_characters_as_in_chat(field: str) -> None:
    short, long = {field: "\u00e4" * 512}, {field: "\u00e4" * 513}
    asked = PYHELP | {"max_output_tokens": 1}
    chat = {"model": "pyhelp", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    async with served(num_pages=256) as (_, client):
        answer = await client.post("/v1/responses", json=asked | short)
        assert answer.json()[field] == short[field]
        refused = await client.post("/v1/responses", json=asked | long)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
        assert "at most 512 characters" in refused.json()["error"]["message"]
        if field == "user":
            for name, status in ((short, 200), (long, 400)):
                answer = await client.post("/v1/chat/completions", json=chat | name)
                assert answer.status_code == status


@pytest.mark.more
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    async with served(num_pages=256) as (engine, client):
        more = {"max_output_tokens": 400, "ignore_eos": True, "stream": stream}
        call = asyncio.create_task(client.post("/v1/responses", json=PYHELP | more))
        await until(lambda: engine.stats().num_running)
        call.cancel()
        await until(lambda: not engine.stats().num_running)
        await until(lambda: not engine.stats().pages_held_by_requests)
        assert engine.stats().tokens_generated_total < 400


async def test_a_stream_that_fails_ends_once_and_is_stored_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(*_: Any) -> Any:
        yield [Content("x")]
        raise RequestFailedError("planted")

    monkeypatch.setattr("aioserve.server.chat_parts.answering.Answering.batches", broken)
    async with scripted() as (_, engine, client):
        text = (await client.post("/v1/responses", json=BODY | {"stream": True})).text
        events = events_of(text)
        whole = await client.post("/v1/responses", json=BODY)
        await until(lambda: not engine.stats().num_running)
        failed = events[-1]["response"]
        found = await client.get(f"/v1/responses/{failed['id']}")
        following = await client.post(
            "/v1/responses", json=BODY | {"previous_response_id": failed["id"]}
        )
    ends = [event for event in events if event["type"].split(".")[1] in ENDS]
    assert [event["type"] for event in ends] == ["response.failed"]
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "planted"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (failed["status"], failed["store"], found.json()) == ("failed", True, failed)
    assert (following.status_code, following.json()["error"]["param"]) == (
        400,
        "previous_response_id",
    )
    assert "failed" in following.json()["error"]["message"]
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "request_failed")


ENDS = ("completed", "incomplete", "failed")


async def test_a_call_that_a_stop_string_has_ended_is_incomplete() -> None:
    async with scripted(f"Let me see. {CALL}Wait.") as (_, _, client):
        for stop, status in (("Oslo", "incomplete"), ("Wait", "completed")):
            body = BODY | {"tools": TOOLS, "stop": stop}
            whole = (await client.post("/v1/responses", json=body)).json()
            answer = await client.post("/v1/responses", json=body | {"stream": True})
            told = checked_response(events_of(answer.text))
            assert without_ids(told["output"]) == without_ids(whole["output"])
            assert [item["status"] for item in whole["output"]] == ["completed", status]


@pytest.mark.parametrize("quoted", ["messages[0]", "messages[999]"])
async def test_what_a_client_wrote_is_no_place_in_its_input(quoted: str) -> None:
    form = {"regex": f"({quoted}"}
    async with served(num_pages=64) as (_, client):
        answer = await client.post("/v1/responses", json=PYHELP | {"structured_outputs": form})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "structured_outputs")
    assert f"({quoted}" in error["message"]
