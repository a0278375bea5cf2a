"""The body of a request for a message, and what it asks of an engine."""

from __future__ import annotations

from typing import Any, Literal

from aioserve.server.anthropic.blocks import (
    CacheControl,
    add_message,
    message_of,
    system_text_of,
)
from aioserve.server.app_state import Call
from aioserve.server.bodies import Strict
from aioserve.server.chat_parts.answering import Asked
from aioserve.server.chat_parts.plan import (
    AnswerPlan,
    check_tools,
    json_schema,
    named_tool,
    planned,
    tool,
)
from aioserve.server.chat_parts.sampling import (
    FORM_ARGUMENTS,
    SamplingFields,
    check_at_most,
    variables_of,
)
from aioserve.server.chat_parts.turns import Turns, renamed
from aioserve.server.chat_parts.unknown_fields import UnknownFields
from aioserve.server.errors import ApiError

__all__ = [
    "Conversation",
    "MessageRequest",
    "asked_of",
    "continues",
    "conversation_of",
    "plan_of",
    "template_variables",
]

NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "tenant": "metadata.user_id",
    "strict_tools": "tools",
}


class Tool(Strict, frozen=True, kw_only=True):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


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
    """The tenant of a call without a key."""


class _Thinking(Strict, frozen=True, kw_only=True, tag_field="type"):
    pass


class ThinkingDisabled(_Thinking, frozen=True, kw_only=True, tag="disabled"):
    """Switched off, where the model's template has a switch."""


class ThinkingAdaptive(_Thinking, frozen=True, kw_only=True, tag="adaptive"):
    """As the model likes, which it does anyway."""


class JsonFormat(Strict, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict, frozen=True, kw_only=True):
    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """As far as the model's template reads one."""


class Conversation(Strict, frozen=True, kw_only=True):
    """What is answered, and what is counted."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: ThinkingDisabled | ThinkingAdaptive | None = None
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
    stream: bool | None = None


def conversation_of(call: Call, body: Conversation) -> Turns:
    """The messages. Raises `ApiError` for what is too much, or in no order that has a meaning."""
    call.app_state.check_model(body.model)
    if not body.messages:
        raise ApiError(400, "messages must not be empty", param="messages")
    contents = [*(message.get("content") for message in body.messages), body.system]
    num_items = sum(len(content) if isinstance(content, list) else 1 for content in contents)
    check_at_most("messages", "have at most {} blocks", num_items, call.settings.max_items)
    turns, unknown = Turns(), UnknownFields()
    if system := system_text_of(body.system, unknown):
        turns.system(system, "system")
    for index, given in enumerate(body.messages):
        place = f"messages[{index}]"
        add_message(turns, message_of(given, place, unknown), place)
    unknown.tell(call.call_log)
    if not turns.messages:
        raise ApiError(400, "messages must have a block, got none", param="messages")
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
    turns.check_results()
    user_id = None if body.metadata is None else body.metadata.user_id
    most = call.settings.max_metadata_value_chars
    check_at_most("metadata.user_id", "have at most {} characters", len(user_id or ""), most)
    num_stops = len(body.stop_sequences or ())
    check_at_most("stop_sequences", "have at most {} strings", num_stops, call.settings.max_stops)
    plan = plan_of(call, body)
    check_tools(call.engine, plan)
    forced = plan.function is not None or plan.reads_list
    names = NAMES | dict.fromkeys(FORM_ARGUMENTS, "tools" if forced else "output_config.format")
    fields = SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )
    try:
        params = fields.params(
            call.engine.default_params, max_tokens=body.max_tokens, structured_output=plan.form
        )
    except Exception as error:
        raise renamed(error, names, turns) from error
    return Asked(
        turns,
        params,
        plan,
        continues=continues(turns, body),
        options=call.options(
            tenant=call.tenant or user_id or None,
            chat_template_kwargs=template_variables(call, body),
        ),
        names=names,
    )


def template_variables(call: Call, body: Conversation) -> dict[str, Any] | None:
    """Whether and how much the model shall reason, as its template reads that. Raises
    `ApiError`."""
    effort = None if body.output_config is None else body.output_config.effort
    variables = variables_of(call.engine, effort, "output_config.effort")
    has_switch = call.engine.template_reads("enable_thinking")
    if has_switch and isinstance(body.thinking, ThinkingDisabled):
        variables = variables | {"enable_thinking": False}
    return variables or None


def plan_of(call: Call, body: Conversation) -> AnswerPlan:
    """Raises `ApiError`."""
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
    """Of a tool. The API's own types let these two be null, which no schema does."""
    return {
        keyword: value
        for keyword, value in given.items()
        if value is not None or keyword not in ("properties", "required")
    }
