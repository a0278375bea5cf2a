"""Tools and reasoning in the form that an engine's options say, and errors if nothing says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioserve import Engine
from aioserve.config import ToolParserName
from aioserve.errors import ConfigError, ModelError
from aioserve.server import create_app
from aioserve.testing import FakeModel
from tests.engine.scripted import ScriptedModel
from tests.server.serving import client_of, served
from tests.server.talking import ASK, TOOLS, TURNS, scripted

pytestmark = pytest.mark.asyncio

PATH = "/v1/chat/completions"
SILENT = "{% if tools %}{{ tools | tojson }}{% endif %}" + TURNS
WRITTEN = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "deepseek_v3": "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function"
    '<\uff5ctool▁sep\uff5c>weather\n```json\n{"city": "Oslo"}\n```<\uff5ctool▁call▁end\uff5c>'
    "<\uff5ctool▁calls▁end\uff5c>",
    "deepseek_v31": "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>weather"
    '<\uff5ctool▁sep\uff5c>{"city": "Oslo"}<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "</function>\n</tool_call>",
    "json": '[{"name": "weather", "arguments": {"city": "Oslo"}}]',
}
CHAT = {"model": "scripted", "messages": ASK, "tools": TOOLS}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
OF_ANTHROPIC = [{"name": "weather", "input_schema": {"type": "object"}}]
APIS: dict[str, dict[str, Any]] = {
    PATH: CHAT,
    "/v1/responses": {"model": "scripted", "input": "Rain?", "tools": FLAT, "store": False},
    "/v1/messages": {
        "model": "scripted",
        "messages": ASK,
        "tools": OF_ANTHROPIC,
        "max_tokens": 200,
    },
}


@pytest.mark.parametrize("path", APIS)
async def test_a_caller_hears_what_it_can_do_and_who_can_do_more(path: str) -> None:
    async with scripted("Rain.", template=SILENT) as (_, client):
        answer = await client.post(path, json=APIS[path])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("tools can't be called as the model likes")
    for said in (
        "tool_choice",
        "--tool-parser NAME",
        "hermes, llama3_json, mistral, deepseek_v3, deepseek_v31, glm45, ",
        "glm45, qwen3_coder, harmony, json",
    ):
        assert said in error["message"]
    assert "tool_parser" not in error["message"]
    async with scripted("Rain.", template=TURNS) as (_, client):
        answer = await client.post(path, json=APIS[path])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("tools aren't supported by this model")
    assert "--chat-template FILE" in error["message"]
    assert path == "/v1/messages" or error["param"] == "tools"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", WRITTEN)
async def test_calls_are_read_in_the_form_that_the_engine_is_told(form: ToolParserName) -> None:
    async with scripted(WRITTEN[form], template=SILENT, tool_parser=form) as (engine, client):
        assert engine.reads_tool_calls
        answer = (await client.post(PATH, json=CHAT)).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
        # Without tools, there are no calls.
        plain = (await client.post(PATH, json={**CHAT, "tools": []})).json()
        assert "tool_calls" not in plain["choices"][0]["message"]


async def test_what_a_call_names_goes_before_the_option_and_that_before_the_template() -> None:
    model = ScriptedModel(SILENT + "<tool_call>", WRITTEN["json"])
    async with Engine(model, tool_parser="json") as engine:
        assert (await engine.chat(ASK, tools=TOOLS).completion()).tool_calls
        done = await engine.chat(ASK, tools=TOOLS, tool_parser="hermes").completion()
        assert (done.content, done.tool_calls) == (WRITTEN["json"], ())
    model = ScriptedModel(SILENT + "<tool_call>", WRITTEN["hermes"])
    async with Engine(model, tool_parser="none") as engine:
        done = await engine.chat(ASK, tools=TOOLS).completion()
        assert (done.content, done.tool_calls) == (WRITTEN["hermes"], ())


async def test_reasoning_is_read_in_the_form_that_the_engine_is_told() -> None:
    body = {"model": "scripted", "messages": ASK}
    for parser, reasoning in (("deepseek_r1", "Hm."), ("auto", None), ("none", None)):
        options: Any = {"template": TURNS, "reasoning_parser": parser}
        async with scripted("Hm.</think>Rain.", **options) as (_, client):
            message = (await client.post(PATH, json=body)).json()["choices"][0]["message"]
        assert message.get("reasoning_content") == reasoning
        assert message["content"] == ("Rain." if reasoning else "Hm.</think>Rain.")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{#- tool_parser: json -#}", "json"),
        ("{# tool_parser: llama3_json #}<tool_call>", "llama3_json"),
        ("{# tool_parser: no_such #}<tool_call>", "hermes"),
        ("<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>f\n```json", "deepseek_v3"),
        ("<\uff5ctool▁call▁begin\uff5c>f<\uff5ctool▁sep\uff5c>", "deepseek_v31"),
        ("<tool_call>f\n<arg_key>a</arg_key>", "glm45"),
        ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder"),
    ],
)
async def test_a_template_may_name_the_form(source: str, form: str) -> None:
    async with scripted(WRITTEN[form], template=source + SILENT) as (_, client):
        answer = (await client.post(PATH, json=CHAT)).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_embedded_model_takes_tools_and_what_came_of_them() -> None:
    async with served(num_pages=256) as (engine, client):
        assert engine.reads_tool_calls
        about = {**CHAT, "model": "pyhelp", "temperature": 0, "max_tokens": 60}
        auto = await client.post(PATH, json=about)
        assert auto.status_code == 200, auto.text
        forced = {**about, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
        message = (await client.post(PATH, json=forced)).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        going_on = {**about, "messages": [*ASK, message, result]}
        answer = await client.post(PATH, json=going_on)
        assert answer.status_code == 200, answer.text
        prompt = {"model": "pyhelp", "messages": [*ASK, message, result], "tools": TOOLS}
        ids = (await client.post("/tokenize", json=prompt)).json()["tokens"]
        text = engine.tokenizer.decode(ids, skip_special_tokens=False)
        city = json.loads(call["function"]["arguments"])
        assert f'assistant\n[{{"name": "weather", "arguments": {json.dumps(city)}}}]' in text
        assert "<|im_start|>tool\nrain<|im_end|>" in text
        # Without tools, a prompt is as in training.
        plain = {"model": "pyhelp", "messages": [{"role": "user", "content": "hi"}]}
        ids = (await client.post("/tokenize", json=plain)).json()["tokens"]
        text = engine.tokenizer.decode(ids, skip_special_tokens=False)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_file_is_the_chat_template_in_place_of_the_models_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}{{ eos_token }}")
    for given in (file, str(file)):
        async with Engine("pyhelp", chat_template=given, num_pages=64) as engine:
            ids = await engine.encode([{"role": "user", "content": "hi"}])
            assert engine.tokenizer.decode(ids, skip_special_tokens=False) == "<hi><|im_end|>"
            assert not engine.reads_tool_calls
            async with client_of(create_app(engine)) as client:
                answer = await client.post(PATH, json={**CHAT, "model": "pyhelp"})
                assert "--chat-template" in answer.json()["error"]["message"]


async def test_a_template_that_nobody_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("{% if %}")
    (tmp_path / "latin").write_bytes(b"\xff")
    for name, complaint in (
        (".", "not a regular file"),
        ("broken", "broken: the chat template can't be read"),
        ("latin", "latin: not valid UTF-8"),
    ):
        with pytest.raises(ModelError, match=complaint):
            async with Engine("pyhelp", chat_template=tmp_path / name, num_pages=64):
                pass
    with pytest.raises(ConfigError, match=r"chat_template='x' has no effect with .*FakeModel"):
        Engine(FakeModel(), chat_template="x")
    for option in ("tool_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"{option}: no .*parser 'x'; there are: auto, "):
            Engine("pyhelp", **{option: "x"})  # type: ignore[arg-type]
    for missing in ("no/such", "\0"):
        with pytest.raises(ConfigError, match="chat_template must be a file, and there is no"):
            async with Engine("pyhelp", chat_template=missing, num_pages=64):
                pass
    with pytest.raises(ConfigError, match="chat_template"):
        Engine("pyhelp", chat_template="")
