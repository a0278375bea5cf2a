"""`/v1/messages`, over a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from aioserve.errors import EngineClosedError, QueueFullError, RequestFailedError
from aioserve.server import ServerSettings
from aioserve.server.chat_parts.answering import Content
from tests.server.event_checks import checked_message, events_of, without_ids
from tests.server.scripts import CALL, CALLS, PLAIN, TEMPLATE, scripted, with_tools
from tests.server.serving import served
from tests.waits import until

pytestmark = pytest.mark.asyncio

ASK = {"role": "user", "content": "How is it outside?"}
TOOLS = [{"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}]
BODY: dict[str, Any] = {"model": "scripted", "messages": [ASK], "max_tokens": 1000}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PYHELP: dict[str, Any] = {
    "model": "pyhelp",
    "messages": [{"role": "user", "content": "What is a list?"}],
    "max_tokens": 400,
    "temperature": 0,
}
BEGUN = "<|im_start|>assistant\n"


async def test_an_answer_is_a_block_of_what_the_engine_says() -> None:
    async with scripted() as (_, engine, client):
        answer = (await client.post("/v1/messages", json=BODY)).json()
        whole = await engine.chat([ASK]).completion()
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["content"] == [{"type": "text", "text": PLAIN, "citations": None}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"] == {
        "input_tokens": whole.usage.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": whole.usage.completion_tokens,
    }


async def test_cached_tokens_are_told_apart() -> None:
    async with scripted() as (_, _, client):
        first = (await client.post("/v1/messages", json=BODY)).json()["usage"]
        second = (await client.post("/v1/messages", json=BODY)).json()["usage"]
    assert second["cache_read_input_tokens"] > 0
    total = second["input_tokens"] + second["cache_read_input_tokens"]
    assert total == first["input_tokens"]


async def test_thinking_text_and_tool_use_are_blocks_in_their_order() -> None:
    async with scripted(CALLS) as (_, _, client):
        answer = (await client.post("/v1/messages", json=BODY | {"tools": TOOLS})).json()
        one = {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        alone = (await client.post("/v1/messages", json=BODY | one)).json()
        none = {"tools": TOOLS, "tool_choice": {"type": "none"}}
        text = (await client.post("/v1/messages", json=BODY | none)).json()
    thinking, said, first, second = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert said["text"] == "Let me see."
    for call in (first, second):
        assert (call["name"], call["input"]) == ("weather", {"city": "Oslo \u00c5"})
    assert first["id"] != second["id"]
    assert answer["stop_reason"] == alone["stop_reason"] == "tool_use"
    assert without_ids(alone["content"]) == without_ids([thinking, said, first])
    assert CALL in text["content"][1]["text"]
    assert text["stop_reason"] == "end_turn"


@pytest.mark.more
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_call_that_must_be_made_is_made(choice: Any, tmp_path: Path) -> None:
    schema = CITY
    tools = [{"name": "weather", "input_schema": schema, "strict": True}]
    async with served(model=with_tools(tmp_path), num_pages=256) as (_, client):
        choice = choice | {"disable_parallel_tool_use": True}
        body = PYHELP | {"tools": tools, "tool_choice": choice, "model": tmp_path.name}
        whole = (await client.post("/v1/messages", json=body)).json()
        told = checked_message(
            events_of((await client.post("/v1/messages", json=body | {"stream": True})).text)
        )
        short = body | {"max_tokens": whole["usage"]["output_tokens"] - 4}
        cut = (await client.post("/v1/messages", json=short)).json()
    (call,) = whole["content"]
    assert (call["name"], call["input"]) == ("weather", {"city": "Oslo"})
    assert whole["stop_reason"] == "tool_use"
    assert without_ids(told) == without_ids(whole)
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][0]["input"] in ({}, call["input"])


async def test_tokens_are_counted_as_an_answer_counts_them() -> None:
    prefill = {"role": "assistant", "content": "It"}
    async with scripted() as (_, engine, client):
        for more in ({}, {"system": "Be kind.", "tools": TOOLS}, {"messages": [ASK, prefill]}):
            asked = {"model": "scripted", "messages": [ASK], **more}
            count = (await client.post("/v1/messages/count_tokens", json=asked)).json()
            usage = (await client.post("/v1/messages", json=BODY | more)).json()["usage"]
            cached = usage["cache_read_input_tokens"]
            assert count == {"input_tokens": usage["input_tokens"] + cached}
        generated = engine.stats().tokens_generated_total
        answer = await client.post("/v1/messages/count_tokens", json=BODY)
        assert (answer.status_code, engine.stats().tokens_generated_total) == (400, generated)
    assert "max_tokens" in answer.json()["error"]["message"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", [PLAIN, CALLS, f"<think>a</think>{CALL}", CALL, "", "<think>"])
async def test_a_stream_says_the_same_as_a_whole_answer(text: str) -> None:
    async with scripted(text) as (_, _, client):
        for max_tokens in (1, 12, 60, 1000):
            body = BODY | {"tools": TOOLS, "max_tokens": max_tokens}
            whole = (await client.post("/v1/messages", json=body)).json()
            answer = await client.post("/v1/messages", json=body | {"stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            told = checked_message(events_of(answer.text))
            assert without_ids(told) == without_ids(whole)
            assert told["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
            assert (told["stop_reason"] == "max_tokens") == (len(text) >= max_tokens)


async def test_a_stop_sequence_is_named() -> None:
    async with scripted("One, two, three") as (_, _, client):
        body = BODY | {"stop_sequences": ["three", "two"]}
        whole = (await client.post("/v1/messages", json=body)).json()
        told = checked_message(
            events_of((await client.post("/v1/messages", json=body | {"stream": True})).text)
        )
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "two")
    assert whole["content"][0]["text"] == "One, "
    assert without_ids(told) == without_ids(whole)


async def test_a_context_that_is_full_is_told_from_the_tokens_asked_for() -> None:
    async with scripted("x" * 3000) as (_, _, client):
        full = (await client.post("/v1/messages", json=BODY | {"max_tokens": 10**6})).json()
        cut = (await client.post("/v1/messages", json=BODY | {"max_tokens": 7})).json()
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert cut["stop_reason"] == "max_tokens"


async def test_turns_blocks_and_results_become_messages() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "d"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "none"}],
                    "is_error": True,
                    "cache_control": {"type": "ephemeral", "ttl": "1h"},
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]
    async with scripted() as (seen, _, client):
        body = BODY | {"messages": messages, "system": [*system, {"type": "text", "text": "kind"}]}
        answer = await client.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        plain = BODY | {"messages": [ASK], "system": "Be kind"}
        assert (await client.post("/v1/messages", json=plain)).status_code == 200
    turns = [
        ("system", "Be\nkind"),
        ("user", "a\nb\nc"),
        (
            "assistant",
            'dTHINKHm.CALLt1{"name": "weather", "arguments": {"x": 1}}'
            'CALLt2{"name": "time", "arguments": {}}',
        ),
        ("tool", "rainFORt1weather"),
        ("tool", "Error: noneFORt2time"),
        ("user", "And?"),
    ]
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert seen.prompts[0] == shown + BEGUN
    assert seen.prompts[1].startswith("<|im_start|>system\nBe kind<|im_end|>\n")


async def test_an_answer_goes_on_with_a_last_message_of_the_assistant() -> None:
    async with scripted() as (seen, _, client):
        body = BODY | {"messages": [ASK, {"role": "assistant", "content": "It"}]}
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        body = BODY | {"messages": [ASK, {"role": "assistant", "content": [call]}]}
        answer = await client.post("/v1/messages", json=body)
    assert seen.prompts[-1].endswith(BEGUN + "It")
    assert answer.status_code == 400
    assert "messages[1]" in answer.json()["error"]["message"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: invalid value 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "source": {}}]}]},
            "messages[0].content[0].type: invalid value 'video'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
                ]
            },
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop": ["x"]}, "stop"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking."),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"container": "x"}, "container"),
        ({"metadata": {"user": "x"}}, "metadata.user"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ({"tools": [TOOLS[0] | {"strict": True, "input_schema": {"$ref": "#/no"}}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "b"}}}},
            "output_config.format",
        ),
    ],
)
async def test_what_is_wrong_or_not_supported_is_named(change: dict[str, Any], named: str) -> None:
    async with scripted() as (_, _, client):
        for stream in (False, True):
            answer = await client.post("/v1/messages", json=BODY | change | {"stream": stream})
            assert answer.status_code == 400, answer.text
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert named in answer.json()["error"]["message"]


async def test_what_asks_for_nothing_is_let_through() -> None:
    nothing = {
        "cache_control": {"type": "ephemeral"},
        "metadata": {"user_id": "u"},
        "output_config": {},
        "service_tier": "auto",
        "thinking": {"type": "adaptive"},
        "tool_choice": {"type": "auto"},
        "tools": [],
    }
    async with scripted() as (_, _, client):
        answer = await client.post("/v1/messages", json=BODY | nothing)
    assert answer.status_code == 200, answer.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("settings", "change", "past"),
    [
        (
            {"max_items": 2},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]},
        ),
        (
            {"max_metadata_value_chars": 3},
            {"metadata": {"user_id": "abc"}},
            {"metadata": {"user_id": "abcd"}},
        ),
        ({"max_tools": 1}, {"tools": TOOLS}, {"tools": TOOLS * 2}),
        ({"max_stops": 1}, {"stop_sequences": ["a"]}, {"stop_sequences": ["a", "b"]}),
    ],
)
async def test_limits_hold_one_past_them(settings: Any, change: Any, past: Any) -> None:
    async with scripted(settings=ServerSettings(**settings)) as (_, _, client):
        answer = await client.post("/v1/messages", json=BODY | change)
        assert answer.status_code == 200, answer.text
        answer = await client.post("/v1/messages", json=BODY | past)
    assert answer.status_code == 400
    assert next(iter(past)) in answer.json()["error"]["message"]


KEPT = {"type": "clear_thinking_20251015", "keep": "all"}


async def test_edits_that_leave_the_conversation_as_it_is_are_let_through() -> None:
    tools = [TOOLS[0] | {"eager_input_streaming": True}]
    async with scripted() as (_, _, client):
        plain = (await client.post("/v1/messages", json=BODY | {"tools": TOOLS})).json()
        for edits in ([], [KEPT]):
            body = BODY | {"tools": tools, "context_management": {"edits": edits}}
            answer = (await client.post("/v1/messages", json=body)).json()
            assert answer["content"] == plain["content"]
        for edit in ({"type": "clear_tool_uses_20250919"}, {"type": KEPT["type"]}):
            body = BODY | {"context_management": {"edits": [edit]}}
            answer = await client.post("/v1/messages", json=body)
            assert answer.status_code == 400
            assert "context_management.edits[0]" in answer.json()["error"]["message"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFullError("full"), 503, "overloaded_error"),
        (EngineClosedError("closed", state="closed"), 503, "overloaded_error"),
        (RequestFailedError("broken"), 500, "api_error"),
    ],
)
async def test_errors_have_the_shape_of_this_api(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, kind: str
) -> None:
    async with scripted() as (_, engine, client):

        def failing(*_: Any, **__: Any) -> Any:
            raise error

        missing: httpx.Response = await client.post("/v1/messages", json=BODY | {"model": "x"})
        monkeypatch.setattr(engine, "chat", failing)
        answer = await client.post("/v1/messages", json=BODY)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.json()["type"] == "error"


async def test_a_stream_that_fails_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        yield [Content("x")]
        raise RequestFailedError("planted")

    monkeypatch.setattr("aioserve.server.chat_parts.answering.Answering.batches", broken)
    async with scripted() as (_, engine, client):
        text = (await client.post("/v1/messages", json=BODY | {"stream": True})).text
        await until(lambda: not engine.stats().num_running)
    events = events_of(text)
    assert [event["type"] for event in events].count("error") == 1
    assert events[-1]["error"] == {"type": "api_error", "message": "planted"}
    assert all(event["type"] != "message_stop" for event in events)


async def test_an_answer_has_the_form_that_is_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with served(num_pages=256) as (_, client):
        form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        answer = await client.post("/v1/messages", json=PYHELP | {"max_tokens": 100} | form)
    assert answer.json()["content"][0]["text"].startswith("{")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    async with scripted("x" * 1500) as (_, engine, client):
        body = BODY | {"max_tokens": 1500, "stream": stream}
        call = asyncio.create_task(client.post("/v1/messages", json=body))
        await until(lambda: engine.stats().num_running)
        call.cancel()
        await until(lambda: not engine.stats().num_running)
        await until(lambda: not engine.stats().pages_held_by_requests)
        assert engine.stats().tokens_generated_total < 1500


async def test_answers_and_refusals_say_what_the_call_goes_by_as_the_api_does() -> None:
    headers = {"x-request-id": "job-1"}
    async with scripted() as (_, _, client):
        for change, status in (({}, 200), ({"stream": True}, 200), ({"max_tokens": 0}, 400)):
            answer = await client.post("/v1/messages", json=BODY | change, headers=headers)
            assert answer.status_code == status
            assert answer.headers["request-id"] == answer.headers["x-request-id"] == "job-1"
        missed = await client.get("/v1/messages")
        other = await client.get("/v1/models")
    assert missed.headers["request-id"] == missed.headers["x-request-id"]
    assert "request-id" not in other.headers


async def test_an_error_says_what_its_request_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        yield [Content("x")]
        raise RequestFailedError("planted")

    async with scripted(settings=ServerSettings(allowed_hosts=["here"])) as (_, _, client):
        refused = await client.post("/v1/messages", json=BODY | {"max_tokens": 0})
        missing = await client.get("/v1/messages")
        barred = await client.post("/v1/messages", json=BODY, headers={"host": "there"})
        monkeypatch.setattr("aioserve.server.chat_parts.answering.Answering.batches", broken)
        failed = await client.post("/v1/messages", json=BODY | {"stream": True})
    for answer in (refused, missing, barred):
        assert answer.json()["request_id"] == answer.headers["request-id"]
    assert events_of(failed.text)[-1]["request_id"] == failed.headers["request-id"]


SWITCH = "{% if enable_thinking is defined %}THINKS {{ enable_thinking }}.{% endif %}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"thinking": {"type": "disabled"}}, "THINKS False."),
        ({"thinking": {"type": "adaptive"}}, ""),
        ({"output_config": {"effort": "low"}}, "THINKS True."),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, "THINKS False."),
    ],
)
async def test_thinking_is_what_the_template_reads_of_it(change: Any, shown: str) -> None:
    async with scripted(template=TEMPLATE + SWITCH) as (seen, _, client):
        answer = await client.post("/v1/messages", json=BODY | change)
        conversation = {"model": BODY["model"], "messages": BODY["messages"]}
        counted = await client.post("/v1/messages/count_tokens", json=conversation | change)
    assert answer.status_code == 200, answer.text
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    assert [prompt.split(BEGUN)[-1] for prompt in seen.prompts] == [shown, shown]


async def test_a_user_id_may_be_as_long_as_the_settings_say() -> None:
    async with scripted() as (_, _, client):
        for chars, status in ((512, 200), (513, 400)):
            body = BODY | {"metadata": {"user_id": "x" * chars}}
            answer = await client.post("/v1/messages", json=body)
            assert answer.status_code == status, answer.text
    assert "metadata.user_id must have at most 512 characters" in answer.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("choice", ["auto", "any", "tool"])
async def test_a_schema_of_a_tool_may_have_nulls_where_the_api_has_them(
    strict: bool, choice: str
) -> None:
    schema = {"type": "object", "properties": None, "required": None, "additionalProperties": False}
    tool = {"name": "now", "input_schema": schema, "strict": strict}
    chosen = {"type": choice} | ({"name": "now"} if choice == "tool" else {})
    call = {"auto": "It is late.", "any": '[{"name": "now", "arguments": {}}]', "tool": "{}"}
    async with scripted(call[choice]) as (_, _, client):
        body = BODY | {"tools": [tool], "tool_choice": chosen}
        answer = await client.post("/v1/messages", json=body)
        counted = await client.post(
            "/v1/messages/count_tokens",
            json={key: body[key] for key in ("model", "messages", "tools", "tool_choice")},
        )
    assert answer.status_code == 200, answer.text
    assert counted.status_code == 200, counted.text
