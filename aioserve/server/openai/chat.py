"""`/v1/chat/completions`: the next message of a conversation.

    chat_request ──► chat ──► ChatChoices ──► one body, or chunks

Choices say the same whole and in pieces.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Literal

import msgspec

from aioserve.engine.chat import ChatAnswer, ChatDelta, ChatStream
from aioserve.engine.engine import Engine
from aioserve.request import FinishReason
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.plan import AnswerPlan, check_tools, planned
from aioserve.server.endpoint import Endpoint, Events
from aioserve.server.openai.chat_request import ChatRequest, messages_of
from aioserve.server.openai.errors import OPENAI_ERRORS, as_named
from aioserve.server.openai.fields import Chunks, UsageBody, options_of, usage_of
from aioserve.server.openai.logprobs import (
    ChatLogprobs,
    TokenTexts,
    all_chat_logprobs,
    chat_logprobs,
)

__all__ = ["CHAT", "ChatChoice", "ChatChoices", "ChatCompletion", "ChatPiece", "ChatRequest"]

OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
Ended = Literal["stop", "length", "tool_calls", "abort", "error"]


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class CallOfTool(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallOfTool] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Ended
    stop_reason: int | str | None
    """The stop string or stop id that ended it."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to a choice."""

    index: int
    delta: MessageDelta
    finish_reason: Ended | None
    """In the last one."""
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


_NOTHING = MessageDelta()


