"""Body of `/v1/chat/completions`: the types of its fields, checked one by one.

Clients send messages back with the fields of completions, and with their own. Empty and unknown
fields are dropped. The engine refuses known fields that aren't supported, by their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from aioserve.engine.chat_stream import MESSAGE_FIELDS
from aioserve.server.app_state import Call
from aioserve.server.bodies import Strict
from aioserve.server.chat_parts.answering import ChatInput
from aioserve.server.chat_parts.plan import (
    Choice,
    ResponseFormat,
    Tool,
    fitted,
    form_field,
    planned,
)
from aioserve.server.chat_parts.sampling import (
    FORM_ARGUMENTS,
    check_messages,
    check_metadata,
    units_of,
    variables_of,
)
from aioserve.server.chat_parts.turns import is_cut_off, without_result
from aioserve.server.chat_parts.unknown_fields import UnknownFields
from aioserve.server.errors import as_named, refuse
from aioserve.server.hint_fields import let_through
from aioserve.server.hint_tables import OF_CHAT, Hints
from aioserve.server.openai.fields import ChunkFields

__all__ = [
    "ChatFields",
    "ChatRequest",
    "chat_input_of",
    "check_results",
    "framing_of",
    "messages_of",
]

_KNOWN = MESSAGE_FIELDS | {"refusal", "audio", "function_call"}
"""Known fields of a message. Nothing here reads the last two of these names, but dropping them
would lose content: the engine refuses them."""


async def messages_of(messages: list[dict[str, Any]], call: Call) -> list[dict[str, Any]]:
    """Return messages as the engine takes them. Raises `ApiError`.

    Empty and unknown fields are dropped, and a refusal becomes content. The role `developer`
    becomes `system` if the model's template doesn't know it.
    """
    check_messages(messages)
    as_system = not call.facts.reads("developer")
    unknown = UnknownFields()
    plain: list[dict[str, Any]] = []
    for message in messages:
        await call.pace.before(units_of([message]))
        plain.append(_message(message, unknown, as_system=as_system))
    unknown.tell(call.call_log)
    return plain


def check_results(messages: list[dict[str, Any]]) -> None:
    """Raise `ApiError` for a tool call without a result after it, unless it was cut off. Messages
    of another shape are left to the engine to refuse."""
    open_calls: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict) and isinstance(call_id := call.get("id"), str):
                open_calls[call_id] = f"messages[{index}].tool_calls[{number}]"
                function = call.get("function")
                if isinstance(function, dict):
                    arguments[call_id] = function.get("arguments")
        if message.get("role") == "tool":
            answered = message.get("tool_call_id")
            first = next(iter(open_calls), None)
            open_calls.pop(answered if isinstance(answered, str) else first or "", None)
    for call_id, place in open_calls.items():
        given = arguments.get(call_id)
        if not isinstance(given, str) or not is_cut_off(given):
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
    is_answer = plain.get("role") == "assistant"
    if isinstance(content := plain.get("content"), list):
        plain["content"] = [_part(part, unknown, is_answer=is_answer) for part in content]
    if is_answer and isinstance(refusal := plain.get("refusal"), str):
        plain["content"] = _with_refusal(plain.get("content"), refusal)
        del plain["refusal"]
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_tool_call(call, unknown) for call in calls]
    reasoning = plain.get("reasoning_content")
    if reasoning is not None and plain.get("reasoning") == reasoning:
        del plain["reasoning"]  # some servers send it under both names
    if is_answer and plain.get("content") in (None, []):
        if "tool_calls" in plain:
            plain["content"] = None
        elif reasoning is not None:
            plain["content"] = ""  # an answer that was cut off before its content
    return plain


def _part(part: Any, unknown: UnknownFields, *, is_answer: bool) -> Any:
    """Convert a part of text. A refusal, which only an answer has, is text of the assistant too."""
    if not isinstance(part, Mapping):
        return part
    if is_answer and part.get("type") == "refusal":
        plain = unknown.known(part, ("type", "refusal"), "part")
        return {"type": "text", "text": plain.get("refusal")}
    if part.get("type") != "text":
        return part
    return unknown.known(part, ("type", "text"), "part")


def _with_refusal(content: Any, refusal: str) -> Any:
    """Content of a message that has a refusal as well."""
    if content in (None, "", []):
        return refusal
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*parts, {"type": "text", "text": refusal}]


def _tool_call(call: Any, unknown: UnknownFields) -> Any:
    if not isinstance(call, Mapping) or call.get("type") not in (None, "function"):
        return call
    plain = unknown.known(call, ("id", "type", "function"), "tool_call")
    if isinstance(function := plain.get("function"), Mapping):
        plain["function"] = unknown.known(function, ("name", "arguments"), "tool_call")
    return plain


class PredictedPart(Strict, frozen=True, kw_only=True):
    """Part of the predicted text."""

    type: Literal["text"]
    text: str


class Prediction(Strict, frozen=True, kw_only=True):
    """Text that the answer will resemble, as in the OpenAI API's predicted outputs."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content])


