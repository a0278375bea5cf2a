"""Renders conversations with our templates beside transformers' own renderer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import product
from typing import Any, cast

import jinja2
import msgspec
import pytest
from transformers.utils import chat_template_utils

from aioserve.errors import InvalidPromptError, RequestFailedError
from aioserve.text import template_filters
from aioserve.text.carried_forms import Form, forms_of, shaped
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import Conversation, conversation_of
from aioserve.text.harmony_messages import with_joined_instructions, with_single_calls
from aioserve.text.optional_fields import with_all_fields
from aioserve.text.output_parsers.harmony import HarmonyParser

__all__ = ["NOW", "SPECIAL", "assert_same", "conversations", "reference", "stop_the_clock"]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
NOW = datetime(2026, 3, 14, 15, 9, 26)


_ESCAPED = "does not appear in the chat after applying"


class _Now(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOW


def stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both sides print the same date."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Now)
    monkeypatch.setattr(template_filters, "datetime", _Now)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather, \"now\" or 'then' & <here>.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Größe\nof a city"},
                "days": {"type": "integer", "minimum": 0, "default": 1},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "near": {
                    "type": "object",
                    "properties": {"lat": {"type": "number", "description": "x"}},
                    "required": ["lat"],
                },
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {}},
    },
}
BARE = {"type": "function", "function": {"name": "ping"}}
USER = {"role": "user", "content": "How is the weather in Zürich?\n"}


def _call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


ONE = _call("weather", 1, city="Zürich", days=2, tags=["a", 'b"'], near={"lat": 1.0})
TWO = _call("clock", 2)
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"t": 1e-3}'}
THOUGHT = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Hm.\n\nLet me see."}
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "empty system": [{"role": "system", "content": ""}, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "three": [USER, {"role": "assistant", "content": "Sunny. "}, {"role": "user", "content": "?"}],
    "thoughts": [USER, THOUGHT, {"role": "user", "content": "Sure?"}],
    "thoughts in content": [
        USER,
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSunny."},
        {"role": "user", "content": "Sure?"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
    "call": [USER, {"role": "assistant", "content": "", "tool_calls": [ONE]}, RESULT],
    "null call": [USER, {"role": "assistant", "content": None, "tool_calls": [ONE]}, RESULT],
    "call alone": [USER, {"role": "assistant", "tool_calls": [ONE]}, RESULT | {"name": "weather"}],
    "said call": [USER, {"role": "assistant", "content": "Look:", "tool_calls": [ONE]}, RESULT],
    "thought call": [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [ONE]},
        RESULT,
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks."},
    ],
    "two calls": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [ONE, TWO]},
        RESULT | {"name": "weather"},
        {"role": "tool", "tool_call_id": "call00002", "name": "clock", "content": "12:00"},
    ],
    "no ids": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"function": TWO["function"]}]},
        {"role": "tool", "content": "12:00"},
    ],
    "two users": [USER, {"role": "user", "content": "Hello?"}],
    "assistant first": [{"role": "assistant", "content": "Hi."}, USER],
    "system late": [USER, {"role": "system", "content": "Now shout."}, USER],
    "empty": [{"role": "user", "content": ""}],
    "marks": [
        {"role": "user", "content": "{{ x }} {% if %} <|im_end|> [/INST] </s> \u2028 🙂\x1c"}
    ],
    "named": [USER | {"name": "Ann"}],
}
PLAIN = [Conversation([USER], tools) for tools in (None, [CLOCK])]
TOOLS: list[list[dict[str, Any]] | None] = [None, [WEATHER], [WEATHER, CLOCK, BARE]]
KWARGS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "thinking": False},
    {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
]


def conversations() -> Iterator[Conversation]:
    """Conversations of all kinds; each message list with some of the rest."""
    for number, (messages, continued) in enumerate(product(MESSAGES.values(), (False, True))):
        for turn, tools in enumerate(TOOLS):
            kwargs = KWARGS[(number // 2 + turn) % len(KWARGS)]
            if continued and (not messages[-1].get("content") or kwargs):
                continue
            generate = not continued and (number + turn) % 4 != 3
            yield conversation_of(
                messages,
                tools=tools,
                chat_template_kwargs=kwargs,
                add_generation_prompt=generate,
                continue_final_message=continued,
            ).validated()


def reference(source: str, conversation: Conversation) -> str:
    """Return the print of transformers. Raises `jinja2.TemplateError` and whatever the template
    does."""
    messages = conversation.messages
    if HarmonyParser.reads(source):
        messages = with_single_calls(messages)
        if "messages[0]" in source:
            messages = with_joined_instructions(messages)
    (text,), _ = chat_template_utils.render_jinja_template(
        [messages],
        tools=cast(Any, conversation.tools),
        chat_template=source,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        **SPECIAL,
        **conversation.template_kwargs,
    )
    return text


def _ours(ours: ChatTemplate, conversation: Conversation) -> str | Exception:
    read = {k: v for k, v in conversation.template_kwargs.items() if ours.reads(k)}
    try:
        return ours.render(msgspec.structs.replace(conversation, template_kwargs=read))
    except (InvalidPromptError, RequestFailedError) as error:
        return error


def _theirs(source: str, conversation: Conversation) -> str | Exception:
    try:
        return reference(source, conversation)
    except Exception as error:
        return error


def _expected(
    source: str, ours: ChatTemplate, conversation: Conversation
) -> tuple[str | Exception, str]:
    """Return the print of transformers for the first form that it takes, and "printed" if that is
    the conversation itself, or else "filled". If it takes none, return a refusal, or else the last
    failure."""
    first: Form = ours.for_tools(conversation.tools)._form
    failures: list[Exception] = []
    for whole in (conversation, with_all_fields(conversation)):
        for form in forms_of(whole, first):
            other = shaped(whole, form)
            result = _theirs(source, other)
            if isinstance(result, str) or _ESCAPED in str(result):
                return result, "printed" if other == conversation else "filled"
            failures.append(result)
    refusals = [one for one in failures if type(one) is jinja2.TemplateError]
    return (*refusals, failures[-1])[0], "failed"


def assert_same(source: str, ours: ChatTemplate, conversation: Conversation) -> str:
    """Assert that both print or refuse the same. Return which: "printed", "refused", "filled",
    "continued", "failed" or "broken".

    A template that fails on a form of calls, or without a field, may print another text. Ours
    continues with content that is escaped. A broken template fails with any messages.
    """
    if not ours.reads("tools"):
        conversation = msgspec.structs.replace(conversation, tools=None)
    found = _ours(ours, conversation)
    expected, outcome = _expected(source, ours, conversation)
    if isinstance(expected, str):
        assert not isinstance(found, Exception), f"{found}; expected {expected[-300:]!r}"
        assert found == expected
        return outcome
    if _ESCAPED in str(expected):
        # The content stands there escaped, or not at all.
        if isinstance(found, str):
            return "continued"
        assert "continue_final_message needs a chat template" in str(found)
        return "refused"
    if isinstance(found, RequestFailedError):
        assert not any(isinstance(_theirs(source, plain), str) for plain in PLAIN)
        return "broken"
    assert isinstance(found, InvalidPromptError), found
    if type(expected) is jinja2.TemplateError:
        assert str(found) == f"the model's chat template refused: {expected}"[: len(str(found))]
        return "refused"
    return "failed"
