"""Optional fields of messages and tools written out, for templates that fail without them.

Knows conversations in plain values of JSON. Must not know templates.
"""

from __future__ import annotations

from typing import Any

import msgspec

from aioserve.text.conversation import Conversation

__all__ = ["with_all_fields"]

_Object = dict[str, Any]


def with_all_fields(conversation: Conversation) -> Conversation:
    """Write out what a conversation implies.

    Contents that are null or left out are empty. A call is one of a function. A tool has no
    description and takes nothing. A result has the name of its function: that of the call with its
    `tool_call_id`, or, without an id, of the call at its place.
    """
    tools = conversation.tools
    return msgspec.structs.replace(
        conversation,
        messages=_whole_messages(conversation.messages),
        tools=None if tools is None else [_whole_tool(tool) for tool in tools],
    )


def _whole_messages(messages: list[_Object]) -> list[_Object]:
    whole: list[_Object] = []
    names: dict[str, str] = {}
    in_order: list[str] = []
    for message in messages:
        more: _Object = {}
        if message.get("content") is None:
            more["content"] = ""
        if calls := message.get("tool_calls"):
            in_order = [call["function"]["name"] for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
            more["tool_calls"] = [{"type": "function"} | call for call in calls]
        elif message["role"] == "tool":
            called = in_order.pop(0) if in_order else None
            if "tool_call_id" in message:
                called = names.get(message["tool_call_id"])
            if called is not None and "name" not in message:
                more["name"] = called
        whole.append(message | more)
    return whole


def _whole_tool(tool: _Object) -> _Object:
    function: _Object = {"name": None, "description": "", "parameters": None}
    function |= {name: value for name, value in tool["function"].items() if value is not None}
    parameters = function["parameters"]
    if parameters is None or isinstance(parameters, dict):
        function["parameters"] = {"type": "object", "properties": {}} | (parameters or {})
    return tool | {"function": function}
