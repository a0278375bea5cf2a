"""Ollama's API: the same answers, in lines of JSON or in one object."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from aioserve import Engine, SamplingParams
from aioserve.server import ServerSettings
from aioserve.server.ollama.models import details_of
from tests.server.serving import served
from tests.server.talking import ASK, TOOLS, scripted

pytestmark = pytest.mark.asyncio

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
SAID = f"<think>hm</think>Let me see. {CALL}\n{CALL.replace('Oslo', 'Rome')}"
CHAT = {"model": "scripted", "messages": ASK, "options": {"seed": 0}}
COUNTS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def lines(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body | {"stream": False})
    assert answer.status_code == 200, answer.text
    return answer.json()


def joined(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Lines joined to one answer."""
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]
    last = dict(told[-1])
    if "message" in last:
        last["message"] = {
            "role": "assistant",
            "content": "".join(line["message"]["content"] for line in told),
            "thinking": "".join(line["message"].get("thinking", "") for line in told),
            "tool_calls": [c for line in told for c in line["message"].get("tool_calls", [])],
        }
    else:
        last["response"] = "".join(line["response"] for line in told)
    return last


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", answer["created_at"])
    assert all(type(answer[name]) is int and answer[name] >= 0 for name in COUNTS)
    assert sum(answer[name] for name in COUNTS[1:]) <= answer["total_duration"] + 3
    return {n: value for n, value in answer.items() if n not in ("created_at", *COUNTS)}


async def test_a_chat_has_its_reasoning_its_text_and_its_calls() -> None:
    async with scripted(SAID) as (_, client):
        body = CHAT | {"tools": TOOLS, "keep_alive": "5m"}
        told = await lines(client, "/api/chat", body)
        answer = without_times(await whole(client, "/api/chat", body))
    message = answer["message"]
    assert (message["thinking"], message["content"]) == ("hm", "Let me see.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": city}} for city in ("Oslo", "Rome")
    ]
    assert (answer["done_reason"], answer["eval_count"]) == ("stop", len(SAID) + 1)
    assert without_times(joined(told)) == answer


async def test_a_cut_off_answer_says_so() -> None:
    async with scripted(CALL) as (_, client):
        body = CHAT | {"tools": TOOLS, "options": {"seed": 0, "num_predict": len(CALL) - 25}}
        answer = await whole(client, "/api/chat", body)
    assert (answer["done_reason"], answer["eval_count"]) == ("length", len(CALL) - 25)
    assert answer["message"]["tool_calls"] == [{"function": {"name": "weather", "arguments": {}}}]


async def test_earlier_calls_and_their_results_are_what_the_template_reads() -> None:
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    other = {"name": "move", "arguments": {"to": "north"}}
    turns = [
        *ASK,
        {"role": "assistant", "thinking": "hm", "tool_calls": [{"function": function},
         {"function": other}]},
        {"role": "tool", "content": "went", "tool_name": "move"},
        {"role": "tool", "content": "rain", "new_field": 1},
    ]  # fmt: skip
    template = (
        "{{ tools }}<tool_call>{% for m in messages %}[{{ m.role }} {{ m.content }} "
        "{{ m.reasoning_content }} {{ m.name }} {{ m.tool_call_id }}"
        "{% for c in m.tool_calls %} {{ c.id }} {{ c.function | tojson }}{% endfor %}]{% endfor %}"
    )
    async with scripted("Rain.", template=template) as (engine, client):
        seen: list[Any] = []
        chat = engine.chat

        def noted(messages: Any, *args: Any, **options: Any) -> Any:
            seen.append(messages)
            return chat(messages, *args, **options)

        engine.chat = noted
        answer = await whole(client, "/api/chat", CHAT | {"messages": turns, "tools": TOOLS})
        wrong = await client.post("/api/chat", json=CHAT | {"messages": [*ASK, turns[-1]]})
    assert answer["message"]["content"] == "Rain."
    (messages,) = seen
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert all(re.fullmatch("[a-z0-9]{9}", one) for one in ids)
    assert messages[1]["reasoning_content"] == "hm"
    assert [(m["tool_call_id"], m["name"]) for m in messages[2:]] == [
        (ids[1], "move"),
        (ids[0], "weather"),
    ]
    assert wrong.status_code == 400
    assert "messages[1] must have a call before it" in wrong.json()["error"]


