"""Body of a request for a message, with its blocks of content, and the request to the engine.

Blocks of other types, like images and documents that aren't text, are refused by name. Unknown
fields of known blocks are dropped: clients send back what they, or another server, added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from aioserve.server.anthropic.blocks import (
    Block,
    CacheControl,
    CachedBlock,
    InputDocument,
    InputRedactedThinking,
    InputText,
    text_of,
)
from aioserve.server.app_state import Call
from aioserve.server.bodies import Strict, converted
from aioserve.server.chat_parts.answering import ChatInput
from aioserve.server.chat_parts.plan import (
    AnswerPlan,
    fitted,
    json_schema,
    named_tool,
    planned,
    tool,
)
from aioserve.server.chat_parts.sampling import (
    FORM_ARGUMENTS,
    check_at_most,
    check_limits,
    num_entries,
    sampling_params,
    units_of,
    variables_of,
)
from aioserve.server.chat_parts.turns import Turns
from aioserve.server.chat_parts.unknown_fields import KnownFields, UnknownFields
from aioserve.server.errors import ApiError, as_named, refuse
from aioserve.server.hint_fields import let_through
from aioserve.server.hint_tables import (
    OF_JSON_FORMATS,
    OF_MESSAGE_TOOLS,
    OF_MESSAGES,
    OF_THINKING,
    Hints,
)

__all__ = [
    "Conversation",
    "InputMessage",
    "MessageRequest",
    "SystemText",
    "TextBlock",
    "ThinkingBlock",
    "ToolUseBlock",
    "add_message",
    "chat_input_of",
    "conversation_of",
    "framing_of",
    "message_of",
    "plan_of",
    "system_text_of",
]


class InputThinking(Block, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str | None = None
    """Signature of another server, which is dropped."""


class DirectCaller(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["direct"]


class InputToolUse(CachedBlock, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None


class InputToolResult(CachedBlock, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[InputText | InputDocument] | None = None
    is_error: bool | None = None


SystemText = str | list[InputText]
InputBlock = (
    InputText
    | InputThinking
    | InputRedactedThinking
    | InputDocument
    | InputToolUse
    | InputToolResult
)


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class TextBlock(Block, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(Block, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


_MESSAGE = KnownFields(
    InputMessage, "message", unread={InputText: ("citations",)}, places={"content": "part"}
)
_SYSTEM = KnownFields(SystemText, "part", unread={InputText: ("citations",)})


def message_of(given: dict[str, Any], place: str, unknown: UnknownFields) -> InputMessage:
    """Convert `given`, at `place` in a body, to a message. Fields that aren't known go to
    `unknown`. Raises `ApiError`."""
    return converted(_MESSAGE.of(given, unknown), InputMessage, place)


def system_text_of(given: str | list[Any] | None, unknown: UnknownFields) -> str:
    """Return the text before all messages. Fields that aren't known go to `unknown`. Raises
    `ApiError`."""
    if given is None or isinstance(given, str):
        return given or ""
    return text_of(converted(_SYSTEM.of(given, unknown), list[InputText], "system"))


def add_message(turns: Turns, message: InputMessage, place: str, unknown: UnknownFields) -> None:
    """Add `message`, from `place` in a body, to the conversation. Successive turns of one side are
    joined. Blocks that no model here reads go to `unknown`. Raises `ApiError`."""
    role = message.role
    if isinstance(message.content, str):
        _add_text(turns, role, message.content, place)
        return
    for index, block in enumerate(message.content):
        where = f"{place}.content[{index}]"
        match block:
            case InputText():
                _add_text(turns, role, block.text, where)
            case InputDocument() if role == "user":
                _add_text(turns, role, block.text, where)
            case InputRedactedThinking() if role == "assistant":
                unknown.drop("part", "redacted_thinking", block)
            case InputThinking() if role == "assistant":
                turns.reasoning(block.thinking, where)
            case InputToolUse() if role == "assistant":
                # The last call may have been cut off, which its input doesn't show.
                is_last = block is message.content[-1]
                turns.call(
                    block.id,
                    block.name,
                    block.input,
                    where,
                    arguments_field="input",
                    needs_result=not is_last,
                )
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


NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "tenant": "metadata.user_id",
    "strict_tools": "tools",
    "required_tools": "tools",
    "thinking_token_budget": "thinking.budget_tokens",
}


class AnthropicTool(Strict, frozen=True, kw_only=True):
    hints: ClassVar[Hints] = OF_MESSAGE_TOOLS

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Has no effect: inputs of calls are always streamed as they are written."""


