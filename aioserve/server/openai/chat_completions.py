"""`/v1/chat/completions`: the next message of a conversation.

    chat_request ──► answered ──► ChatWriter ──► one body, or chunks

Choices have the same content whole and in pieces.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from aioserve.engine.chat_answers import ChatAnswer, ChatDelta
from aioserve.request import FinishReason
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.answering import OWN_ENDS, Answering, Writer, answered
from aioserve.server.chat_parts.plan import AnswerPlan
from aioserve.server.endpoint import endpoint
from aioserve.server.errors import refuse
from aioserve.server.json_parts import LongJson, long_ids
from aioserve.server.openai.beams import beams_of
from aioserve.server.openai.chat_request import (
    ChatFields,
    ChatRequest,
    chat_input_of,
    framing_of,
    messages_of,
)
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.openai.fields import Chunks, UsageBody, usage_of
from aioserve.server.openai.logprobs import (
    ChatLogprobs,
    PromptLogprob,
    TokenTexts,
    all_chat_logprobs,
    chat_logprobs,
    prompt_logprobs,
)

__all__ = ["ChatChoice", "ChatCompletion", "ChatPiece", "ChatWriter", "about_of", "chat"]

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
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """Reasoning under its newer name."""
    tool_calls: list[CallOfTool] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Ended
    stop_reason: int | str | None
    """Stop string or stop id that ended it."""
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
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of a choice that one chunk adds."""

    index: int
    delta: MessageDelta
    finish_reason: Ended | None
    """Set in the last piece."""
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


_NOTHING = MessageDelta()
CHOICE_UNITS = 64
"""Units of work for a choice, besides its lists."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class AboutChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all chunks have in common."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str


def about_of(call: Call, body: ChatFields) -> dict[str, Any]:
    """Fields that an answer and each of its chunks have in common."""
    return {
        "id": f"chatcmpl-{call.call_log.call_id}",
        "created": call.created_seconds,
        "model": call.app_state.served_name(body.model),
        "system_fingerprint": call.app_state.fingerprint,
    }


class ChatWriter(Writer[list[ChatDelta]]):
    """Writer of the choices of one request."""

    def __init__(
        self, call: Call, body: ChatRequest, plan: AnswerPlan, answering: Answering
    ) -> None:
        super().__init__(answering.deltas)
        n = body.n or call.facts.default_params.n
        self._body = body
        self._plan = plan
        self._stream = answering.stream
        self._about = about_of(call, body)
        self._chunks = Chunks(AboutChunk(**self._about), body.stream_options)
        self._texts = TokenTexts(call.facts, as_ids=body.return_tokens_as_token_ids)
        self._echoed = body.echoed
        self._num_top = body.top_logprobs or 0
        self._pace = call.pace
        self._arguments: list[list[str] | None] = [None] * n
        """Arguments sent so far of each choice's last call; None without a call."""
        self._has_ended = [False] * n
        self._first: list[ChatPiece] = [self._begun(number) for number in range(n)]
        """Pieces that go before the first batch."""

    # -- whole

    async def whole(self) -> ChatCompletion:
        answers = await self.read()
        ends = list(zip(answers, self._stream.stop_reasons, strict=True))
        of_prompt: Any = msgspec.UNSET
        prompt_ids: Any = msgspec.UNSET
        if (top := self._body.prompt_logprobs) is not None:
            found = self._stream.prompt_token_ids, self._stream.prompt_logprobs
            of_prompt = await prompt_logprobs(self._texts, *found, top, self._pace)
        if self._body.return_token_ids:
            prompt_ids = await long_ids(self._stream.prompt_token_ids, self._pace)
        choices: Any = LongJson.of_list(partial(self._made, ends))
        return ChatCompletion(
            **self._about,
            choices=choices,
            usage=self._counted(),
            prompt_logprobs=of_prompt,
            prompt_token_ids=prompt_ids,
        )

    async def read(self) -> Sequence[ChatAnswer]:
        """Read to the end, and return the answers."""
        async for _ in self._stream:
            pass
        await self._pace.before(self._stream.usage.completion_tokens)
        return (await self._stream.completion()).answers

    async def only_choice(self, answer: ChatAnswer, index: int) -> ChatChoice:
        """Return the choice of a request that has one, whose `answer` was read."""
        return await self._whole(index, answer, self._stream.stop_reasons[0])

    async def _made(
        self, ends: Sequence[tuple[ChatAnswer, int | str | None]]
    ) -> AsyncGenerator[ChatChoice, None]:
        """Yield the choices, each made when it is written."""
        for number, end in enumerate(ends):
            yield await self._whole(number, *end)

    async def _whole(
        self, number: int, answer: ChatAnswer, stop_reason: int | str | None
    ) -> ChatChoice:
        plan = self._plan
        content = plan.content_of(answer.content)
        calls = [
            CallOfTool(id=call.id, function=CalledFunction(call.name, call.arguments))
            for call in answer.tool_calls[: 1 if plan.one_call else None]
        ]
        if plan.function is not None:
            calls = [CallOfTool(id=_new_id(), function=CalledFunction(plan.function, content))]
            content = ""
        content = self._echoed + content
        token_ids: Any = msgspec.UNSET
        if self._body.return_token_ids:
            token_ids = await long_ids([token.id for token in answer.tokens], self._pace)
        await self._pace.before(CHOICE_UNITS)
        arguments = [calls[-1].function.arguments] if calls else None
        return ChatChoice(
            index=number,
            message=AssistantMessage(
                content=None if calls and not content else content,
                reasoning_content=answer.reasoning or msgspec.UNSET,
                reasoning=answer.reasoning or msgspec.UNSET,
                tool_calls=calls or msgspec.UNSET,
            ),
            logprobs=None
            if not self._body.logprobs
            else all_chat_logprobs(self._texts, answer.tokens, self._num_top, self._pace),
            finish_reason=_ended(answer.finish_reason, stop_reason, arguments),
            stop_reason=stop_reason,
            token_ids=token_ids,
        )

    # -- in pieces

    def _begun(self, number: int) -> ChatPiece:
        """Return the first piece of a choice, with its role."""
        if (name := self._plan.function) is None:
            content = self._echoed or (None if self._plan.reads_list else "")
            delta = MessageDelta(role="assistant", content=content)
        else:
            self._arguments[number] = []
            function = FunctionDelta(name, "")
            call = CallDelta(index=0, id=_new_id(), type="function", function=function)
            delta = MessageDelta(role="assistant", content=self._echoed or None, tool_calls=[call])
        return ChatPiece(index=number, delta=delta, finish_reason=None)

    async def written(self, batch: list[ChatDelta]) -> AsyncGenerator[bytes, None]:
        """Yield the events of a batch, which is all that the stream had, and the ends of
        choices."""
        stream = self._stream
        num_tokens = sum([len(delta.tokens) for delta in batch])
        await self._pace.before(num_tokens * (1 + self._num_top))
        begun, self._first = self._first, []
        pieces = [piece for delta in batch if (piece := self._piece(delta)) is not None]
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
        first, counts = b"", None
        if begun:
            if self._chunks.counts_always:
                counts = usage_of(msgspec.structs.replace(stream.usage, completion_tokens=0))
            told = {"prompt_token_ids": list(stream.prompt_token_ids)}
            told = told if self._body.return_token_ids else {}
            first = self._chunks.joined(begun[:1], counts, told)
            first += self._chunks.joined(begun[1:], counts)
        counts = self._counted() if self._chunks.counts_always else None
        yield first + self._chunks.joined(pieces, counts)

    def end(self) -> bytes:
        return self._chunks.end(self._counted())

    def _counted(self) -> UsageBody:
        return usage_of(self._stream.usage, self._stream.reasoning_tokens)

    def _piece(self, delta: ChatDelta) -> ChatPiece | None:
        plan, calls = self._plan, None
        content = plan.content_of(delta.content) or None
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
        if self._body.logprobs:
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
                reasoning=delta.reasoning or None,
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
    """Return the finish reason. The `arguments` are those of the last call, if there is one.

    Clients make the calls of an answer with the reason "tool_calls". So the reason is another one
    if a stop string or id has interrupted a call.
    """
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
    """Return the id of a call: nine letters and digits, as some templates take no other."""
    return uuid.uuid4().hex[:9]