async def test_a_text_is_answered_by_the_template_or_raw() -> None:
    options = {"num_predict": 12, "temperature": 0}
    body = {"model": "pyhelp:latest", "prompt": "os.path.join", "options": options}
    greedy = SamplingParams(max_tokens=12, temperature=0)
    async with served(num_pages=256) as (engine, client):
        for more, wanted in (
            ({"raw": True}, (await engine.generate("os.path.join", greedy)).text),
            (
                {"system": "Be brief."},
                await chat_of(
                    engine,
                    [
                        {"role": "system", "content": "Be brief."},
                        {"role": "user", "content": "os.path.join"},
                    ],
                    greedy,
                ),
            ),
        ):
            told = joined(await lines(client, "/api/generate", body | more))
            answer = await whole(client, "/api/generate", body | more)
            assert told["response"] == answer["response"] == wanted
            assert without_times(told) == without_times(answer)
            assert answer["model"] == "pyhelp"


async def chat_of(engine: Engine, messages: list[dict[str, str]], params: SamplingParams) -> str:
    return (await engine.chat(messages, params).completion()).content


async def test_options_are_what_the_engine_draws_with() -> None:
    options = {
        "num_predict": 5,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "seed": 7,
        "stop": ["x"],
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "num_ctx": 64,
    }
    seen: list[SamplingParams] = []
    async with scripted("Rain.") as (engine, client):
        chat = engine.chat

        def noted(messages: Any, params: SamplingParams, **more: Any) -> Any:
            seen.append(params)
            return chat(messages, params, **more)

        engine.chat = noted  # pyright: ignore[reportAttributeAccessIssue]
        await whole(client, "/api/chat", CHAT | {"options": options})
        await whole(client, "/api/chat", CHAT | {"options": {"num_predict": -1, "seed": -1}})
    assert seen[0] == SamplingParams(
        max_tokens=5, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, typical_p=0.8, seed=7,
        stop="x", repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2,
    )  # fmt: skip
    assert (seen[1].max_tokens, seen[1].seed) == (None, None)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_an_answer_has_the_form_that_is_asked_for(path: str) -> None:
    asked = {"messages": ASK} if path == "/api/chat" else {"prompt": "os"}
    schema = {"enum": ["page", "slot"]}
    async with served(num_pages=256) as (_, client):
        for given, is_good in (
            (schema, lambda said: json.loads(said) in ("page", "slot")),
            ("json", lambda said: said.startswith("{")),
        ):
            body = {"model": "pyhelp", "format": given, "options": {"num_predict": 30}, **asked}
            answer = await whole(client, path, body)
            said = answer["message"]["content"] if path == "/api/chat" else answer["response"]
            assert is_good(said)
        raw = {"model": "pyhelp", "prompt": "os", "raw": True, "format": schema}
        assert json.loads((await whole(client, "/api/generate", raw))["response"])


SWITCH = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"


@pytest.mark.parametrize("think", [True, False, "high"])
async def test_thinking_is_what_the_template_reads_of_it(think: Any) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with scripted("Rain.", template=template + SWITCH) as (_, client):
        plain = await whole(client, "/api/chat", CHAT)
        told = await whole(client, "/api/chat", CHAT | {"think": think})
    more = len("False" if think is False else "True")
    assert told["prompt_eval_count"] == plain["prompt_eval_count"] + more


