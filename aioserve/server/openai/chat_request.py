"""What `/v1/chat/completions` is asked: the types of its fields, checked one by one.

Clients carry back what messages of completions have, and what they added to it. What says nothing
and what is unknown is dropped; what is known and not supported is the engine's to refuse, by its
place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from aioserve.engine.chat import MESSAGE_FIELDS
from aioserve.server.app_state import Call
from aioserve.server.bodies import Strict
from aioserve.server.chat_parts.answering import Asked
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

__all__ = ["ChatFields", "ChatRequest", "asked_of", "check_results", "framing_of", "messages_of"]

_KNOWN = MESSAGE_FIELDS | {"refusal", "audio", "function_call"}
"""The last two are of the API, and nothing here reads them: it would be missed."""


async def messages_of(messages: list[dict[str, Any]], call: Call) -> list[dict[str, Any]]:
    """Without fields that say nothing or are unknown, with a refusal as the content that it is, and
    with the role `system` for `developer` where the model's template doesn't know that. Raises
    `ApiError`."""
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
    """Raise `ApiError` for a call of a tool without a result behind it, unless it was cut off. What
    isn't written as messages are is the engine's to refuse."""
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
        del plain["reasoning"]  # some servers tell it by both names
    if is_answer and plain.get("content") in (None, []):
        if "tool_calls" in plain:
            plain["content"] = None
        elif reasoning is not None:
            plain["content"] = ""  # an answer that was cut off before it said more
    return plain


def _part(part: Any, unknown: UnknownFields, *, is_answer: bool) -> Any:
    """A part of text. A refusal, which only an answer has, is text of the assistant's too."""
    if not isinstance(part, Mapping):
        return part
    if is_answer and part.get("type") == "refusal":
        plain = unknown.known(part, ("type", "refusal"), "part")
        return {"type": "text", "text": plain.get("refusal")}
    if part.get("type") != "text":
        return part
    return unknown.known(part, ("type", "text"), "part")


def _with_refusal(content: Any, refusal: str) -> Any:
    """The content of a message that has a refusal as well."""
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
    """A part of the text that is predicted."""

    type: Literal["text"]
    text: str


class Prediction(Strict, frozen=True, kw_only=True):
    """A text that the answer will be much like, as the OpenAI API's predicted outputs have it."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content])


class ChatFields(ChunkFields, frozen=True, kw_only=True):
    """Fields of a request about messages, beside these."""

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
    """As far as the model's template reads one."""
    prediction: Prediction | None = None
    """What the answer will be, or much of it."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """True where it isn't said."""
    continue_final_message: bool | None = None
    echo: bool | None = None
    """The answer begins with the text of the last message, where that is the assistant's."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    """For scheduling policies to see; it doesn't come back."""

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
        """Variables of the template. Raises `ApiError` for an effort that it reads nothing of, or
        that contradicts them."""
        given = self.chat_template_kwargs
        return variables_of(call, self.reasoning_effort, "reasoning_effort", given) or None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def names(self) -> dict[str, str]:
        """What the API calls arguments of the engine."""
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
        if isinstance(content, list):  # what isn't text was refused
            return "\n".join([part["text"] for part in content if "text" in part])
        return content or ""


def framing_of(call: Call, body: ChatRequest) -> dict[str, Any]:
    """How the template frames messages, as options of the engine. Raises `ApiError`."""
    return {
        "chat_template_kwargs": body.variables(call),
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
    }


def _predicted(call: Call, body: ChatRequest) -> str | None:
    """The text that the drafter goes by; None where nothing is drafted."""
    text = None if body.prediction is None else body.prediction.text or None
    if text is not None and call.engine.config.speculation is None:
        let_through(call.call_log, "prediction")
        return None
    return text


async def asked_of(call: Call, body: ChatRequest) -> Asked:
    """Raises `ApiError`."""
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
        return Asked(messages, params, plan, options, names)
