"""An engine whose model has a separate template for prompts with tools."""

from __future__ import annotations

import pytest

from aioserve import Engine
from aioserve.text.chat_template import ChatTemplate
from tests.engine.scripted import ScriptedModel

pytestmark = pytest.mark.asyncio

PLAIN = "{% for m in messages %}{{ m.content }};{% endfor %}{# <think> #}"
TOOL_USE = "{% for t in tools %}{{ t.function.name }};{% endfor %}{# <tool_call> #}"
ASK = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "clock"}}]
CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


async def test_each_template_tells_how_answers_to_its_prompts_are_read() -> None:
    model = ScriptedModel(PLAIN, CALL)
    model.template = ChatTemplate(
        PLAIN, origin="test", tool_use=ChatTemplate(TOOL_USE, origin="test")
    )
    async with Engine(model) as engine:
        assert engine.reads_tool_calls
        assert engine.template_reads("tools")
        done = await engine.chat(ASK, tools=TOOLS).completion()
        assert [call.name for call in done.tool_calls] == ["clock"]
        plain = await engine.chat(ASK).completion()
        assert (plain.content, plain.tool_calls) == (CALL, ())
        ids = [await engine.encode(ASK), await engine.encode(ASK, tools=TOOLS)]
        texts = [engine.tokenizer.decode(one, skip_special_tokens=False) for one in ids]
        assert texts == ["hi;", "clock;"]


async def test_a_template_that_only_opens_the_tag_has_reasoning() -> None:
    source = "{{ messages[0].content }}{% if add_generation_prompt %}assistant\n<think>{% endif %}"
    async with Engine(ScriptedModel(source, "Hm.</think>Yes.")) as engine:
        done = await engine.chat(ASK).completion()
        assert (done.reasoning, done.content) == ("Hm.", "Yes.")