class ThinkingEdit(Strict, frozen=True, kw_only=True):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]
    """Keeps the reasoning of earlier turns, as far as the model's template reads it."""


class ContextManagement(Strict, frozen=True, kw_only=True):
    """Edits that leave the conversation unchanged; others are refused."""

    edits: list[ThinkingEdit] | None = None


class _Choice(Strict, frozen=True, kw_only=True, tag_field="type"):
    pass


class AutoChoice(_Choice, frozen=True, kw_only=True, tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(_Choice, frozen=True, kw_only=True, tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(_Choice, frozen=True, kw_only=True, tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(_Choice, frozen=True, kw_only=True, tag="none"):
    pass


class Metadata(Strict, frozen=True, kw_only=True):
    user_id: str | None = None
    """Tenant of a call without a key."""


class _Thinking(Strict, frozen=True, kw_only=True, tag_field="type"):
    pass


class ThinkingDisabled(_Thinking, frozen=True, kw_only=True, tag="disabled"):
    """Reasoning switched off, if the model's template has a switch."""


class ThinkingEnabled(_Thinking, frozen=True, kw_only=True, tag="enabled"):
    """Reasoning switched on, if the model's template has a switch."""

    hints: ClassVar[Hints] = OF_THINKING

    budget_tokens: int
    """Most tokens of reasoning, fewer than of the whole answer."""


class ThinkingAdaptive(_Thinking, frozen=True, kw_only=True, tag="adaptive"):
    """Reasoning as the model likes, which it does anyway."""

    hints: ClassVar[Hints] = OF_THINKING


class JsonFormat(Strict, frozen=True, kw_only=True):
    hints: ClassVar[Hints] = OF_JSON_FORMATS

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict, frozen=True, kw_only=True):
    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Effort of reasoning, if the model's template reads one."""


class Conversation(Strict, frozen=True, kw_only=True):
    """Conversation to answer, or to count."""

    hints: ClassVar[Hints] = OF_MESSAGES
    limits: ClassVar[Mapping[str, str]] = {"tools": "max_tools"}

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: ThinkingDisabled | ThinkingEnabled | ThinkingAdaptive | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None


class MessageRequest(Conversation, frozen=True, kw_only=True):
    limits: ClassVar[Mapping[str, str]] = {**Conversation.limits, "stop_sequences": "max_stops"}

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Has no effect: there is one tier."""
    stream: bool | None = None
    thread: Any = None
    """Always refused: no conversation is held here. Clients then send all of it."""


async def conversation_of(call: Call, body: Conversation) -> Turns:
    """Return the messages. Raises `ApiError` for too many, or for an order without a meaning."""
    call.app_state.check_model(body.model)
    check_limits(body, call.settings)
    if not body.messages:
        raise ApiError(400, "messages must not be empty", param="messages")
    contents = [*(message.get("content") for message in body.messages), body.system]
    num_items = sum(len(content) if isinstance(content, list) else 1 for content in contents)
    most = call.settings.max_items
    check_at_most("messages", "have at most {} blocks", num_items, most)
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    _check_inner(blocks, most)
    turns, unknown = Turns(), UnknownFields()
    if system := system_text_of(body.system, unknown):
        turns.system(system, "system")
    for index, given in enumerate(body.messages):
        place = f"messages[{index}]"
        await call.pace.before(2 * units_of([given]))
        add_message(turns, message_of(given, place, unknown), place, unknown)
    unknown.tell(call.call_log)
    if not turns.messages:
        raise ApiError(400, "messages must have a block, got none", param="messages")
    return turns


def _check_inner(blocks: Sequence[object], most: int) -> None:
    """Raise `ApiError` for more than `most` blocks in blocks: in results, and in documents, which
    may be in results."""
    must = "have at most {} blocks in blocks"
    check_at_most("messages", must, num_inner := num_entries(blocks), most)
    objects = [block for block in blocks if isinstance(block, dict)]
    inner = [block.get("content") for block in objects]
    objects += [one for each in inner if isinstance(each, list) for one in each]
    sources = [one.get("source") for one in objects if isinstance(one, dict)]
    check_at_most("messages", must, num_inner + num_entries(sources), most)


async def chat_input_of(call: Call, body: MessageRequest) -> ChatInput:
    """Return the request to the engine. Raises `ApiError`."""
    _check_no_thread(body)
    turns = await conversation_of(call, body)
    turns.check_results()
    user_id = None if body.metadata is None else body.metadata.user_id
    most = call.settings.max_metadata_value_chars
    check_at_most("metadata.user_id", "have at most {} characters", len(user_id or ""), most)
    plan = plan_of(call, body)
    plan = fitted(call.facts, plan)
    forced = plan.function is not None or plan.reads_list
    names = NAMES | dict.fromkeys(FORM_ARGUMENTS, "tools" if forced else "output_config.format")
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "max_tokens": body.max_tokens,
        "structured_output": plan.form,
        "thinking_token_budget": _budget_of(call, body),
    }
    with as_named(names, turns.placed):
        params = sampling_params(call.default_params, given)
    options = call.options(tenant=call.tenant or user_id or None, **framing_of(call, body, turns))
    return ChatInput(turns.messages, params, plan, options, names, turns.placed)


def _check_no_thread(body: MessageRequest) -> None:
    if body.thread is not None:
        raise ApiError(
            400,
            "thread isn't supported: no conversation is held here. Send all of its messages, "
            "without thread",
            param="thread",
            code="unsupported_parameter",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )


def _budget_of(call: Call, body: MessageRequest) -> int | None:
    if not isinstance(body.thinking, ThinkingEnabled):
        return None
    budget, most = body.thinking.budget_tokens, body.max_tokens
    if budget >= most:
        why = f"must be below max_tokens = {most}, got {budget}"
        raise refuse("thinking.budget_tokens", why)
    if not call.facts.reasons:
        let_through(call.call_log, "thinking.budget_tokens")
        return None
    return budget


def framing_of(call: Call, body: Conversation, turns: Turns) -> dict[str, Any]:
    """Options for the template. An answer continues a last message of the assistant, and reasoning
    is switched on or off. Raises `ApiError`."""
    goes_on = turns.messages[-1]["role"] == "assistant"
    if goes_on and (turns.messages[-1].get("tool_calls") or not turns.messages[-1]["content"]):
        place = f"messages[{len(body.messages) - 1}]"
        raise ApiError(400, f"{place}: only text can be gone on with", param=place)
    effort = None if body.output_config is None else body.output_config.effort
    variables = variables_of(call, effort, "output_config.effort", usual="high")
    is_asked = isinstance(body.thinking, ThinkingDisabled | ThinkingEnabled)
    if is_asked and not call.facts.reads("enable_thinking"):
        let_through(call.call_log, "thinking")
    elif is_asked:
        variables = variables | {"enable_thinking": isinstance(body.thinking, ThinkingEnabled)}
    return {
        "chat_template_kwargs": variables or None,
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
    }


def plan_of(call: Call, body: Conversation) -> AnswerPlan:
    """Plan of the answer. Raises `ApiError`."""
    match body.tool_choice:
        case NoChoice():
            choice = "none"
        case AnyChoice():
            choice = "required"
        case ToolChoice() as named:
            choice = named_tool(named.name)
        case _:
            choice = "auto"
    wanted = None if body.output_config is None else body.output_config.format
    return planned(
        call.settings,
        tools=[
            tool(each.name, each.description, _schema(each.input_schema), strict=each.strict)
            for each in body.tools or ()
        ],
        choice=choice,
        one_call=bool(getattr(body.tool_choice, "disable_parallel_tool_use", None)),
        form=None if wanted is None else json_schema(wanted.schema),
        names={"response_format": "output_config.format", "function.": ""},
    )


def _schema(given: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's schema, without null `properties` or `required`, which the API's own types
    allow."""
    return {
        keyword: value
        for keyword, value in given.items()
        if value is not None or keyword not in ("properties", "required")
    }