async def test_an_empty_prompt_asks_for_a_model_that_is_there() -> None:
    async with scripted("Rain.") as (_, client):
        for path in ("/api/chat", "/api/generate"):
            answer = await whole(client, path, {"model": "scripted", "keep_alive": 0})
            assert (answer["done"], answer["done_reason"]) == (True, "load")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("path", "change", "why", "status"),
    [
        ("/api/chat", {"model": "other"}, "the model 'other' isn't served here", 404),
        ("/api/chat", {"options": {"mirostat": 1}}, "options.mirostat isn't supported", 400),
        ("/api/chat", {"options": {"top_p": 2}}, "options.top_p must be", 400),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict must be", 400),
        ("/api/chat", {"options": {"num_ctx": "x"}}, "options.num_ctx: expected", 400),
        ("/api/chat", {"options": {"repeat_last_n": 32}}, "options.repeat_last_n must be -1", 400),
        ("/api/chat", {"options": {"stop": ["a"] * 20}}, "stop", 400),
        ("/api/chat", {"format": "xml"}, "format must be 'json' or a schema", 400),
        ("/api/chat", {"format": {"type": "b"}}, "format must", 400),
        ("/api/chat", {"logprobs": True}, "logprobs isn't supported", 400),
        ("/api/chat", {"think": "much"}, "think isn't supported", 400),
        ("/api/chat", {"cache": 1}, "cache isn't supported", 400),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["y"]}]},
         "messages[0].images aren't supported", 400),
        ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", 400),
        ("/api/generate", {"suffix": "x"}, "suffix isn't supported by this model", 400),
        ("/api/generate", {"context": [1]}, "context isn't supported", 400),
        ("/api/generate", {"template": "x"}, "template isn't supported", 400),
        ("/api/generate", {"raw": True, "system": "x"}, "raw goes with neither", 400),
        ("/api/show", {"model": "other"}, "the model 'other' isn't served here", 404),
    ],
)  # fmt: skip
async def test_what_is_wrong_or_not_supported_is_named(
    path: str, change: dict[str, Any], why: str, status: int
) -> None:
    body: dict[str, Any] = {"model": "scripted"}
    body |= {"/api/chat": {"messages": ASK}, "/api/generate": {"prompt": "x"}}.get(path, {})
    async with scripted("Rain.") as (_, client):
        answer = await client.post(path, json=body | change)
    assert answer.status_code == status, answer.text
    assert why in answer.json()["error"]
    assert answer.json().keys() == {"error"}


async def test_an_error_in_a_stream_is_its_last_line() -> None:
    async with (
        scripted("Rain." * 300, max_buffered_tokens=8) as (engine, client),
        client.stream("POST", "/api/chat", json=CHAT) as answer,
    ):
        told = answer.aiter_lines()
        assert not json.loads(await anext(told))["done"]
        await engine.drain(0)
        rest = [json.loads(line) async for line in told]
    assert rest[-1].keys() == {"error"}
    assert not any(line["done"] for line in rest[:-1])


async def test_models_are_told() -> None:
    settings = ServerSettings(served_model_names=["pyhelp", "other/name"])
    async with served(settings, num_pages=256) as (engine, client):
        tags = (await client.get("/api/tags")).json()["models"]
        running = (await client.get("/api/ps")).json()["models"]
        shown = (await client.post("/api/show", json={"model": "pyhelp:latest"})).json()
        version = (await client.get("/api/version")).json()["version"]
    assert [one["model"] for one in tags] == ["pyhelp", "other/name"]
    assert [one["name"] for one in running] == ["pyhelp", "other/name"]
    assert running[0]["context_length"] == engine.limits.max_model_len
    assert re.fullmatch("[0-9a-f]{64}", tags[0]["digest"])
    assert shown["details"]["family"] == tags[0]["details"]["family"] == "qwen3"
    assert shown["model_info"]["qwen3.context_length"] == engine.limits.max_model_len
    assert shown["capabilities"] == ["completion", "tools"]
    assert version