class ChatChoices:
    """Makes the choices of one request."""

    def __init__(self, engine: Engine, body: ChatRequest, plan: AnswerPlan) -> None:
        n = body.n or engine.default_params.n
        self._body = body
        self._plan = plan
        self._texts = TokenTexts(engine) if body.logprobs else None
        self._num_top = body.top_logprobs or 0
        self._arguments: list[list[str] | None] = [None] * n
        """What was told of those of each choice's last call; None where there is no call."""
        self._has_ended = [False] * n

    # -- whole

    async def whole(self, answers: Sequence[ChatAnswer], stream: ChatStream) -> list[ChatChoice]:
        """`stream` is the one that the answers came from, which has ended."""
        return [
            await self._whole(number, answer, stop_reason)
            for number, (answer, stop_reason) in enumerate(
                zip(answers, stream.stop_reasons, strict=True)
            )
        ]

    async def _whole(
        self, number: int, answer: ChatAnswer, stop_reason: int | str | None
    ) -> ChatChoice:
        content, plan = answer.content, self._plan
        calls = [
            CallOfTool(id=call.id, function=CalledFunction(call.name, call.arguments))
            for call in answer.tool_calls[: 1 if plan.one_call else None]
        ]
        if plan.function is not None:
            calls = [CallOfTool(id=_new_id(), function=CalledFunction(plan.function, content))]
            content = ""
        arguments = [calls[-1].function.arguments] if calls else None
        return ChatChoice(
            index=number,
            message=AssistantMessage(
                content=None if calls and not content else content,
                reasoning_content=answer.reasoning or msgspec.UNSET,
                tool_calls=calls or msgspec.UNSET,
            ),
            logprobs=None
            if self._texts is None
            else await all_chat_logprobs(self._texts, answer.tokens, self._num_top),
            finish_reason=_ended(answer.finish_reason, stop_reason, arguments),
            stop_reason=stop_reason,
            token_ids=[token.id for token in answer.tokens]
            if self._body.return_token_ids
            else msgspec.UNSET,
        )

    # -- in pieces

    def first(self) -> list[ChatPiece]:
        """Say whose message each choice is."""
        return [self._first(number) for number in range(len(self._has_ended))]

    def _first(self, number: int) -> ChatPiece:
        if (name := self._plan.function) is None:
            content = None if self._plan.reads_list else ""
            delta = MessageDelta(role="assistant", content=content)
        else:
            self._arguments[number] = []
            function = FunctionDelta(name, "")
            call = CallDelta(index=0, id=_new_id(), type="function", function=function)
            delta = MessageDelta(role="assistant", tool_calls=[call])
        return ChatPiece(index=number, delta=delta, finish_reason=None)

    def pieces(self, deltas: Sequence[ChatDelta], stream: ChatStream) -> list[ChatPiece]:
        """What deltas add to the choices, which were all that the stream had; also the ends of
        those that have ended."""
        pieces = [piece for delta in deltas if (piece := self._piece(delta)) is not None]
        for number, reason in enumerate(stream.finish_reasons):
            if reason is not None and reason in OWN_ENDS and not self._has_ended[number]:
                self._has_ended[number] = True
                stop_reason = stream.stop_reasons[number]
                pieces.append(
                    ChatPiece(
                        index=number,
                        delta=_NOTHING,
                        finish_reason=_ended(reason, stop_reason, self._arguments[number]),
                        stop_reason=stop_reason,
                    )
                )
        return pieces

    def _piece(self, delta: ChatDelta) -> ChatPiece | None:
        content, plan, calls = delta.content or None, self._plan, None
        if plan.function is not None and content:
            calls = [CallDelta(index=0, function=FunctionDelta(arguments=content))]
            content = None
        elif delta.tool_calls:
            calls = [
                CallDelta(
                    index=call.index,
                    id=call.id,
                    type=None if call.id is None else "function",
                    function=FunctionDelta(call.name, call.arguments),
                )
                for call in delta.tool_calls
                if not (plan.one_call and call.index)
            ]
        for call in calls or ():
            self._take(delta.sample, call)
        logprobs = None
        if self._texts is not None:
            logprobs = chat_logprobs(self._texts, delta.tokens, self._num_top)
        ids = None
        if self._body.return_token_ids:
            ids = [token.id for token in delta.tokens]
        if not (content or delta.reasoning or calls or logprobs or ids):
            return None
        return ChatPiece(
            index=delta.sample,
            delta=MessageDelta(
                content=content,
                reasoning_content=delta.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=None,
            logprobs=logprobs,
            token_ids=ids or None,
        )

    def _take(self, number: int, call: CallDelta) -> None:
        arguments = self._arguments[number]
        if arguments is None or call.id is not None:
            arguments = self._arguments[number] = []
        if call.function.arguments:
            arguments.append(call.function.arguments)


def _ended(
    reason: FinishReason, stop_reason: int | str | None, arguments: Sequence[str] | None
) -> Ended:
    """`arguments` are those of the last call, if there is one. Whoever hears of calls makes them:
    so not where a stop string or id has ended one in its midst."""
    if arguments is None or reason is not FinishReason.STOP:
        return reason.value
    if stop_reason is None:
        return "tool_calls"
    try:
        msgspec.json.decode("".join(arguments))
    except (msgspec.DecodeError, RecursionError):
        return "stop"
    return "tool_calls"


def _new_id() -> str:
    """Return the id of a call: nine letters and digits, which is all that some templates take."""
    return uuid.uuid4().hex[:9]


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class AboutChunk(msgspec.Struct, frozen=True, kw_only=True):
    """What every chunk says."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str


async def chat(call: Call, body: ChatRequest) -> ChatCompletion | Events:
    body.check(call)
    with as_named(body.names):
        plan = planned(
            call.settings,
            tools=body.tools or (),
            choice=body.tool_choice or "auto",
            one_call=body.parallel_tool_calls is False,
            form=body.response_format,
            structured_outputs=body.structured_outputs,
        )
        check_tools(call.engine, plan)
        stream = _submitted(call, body, plan)
        try:
            if not body.stream:
                return await _whole(call, body, plan, stream)
            await stream.started()
        except BaseException:
            stream.close()
            raise
    return Events(_events(call, body, plan, stream), stream)


def _submitted(call: Call, body: ChatRequest, plan: AnswerPlan) -> ChatStream:
    params = body.params(
        call.engine.default_params,
        max_tokens=body.most_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_output=plan.form,
    )
    stream = call.engine.chat(
        messages_of(body.messages, call),
        params,
        **plan.options,
        chat_template_kwargs=body.variables(call.engine),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        **options_of(call, body),
    )
    call.call_log.answers_with(stream)
    return stream


async def _whole(
    call: Call, body: ChatRequest, plan: AnswerPlan, stream: ChatStream
) -> ChatCompletion:
    done = await stream.completion()
    return ChatCompletion(
        id=_id(call),
        created=call.created_seconds,
        model=body.model,
        choices=await ChatChoices(call.engine, body, plan).whole(done.answers, stream),
        usage=usage_of(done.usage),
    )


async def _events(
    call: Call, body: ChatRequest, plan: AnswerPlan, stream: ChatStream
) -> AsyncGenerator[bytes, None]:
    about = AboutChunk(id=_id(call), created=call.created_seconds, model=body.model)
    chunks = Chunks(about, body.stream_options)
    choices = ChatChoices(call.engine, body, plan)
    pieces = choices.first()
    interval, goes_on = call.settings.stream_interval, True
    while goes_on:
        deltas = await stream.batch(interval)
        goes_on = bool(deltas)
        pieces += choices.pieces(deltas, stream)
        usage = stream.usage if chunks.counts_always else None
        if pieces:
            yield chunks.joined(pieces, usage)
        pieces.clear()
    yield chunks.end(stream.usage)


def _id(call: Call) -> str:
    return f"chatcmpl-{call.request_id}"


CHAT: Endpoint[ChatRequest] = Endpoint(
    "/v1/chat/completions",
    chat,
    OPENAI_ERRORS,
    kind=ChatRequest,
    answer=ChatCompletion,
    summary="Answer a conversation",
)