class ChatFields(ChunkFields, frozen=True, kw_only=True):
    """Fields of a request for chat, besides its messages."""

    hints: ClassVar[Hints] = OF_CHAT
    limits: ClassVar[Mapping[str, str]] = {
        **ChunkFields.limits,
        "top_logprobs": "max_top_logprobs",
        "tools": "max_tools",
        "metadata": "max_metadata",
    }

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """`max_tokens` under its newer name."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    """Effort of reasoning, if the model's template reads one."""
    prediction: Prediction | None = None
    """Text of the answer, or of much of it."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """True by default."""
    continue_final_message: bool | None = None
    echo: bool | None = None
    """Begin the answer with the text of the last message, if that is the assistant's."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    """Metadata for scheduling policies. It isn't returned."""

    def check(self, call: Call) -> None:
        super().check(call)
        check_metadata(self.metadata, call.settings)
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "goes with logprobs=true alone")
        if (self.top_logprobs or 0) < 0:
            raise refuse("top_logprobs", f"must be at least 0, got {self.top_logprobs}")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise refuse(
                "max_completion_tokens",
                f"must be the same as max_tokens = {self.max_tokens} where both are given, got "
                f"{self.max_completion_tokens}",
            )

    def variables(self, call: Call) -> dict[str, Any] | None:
        """Variables of the template. Raises `ApiError` for an effort that the template can't
        follow, or that contradicts them."""
        given = self.chat_template_kwargs
        return variables_of(call, self.reasoning_effort, "reasoning_effort", given) or None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def names(self) -> dict[str, str]:
        """Names that the API has for arguments of the engine."""
        is_newer = self.max_completion_tokens is not None
        form = form_field(self.response_format, self.asked_form, "tools")
        return {
            "prompt": "messages",
            "max_tokens": "max_completion_tokens" if is_newer else "max_tokens",
            "logprobs": "top_logprobs",
            "tenant": "user",
            "strict_tools": "tools",
            "required_tools": "tools",
            **dict.fromkeys(FORM_ARGUMENTS, form),
        }


class ChatRequest(ChatFields, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]

    def check(self, call: Call) -> None:
        super().check(call)
        check_messages(self.messages)
        check_results(self.messages[:-1] if self.continue_final_message else self.messages)

    @property
    def echoed(self) -> str:
        """Text that the answer begins with."""
        last = self.messages[-1] if self.echo and self.messages else {}
        content = last.get("content") if last.get("role") == "assistant" else None
        if isinstance(content, list):  # the engine has refused other parts
            return "\n".join([part["text"] for part in content if "text" in part])
        return content or ""


def framing_of(call: Call, body: ChatRequest) -> dict[str, Any]:
    """Options of the engine for the template's framing of messages. Raises `ApiError`."""
    return {
        "chat_template_kwargs": body.variables(call),
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
    }


def _predicted(call: Call, body: ChatRequest) -> str | None:
    """Text that the drafter follows; None if nothing is drafted."""
    text = None if body.prediction is None else body.prediction.text or None
    if text is not None and call.engine.config.speculation is None:
        let_through(call.call_log, "prediction")
        return None
    return text


async def chat_input_of(call: Call, body: ChatRequest) -> ChatInput:
    """Return the request to the engine. Raises `ApiError`."""
    names = body.names
    with as_named(names):
        plan = planned(
            call.settings,
            tools=body.tools or (),
            choice=body.tool_choice or "auto",
            one_call=body.parallel_tool_calls is False,
            form=body.response_format,
            asked_form=body.asked_form,
        )
        plan = fitted(call.facts, plan)
        params = body.params(
            call.default_params,
            max_tokens=body.most_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structured_output=plan.form,
            prediction=_predicted(call, body),
        )
        messages = await messages_of(body.messages, call)
        options = body.options(call, **framing_of(call, body))
        return ChatInput(messages, params, plan, options, names)