@pytest.mark.parametrize(
    ("weights", "level", "format"),
    [
        ([], "bfloat16", "safetensors"),
        (["bfloat16", "float32"], "bfloat16", "safetensors"),
        (["float32", "Q4_K", "Q6_K"], "Q4_K", "gguf"),
        (["int4-g32", "int8-g128", "bfloat16"], "int4-g32", "safetensors"),
    ],
)
async def test_details_tell_the_format_of_most_weights(
    weights: list[str], level: str, format: str
) -> None:
    described = {"name": "a", "dtype": "bfloat16", "weights": [{"format": w} for w in weights]}
    details = details_of(described)
    assert (details.quantization_level, details.format) == (level, format)
    assert details.families == ["a"]


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("Qwen3MoeForCausalLM", "qwen3moe"),
        ("GPT2LMHeadModel", "gpt2"),
        ("Qwen3Model", "qwen3"),
        ("Model", "model"),
    ],
)
async def test_a_family_is_called_as_ollama_calls_it(architecture: str, family: str) -> None:
    weights = [{"format": "bfloat16", "parameters": 7_240_000_000}]
    details = details_of({"architecture": architecture, "weights": weights})
    assert (details.family, details.parameter_size) == (family, "7.2B")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
async def test_a_bare_curl_is_answered_and_a_browser_that_names_no_json_is_not(
    path: str, kind: str | None
) -> None:
    """A page may have its browser post to any site. Before it posts JSON, the browser asks that
    site."""
    body = json.dumps({"model": "pyhelp", "prompt": "a", "options": {"num_predict": 1}}).encode()
    if path != "/api/generate":
        body = b'{"model": "pyhelp"}'
    headers = {} if kind is None else {"content-type": kind}
    async with served(num_pages=256) as (_, client):
        answer = await client.post(path, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        for name in ("Origin", "Referer", "Sec-Fetch-Site"):
            answer = await client.post(path, content=body, headers=headers | {name: "null"})
            assert answer.status_code == (403 if name == "Origin" else 415)
        answer = await client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 415


@pytest.mark.parametrize("said", ['{"a": 1}', CALL])
async def test_beside_tools_an_answer_is_calls_or_of_the_format(said: str) -> None:
    async with scripted(said) as (_, client):
        answer = await whole(client, "/api/chat", CHAT | {"format": "json", "tools": TOOLS})
    message, is_call = answer["message"], said == CALL
    assert bool(message.get("tool_calls")) is is_call
    assert message["content"] == ("" if is_call else said)


async def test_results_answer_the_first_open_call_of_their_tool_or_else_the_first() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a", "c", "b")]
    results = [("b", 2), ("x", 1), ("a", 3), ("b", 5), (None, 4)]
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": calls},
        *[
            {"role": "tool", "content": f"{i}"} | ({"tool_name": n} if n else {})
            for n, i in results
        ],
    ]
    template = (
        "{{ tools }}<tool_call>{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ m.tool_call_id }} {{ m.content }};{% endif %}{% endfor %}"
    )
    async with scripted("Rain.", template=template) as (engine, client):
        prompts: list[str] = []
        chat = engine.chat

        def noted(messages: Any, *args: Any, **options: Any) -> Any:
            prompts.extend([f"{m.get('tool_call_id')} {m['content']}" for m in messages[-5:]])
            return chat(messages, *args, **options)

        engine.chat = noted
        await whole(client, "/api/chat", CHAT | {"messages": turns})
        assert prompts == [f"call0000{i} {i}" for _, i in results]
        refused = await client.post("/api/chat", json=CHAT | {"messages": [*turns, turns[-1]]})
    assert refused.status_code == 400
    assert "messages[7] must have a call before it" in refused.json()["error"]


async def test_more_messages_than_are_read_are_refused_before_each_is_looked_at() -> None:
    body = {"messages": [{"role": "user", "content": "a"}] * 10_001}
    async with served() as (_, client):
        for path in ("/api/chat", "/v1/chat/completions"):
            answer = await client.post(path, json=body | {"model": "pyhelp"})
            assert answer.status_code == 400
            assert "messages must have at most 10000 messages" in answer.text
