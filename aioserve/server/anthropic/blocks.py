"""Blocks of content, as they come in and as they go out.

Blocks of other types, such as images and documents, are refused by their names. Unknown fields of
those that are here are dropped, as clients carry back what they, or another server, added.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aioserve.server.bodies import converted
from aioserve.server.chat_parts.turns import Turns
from aioserve.server.chat_parts.unknown_fields import KnownFields, UnknownFields
from aioserve.server.errors import ApiError

__all__ = [
    "CacheControl",
    "InputMessage",
    "SystemText",
    "TextBlock",
    "ThinkingBlock",
    "ToolUseBlock",
    "add_message",
    "message_of",
    "system_text_of",
    "text_of",
]


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts are cached with it or without."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True
):
    pass


class _InputBlock(_Block, frozen=True, kw_only=True):
    cache_control: CacheControl | None = None


class InputText(_InputBlock, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: Any = None
    """Citations of another server are dropped: what counts is the text."""


class InputThinking(_Block, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str | None = None
    """A signature of another server is dropped: what counts is the text."""


class DirectCaller(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["direct"]


class InputToolUse(_InputBlock, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None


class InputToolResult(_InputBlock, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[InputText] | None = None
    is_error: bool | None = None


SystemText = str | list[InputText]


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[InputText | InputThinking | InputToolUse | InputToolResult]


class TextBlock(_Block, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(_Block, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


_MESSAGE = KnownFields(InputMessage, "message", unread=("citations",), places={"content": "part"})
_SYSTEM = KnownFields(SystemText, "part", unread=("citations",))


def message_of(given: dict[str, Any], place: str, unknown: UnknownFields) -> InputMessage:
    """What `given` at `place` in a body is, without `unknown` fields. Raises `ApiError`."""
    return converted(_MESSAGE.of(given, unknown), InputMessage, place)


def system_text_of(given: str | list[Any] | None, unknown: UnknownFields) -> str:
    """The same of what stands before all messages."""
    if given is None or isinstance(given, str):
        return given or ""
    return text_of(converted(_SYSTEM.of(given, unknown), list[InputText], "system"))


def text_of(content: str | list[InputText] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([block.text for block in content])


def add_message(turns: Turns, message: InputMessage, place: str) -> None:
    """Let `message`, from `place` in a body, be part of the conversation: turns of one side that
    follow each other are one. Raises `ApiError`."""
    role = message.role
    if isinstance(message.content, str):
        _add_text(turns, role, message.content, place)
        return
    for index, block in enumerate(message.content):
        where = f"{place}.content[{index}]"
        match block:
            case InputText():
                _add_text(turns, role, block.text, where)
            case InputThinking() if role == "assistant":
                turns.reasoning(block.thinking, where)
            case InputToolUse() if role == "assistant":
                turns.call(block.id, block.name, block.input, where, arguments_field="input")
            case InputToolResult() if role == "user":
                text = text_of(block.content)
                turns.result(block.tool_use_id, f"Error: {text}" if block.is_error else text, where)
            case _:
                kind = block.__struct_config__.tag
                raise ApiError(400, f"{where}: a {role} message can't have {kind}", param=where)


def _add_text(turns: Turns, role: str, text: str, place: str) -> None:
    match role:
        case "user":
            turns.user(text, place, joined=True)
        case "assistant":
            turns.text(text, place)
        case _:
            turns.system(text, place)