@endpoint(
    OPENAI_ERRORS,
    "/v1/chat/completions",
    "Answer a conversation",
    method="POST",
    answer=ChatCompletion,
    streams="if asked",
)
async def chat(call: Call, body: ChatRequest) -> object:
    body.check(call)
    if body.use_beam_search:
        return await _beams(call, body)
    asked = await chat_input_of(call, body)
    answering = await Answering.begun(call, asked, stream=body.stream)
    writer = ChatWriter(call, body, asked.plan, answering)
    return await answered(call, answering, writer, stream=body.stream)


async def _beams(call: Call, body: ChatRequest) -> ChatCompletion:
    """Answer with beams, which have only content."""
    if body.tools and body.tool_choice != "none":
        why = "go with use_beam_search only where tool_choice is none"
        raise refuse("tools", why, "unsupported_parameter")
    framing: dict[str, Any] = framing_of(call, body)
    found, usage = await beams_of(
        call,
        body,
        [await messages_of(body.messages, call)],
        body.most_tokens,
        harmless={"logprobs": (False,), "prediction": ()},
        names=body.names,
        **framing,
    )
    return ChatCompletion(
        **about_of(call, body),
        choices=[
            ChatChoice(
                index=number,
                message=AssistantMessage(content=body.echoed + beam.text),
                logprobs=None,
                finish_reason=beam.finish_reason.value,
                stop_reason=beam.stop_reason,
                token_ids=list(beam.token_ids) if body.return_token_ids else msgspec.UNSET,
            )
            for number, beam in enumerate(found[0].beams)
        ],
        usage=usage_of(usage),
        prompt_token_ids=found[0].prompt_ids if body.return_token_ids else msgspec.UNSET,
    )
