"""The body of a request for a message, and what it asks of an engine."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aioserve.request import SamplingParams
from aioserve.server.answering import Asked
from aioserve.server.anthropic.blocks import (
    CacheControl,
    InputMessage,
    SystemText,
    add_message,
    text_of,
)
from aioserve.server.errors import ApiError
from aioserve.server.sampling import SamplingFields
from aioserve.server.served import Call
from aioserve.server.turns import Turns, renamed
from aioserve.structured_output import StructuredOutput

__all__ = ["Conversation", "MessageRequest", "asked_of", "conversation_of", "tools_of"]

NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "structured_output": "output_config.format",
    "json_schema": "output_config.format.schema",
}


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Tool(_Strict, frozen=True, kw_only=True):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None


class _Choice(_Strict, frozen=True, kw_only=True, tag_field="type"):
    pass


class AutoChoice(_Choice, frozen=True, kw_only=True, tag="auto"):
    disable_parallel_tool_use: bool = False


class AnyChoice(_Choice, frozen=True, kw_only=True, tag="any"):
    disable_parallel_tool_use: bool = False


class ToolChoice(_Choice, frozen=True, kw_only=True, tag="tool"):
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(_Choice, frozen=True, kw_only=True, tag="none"):
    pass


class Metadata(_Strict, frozen=True, kw_only=True):
    user_id: str | None = None
    """Who asks, for the caller's own records."""


class ThinkingDisabled(_Strict, frozen=True, kw_only=True):
    type: Literal["disabled"]


class JsonFormat(_Strict, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(_Strict, frozen=True, kw_only=True):
    format: JsonFormat | None = None


class Conversation(_Strict, frozen=True, kw_only=True):
    """What is answered, and what is counted."""

    model: str
    messages: list[InputMessage]
    system: SystemText | None = None
    tools: list[Tool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessageRequest(Conversation, frozen=True, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """There is one tier."""
    stream: bool = False


def conversation_of(call: Call, body: Conversation) -> Turns:
    """The messages. Raises `ApiError` for what is too much, or in no order that has a meaning."""
    call.served.check_model(body.model)
    if not body.messages:
        raise ApiError(400, "messages must not be empty", param="messages")
    contents = [*(message.content for message in body.messages), body.system or ""]
    num_items = sum(1 if isinstance(content, str) else len(content) for content in contents)
    if num_items > (most := call.settings.max_items):
        raise ApiError(
            400, f"messages must have at most {most} blocks, got {num_items}", param="messages"
        )
    turns = Turns()
    if system := text_of(body.system):
        turns.system(system, "system")
    for index, message in enumerate(body.messages):
        add_message(turns, message, f"messages[{index}]")
    return turns


def continues(turns: Turns, body: Conversation) -> bool:
    """Whether the answer goes on with the last message. Raises `ApiError` where it can't."""
    last = turns.messages[-1]
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls") or not last["content"]:
        place = f"messages[{len(body.messages) - 1}]"
        raise ApiError(400, f"{place}: only text can be gone on with", param=place)
    return True


def asked_of(call: Call, body: MessageRequest) -> Asked:
    """Raises `ApiError`."""
    turns = conversation_of(call, body)
    user_id = None if body.metadata is None else body.metadata.user_id
    if user_id is not None and len(user_id) > (most := call.settings.max_metadata_value_chars):
        raise ApiError(
            400,
            f"metadata.user_id must have at most {most} characters, got {len(user_id)}",
            param="metadata.user_id",
        )
    try:
        params = params_of(call, body)
    except Exception as error:
        raise renamed(error, NAMES, turns) from error
    choice = body.tool_choice
    return Asked(
        turns,
        params,
        tools_of(body),
        one_call=getattr(choice, "disable_parallel_tool_use", False),
        continues=continues(turns, body),
        options=call.options(),
        names=NAMES,
    )


def params_of(call: Call, body: MessageRequest) -> SamplingParams:
    fields = SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )
    more: dict[str, Any] = {"max_tokens": body.max_tokens}
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema
        more["structured_output"] = StructuredOutput(json_schema=schema)
    return fields.params(call.engine.default_params, **more)


def tools_of(body: Conversation) -> list[dict[str, Any]] | None:
    """As the engine takes them."""
    if not body.tools or isinstance(body.tool_choice, NoChoice):
        return None
    tools: list[dict[str, Any]] = []
    for tool in body.tools:
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        tools.append({"type": "function", "function": function})
    return tools
