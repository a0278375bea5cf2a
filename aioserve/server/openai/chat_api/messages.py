"""Messages of `/v1/chat/completions` as the engine takes them.

Clients carry back what answers have, and what they added to it. What says nothing and what is
unknown is dropped; what is known and not supported is the engine's to refuse, by its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioserve.engine.chat import MESSAGE_FIELDS
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.turns import without_result
from aioserve.server.chat_parts.unknown_fields import UnknownFields

__all__ = ["check_results", "messages_of"]

_KNOWN = MESSAGE_FIELDS | {"refusal", "audio", "function_call"}
"""The last are of the API, and nothing here reads them: it would be missed."""


def messages_of(messages: list[dict[str, Any]], call: Call) -> list[dict[str, Any]]:
    """Without fields that say nothing or are unknown, and with the role `system` for `developer`
    where the model's template doesn't know that."""
    as_system = not call.engine.template_reads("developer")
    unknown = UnknownFields()
    plain = [_message(message, unknown, as_system=as_system) for message in messages]
    unknown.tell(call.call_log)
    return plain


def check_results(messages: list[dict[str, Any]]) -> None:
    """Raise `ApiError` for a call of a tool without a result behind it. What isn't written as
    messages are is the engine's to refuse."""
    open_calls: dict[str, str] = {}
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict) and isinstance(call_id := call.get("id"), str):
                open_calls[call_id] = f"messages[{index}].tool_calls[{number}]"
        if message.get("role") == "tool":
            answered = message.get("tool_call_id")
            first = next(iter(open_calls), None)
            open_calls.pop(answered if isinstance(answered, str) else first or "", None)
    for call_id, place in open_calls.items():
        raise without_result(call_id, place)


def _message(message: dict[str, Any], unknown: UnknownFields, *, as_system: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field, value in message.items():
        if field not in _KNOWN:
            if value != []:
                unknown.drop("message", field, value)
        elif field == "refusal" and value == "":
            continue
        elif field in ("role", "content") or value not in (None, []):
            plain[field] = value
    if as_system and plain.get("role") == "developer":
        plain["role"] = "system"
    if isinstance(content := plain.get("content"), list):
        plain["content"] = [_part(part, unknown) for part in content]
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_tool_call(call, unknown) for call in calls]
    reasoning = plain.get("reasoning_content")
    if reasoning is not None and plain.get("reasoning") == reasoning:
        del plain["reasoning"]  # some servers tell it by both names
    if plain.get("role") == "assistant" and plain.get("content") in (None, []):
        if "tool_calls" in plain:
            plain["content"] = None
        elif reasoning is not None:
            plain["content"] = ""  # an answer that was cut off before it said more
    return plain


def _part(part: Any, unknown: UnknownFields) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return part
    return unknown.known(part, ("type", "text"), "part")


def _tool_call(call: Any, unknown: UnknownFields) -> Any:
    if not isinstance(call, Mapping) or call.get("type") not in (None, "function"):
        return call
    plain = unknown.known(call, ("id", "type", "function"), "tool_call")
    if isinstance(function := plain.get("function"), Mapping):
        plain["function"] = unknown.known(function, ("name", "arguments"), "tool_call")
    return plain
