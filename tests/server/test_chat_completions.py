"""`/v1/chat/completions`, over a real socket."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import (
    ASK,
    CHAT_BODY,
    HERMES,
    TOOLS,
    TURNS,
    chat_joined,
    chat_whole,
    post,
    pyhelp_with,
    scripted,
)

pytestmark = pytest.mark.asyncio
PATH = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLS = f"<think>hm</think>Let me see. {CALL}\n{CALL.replace('Oslo', 'Rome')}"


async def test_an_answer_has_its_message_and_counts() -> None:
    async with scripted("Rain.") as (_, client):
        answer = await post(client, PATH, CHAT_BODY)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Rain.", "refusal": None}
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("stop", 0, None)
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 6


async def test_chunks_begin_with_the_role_and_end_with_the_reason_and_the_counts() -> None:
    async with scripted("Rain.") as (_, client):
        body = CHAT_BODY | {"stream": True, "stream_options": {"include_usage": True}}
        events = await post(client, PATH, body)
    choices = [event["choices"][0] for event in events[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


async def test_counts_so_far_come_with_every_chunk_that_asks() -> None:
    async with scripted("Rain.") as (_, client):
        options = {"continuous_usage_stats": True, "include_usage": True}
        body = CHAT_BODY | {"stream": True, "stream_options": options}
        events = await post(client, PATH, body)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 6)


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_no_counts_come_where_no_usage_is_asked_for(path: str) -> None:
    async with scripted("Rain.") as (_, client):
        what = CHAT_BODY if path == PATH else {"model": "scripted", "prompt": "hi"}
        body = what | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        events = await post(client, path, body)
    assert not [event for event in events if event.get("usage")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("interval", [1, 3, 50])
async def test_tokens_of_the_reasoning_are_counted_alike_whole_and_streamed(interval: int) -> None:
    settings = ServerSettings(served_model_names=["scripted"], stream_interval=interval)
    async with scripted(CALLS, settings=settings) as (_, client):
        body = CHAT_BODY | {"tools": TOOLS}
        whole = await post(client, PATH, body)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events = await post(client, PATH, body)
    usage = whole["usage"]
    details = "completion_tokens_details"
    assert events[-1]["usage"][details] == usage[details]
    told = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len("hm") <= told < usage["completion_tokens"]
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join([delta.get(name, "") for delta in deltas]) == "hm"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_reasoning_are_told_apart(
    parallel: bool | None, count: int, stream: bool
) -> None:
    async with scripted(CALLS) as (_, client):
        body = CHAT_BODY | {"tools": TOOLS, "parallel_tool_calls": parallel, "stream": stream}
        answer = await post(client, PATH, body)
    (choice,) = (chat_joined(answer) if stream else chat_whole(answer)).values()
    assert choice["reasoning"] == "hm"
    assert choice["content"] == "Let me see."
    every = [["weather", '{"city": "Oslo"}'], ["weather", '{"city": "Rome"}']]
    assert choice["calls"] == every[:count]
    assert choice["finish_reason"] == "tool_calls"


async def test_with_tool_choice_none_the_model_hears_of_no_tools() -> None:
    async with scripted("Rain.") as (_, client):
        plain = await post(client, PATH, CHAT_BODY)
        none = await post(client, PATH, CHAT_BODY | {"tools": TOOLS, "tool_choice": "none"})
        auto = await post(client, PATH, CHAT_BODY | {"tools": TOOLS})
    assert none["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert auto["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize("knows", [False, True])
async def test_developer_is_system_where_the_template_knows_no_developer(knows: bool) -> None:
    template = TURNS + ("{# developer #}" if knows else "")
    async with scripted("Rain.", template=template) as (engine, client):
        messages = [{"role": "developer", "content": "Be short."}, *ASK]
        body = {"messages": messages}
        tokens = (await post(client, "/tokenize", body))["tokens"]
        prompt = engine.tokenizer.decode(tokens, skip_special_tokens=False)
    assert prompt.startswith(f"<|im_start|>{'developer' if knows else 'system'}\n")


RAIN = {"type": "text", "text": "Rain"}


async def test_an_answer_may_come_back_as_it_was_sent() -> None:
    async with scripted(CALLS) as (_, client):
        body = CHAT_BODY | {"tools": TOOLS}
        message = (await post(client, PATH, body))["choices"][0]["message"]
        nothing = {"audio": None, "function_call": None, "annotations": []}
        messages = [
            *ASK,
            message | nothing,
            *[
                {"role": "tool", "tool_call_id": call["id"], "content": [RAIN]}
                for call in message["tool_calls"]
            ],
        ]
        answer = await post(client, PATH, body | {"messages": messages})
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_call_in_a_conversation_with_a_model_without_tools_is_the_callers_mistake() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    refusing = "{% if messages[1].tool_calls %}{{ raise_exception('no tools here') }}{% endif %}"
    async with scripted("Rain.", template=refusing) as (_, client):
        body = {"model": "scripted", "messages": [*ASK, called, result, *ASK], "max_tokens": 4}
        answer = await client.post(PATH, json=body)
    assert answer.status_code == 400
    assert "no tools here" in answer.json()["error"]["message"]


async def test_logprobs_have_bytes_and_as_many_tops_as_asked() -> None:
    async with served(num_pages=256) as (_, client):
        body = {"model": "pyhelp", "messages": ASK, "logprobs": True, "max_tokens": 4}
        none = await post(client, PATH, body)
        some = await post(client, PATH, body | {"top_logprobs": 3, "temperature": 0})
        content = some["choices"][0]["logprobs"]["content"]
        without = none["choices"][0]["logprobs"]["content"]
        assert len(content) == 4
        assert [entry["top_logprobs"] for entry in without] == [[]] * 4
        for entry in content:
            assert len(entry["top_logprobs"]) == 3
            assert bytes(entry["bytes"]).decode() == entry["token"]
            assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        text = b"".join([bytes(entry["bytes"]) for entry in content]).decode()
        assert text == some["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    return pyhelp_with(HERMES, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
async def test_a_call_that_is_required_is_made(
    with_tools: str, stream: bool, parallel: bool
) -> None:
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    async with served(model=with_tools, num_pages=256) as (_, client):
        for seed in range(3):
            body = {
                "model": "pyhelp",
                "messages": ASK,
                "tools": TOOLS,
                "tool_choice": "required",
                "parallel_tool_calls": parallel,
                "stream": stream,
                "seed": seed,
                "max_tokens": 400,
                "n": 2,
            }
            answer = await post(client, PATH, body)
            choices = chat_joined(answer) if stream else chat_whole(answer)
            assert sorted(choices) == [0, 1]
            for choice in choices.values():
                assert choice["content"] == choice["reasoning"] == ""
                if choice["finish_reason"] != "tool_calls":
                    assert choice["finish_reason"] == "length"
                    continue
                assert choice["calls"]
                assert parallel or len(choice["calls"]) == 1
                for name, arguments in choice["calls"]:
                    jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", range(1, 12, 2))
async def test_a_call_that_is_cut_off_leaves_no_grammar_in_the_content(
    with_tools: str, stream: bool, max_tokens: int
) -> None:
    body = {
        "model": "pyhelp",
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": "required",
        "stream": stream,
        "max_tokens": max_tokens,
    }
    async with served(model=with_tools, num_pages=256) as (_, client):
        answer = await post(client, PATH, body)
    (choice,) = (chat_joined(answer) if stream else chat_whole(answer)).values()
    assert choice["finish_reason"] == "length"
    assert choice["content"] == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["weather", "move"])
async def test_the_function_that_is_named_is_called(
    with_tools: str, stream: bool, name: str
) -> None:
    (tool,) = [one["function"] for one in TOOLS if one["function"]["name"] == name]
    async with served(model=with_tools, num_pages=256) as (_, client):
        body = {
            "model": "pyhelp",
            "messages": ASK,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": name}},
            "stream": stream,
            "seed": 1,
            "max_tokens": 100,
        }
        answer = await post(client, PATH, body)
    (choice,) = (chat_joined(answer) if stream else chat_whole(answer)).values()
    ((called, arguments),) = choice["calls"]
    assert (called, choice["content"], choice["finish_reason"]) == (name, "", "tool_calls")
    jsonschema.validate(json.loads(arguments), tool["parameters"])


async def test_an_answer_has_the_form_of_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    async with served(num_pages=256) as (_, client):
        body = {"model": "pyhelp", "messages": ASK, "max_tokens": 90, "temperature": 0}
        answer = await post(client, PATH, body | {"response_format": form})
        text = await post(client, PATH, body | {"response_format": {"type": "text"}})
        plain = await post(client, PATH, body)
        named = body | {"structured_outputs": {"choice": ["yes"]}}
        chosen = await post(client, PATH, named)
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), schema)
    assert text["choices"] == plain["choices"]
    assert chosen["choices"][0]["message"]["content"] == "yes"


async def test_a_message_may_be_gone_on_with() -> None:
    async with scripted("more") as (engine, client):
        messages = [*ASK, {"role": "assistant", "content": "Once"}]
        body = {"messages": messages, "continue_final_message": True}
        body["add_generation_prompt"] = False
        answer = await post(client, PATH, CHAT_BODY | body)
        ids = (await post(client, "/tokenize", body))["tokens"]
        assert engine.tokenizer.decode(ids).endswith("Once")
    assert answer["usage"]["prompt_tokens"] == len(ids)


NOTHING_ASKED: list[dict[str, Any]] = [
    {"store": False},
    {"logprobs": False},
    {"service_tier": "auto"},
    {"modalities": ["text"]},
    {"metadata": {}},
    {"user": "me", "safety_identifier": "me", "prompt_cache_key": "mine"},
    {"tools": [], "tool_choice": "auto"},
    {"tool_choice": "none"},
    {"functions": None, "audio": None},
    {"max_tokens": 9, "max_completion_tokens": 9},
    {"prediction": {"type": "content", "content": ""}},
]


async def test_what_asks_for_nothing_is_let_through() -> None:
    async with scripted("Rain.") as (_, client):
        for body in NOTHING_ASKED:
            answer = await post(client, PATH, CHAT_BODY | body)
            assert answer["choices"][0]["message"]["content"] == "Rain."


WEATHER = {"type": "function", "function": {"name": "weather"}}
NAMED = {"type": "function", "function": {"name": "x"}}
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": {"a": DEEP}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": 0}, "store"),
    ({"service_tier": "mine"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"best_of": 2}, "best_of"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"prediction": {"type": "content", "content": [{"type": "image"}]}},
        "prediction.content[0].type",
    ),
    ({"prediction": {"type": "tokens", "content": "x"}}, "prediction.type"),
    ({"prediction": {"content": "x"}}, "prediction"),
    ({"prediction": "x"}, "prediction"),
    ({"max_draft_tokens": 1}, "max_draft_tokens"),
    ({"max_draft_tokens": -1}, "max_draft_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "no"}},
            }
        },
        "response_format",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"user": "x" * 513}, "user"),
    ({"deadline_seconds": 0}, "deadline_seconds"),
    ({"temperature": -1}, "temperature"),
]


async def test_what_is_not_supported_is_refused_by_name() -> None:
    async with scripted("Rain.") as (_, client):
        for body, param in REFUSED:
            answer: httpx.Response = await client.post(PATH, json=CHAT_BODY | body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert error["code"] == "unsupported_parameter"


async def test_what_is_wrong_is_named_as_the_api_names_it() -> None:
    async with scripted("Rain.") as (_, client):
        for body, param in WRONG:
            answer = await client.post(PATH, json=CHAT_BODY | body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert param.split(".")[0] in error["message"]


def _tools(count: int) -> list[Any]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]


def _schema(size: int) -> dict[str, Any]:
    empty = len(json.dumps({"type": "string", "title": ""}, separators=(",", ":")))
    return {"type": "string", "title": "x" * (size - empty)}


def _format(size: int) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(size)}}


AT_LIMIT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("n", {"n": 2}, {"n": 3}),
    ("stop", {"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}),
    ("top_logprobs", {"top_logprobs": 3}, {"top_logprobs": 4}),
    ("tools", {"tools": _tools(2)}, {"tools": _tools(3)}),
    ("response_format", {"response_format": _format(80)}, {"response_format": _format(81)}),
    (
        "structured_outputs",
        {"structured_outputs": {"json": _schema(80)}},
        {"structured_outputs": {"json": _schema(81)}},
    ),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("field", "fits", "too_much"), AT_LIMIT, ids=[row[0] for row in AT_LIMIT])
async def test_limits_are_kept_and_what_is_at_them_is_served(
    field: str, fits: dict[str, Any], too_much: dict[str, Any]
) -> None:
    settings = ServerSettings(
        max_n=2, max_stops=2, max_top_logprobs=3, max_tools=2, max_schema_bytes=80
    )
    body = {"messages": ASK, "logprobs": True, "max_tokens": 4, "seed": 0}
    if "schema" in str(fits) or "json" in str(fits):
        async with served(settings, num_pages=256) as (_, client):
            await post(client, PATH, body | fits | {"model": "pyhelp"})
            answer = await client.post(PATH, json=body | too_much | {"model": "pyhelp"})
    else:
        async with scripted("Rain.", settings=settings) as (_, client):
            await post(client, PATH, body | fits | {"model": "scripted"})
            answer = await client.post(PATH, json=body | too_much | {"model": "scripted"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert error["code"] == "limit_exceeded"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stop", "reason"),
    [("slo", "stop"), ('"city"', "stop"), ("</tool_call>", "tool_calls"), ("Wait", "tool_calls")],
)
async def test_a_call_that_a_stop_string_has_ended_is_none_to_make(stop: str, reason: str) -> None:
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>Wait.'
    async with scripted(written) as (_, client):
        body = CHAT_BODY | {"tools": TOOLS, "stop": stop}
        whole = chat_whole(await post(client, PATH, body))
        assert chat_joined(await post(client, PATH, body | {"stream": True})) == whole
    assert (whole[0]["finish_reason"], whole[0]["stop_reason"]) == (reason, stop)
    ((_, arguments),) = whole[0]["calls"]
    assert (arguments == '{"city": "Oslo"}') == (reason == "tool_calls")
