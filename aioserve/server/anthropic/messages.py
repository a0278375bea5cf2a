"""`/v1/messages`: answers in blocks, whole or as events, and how long a conversation would be."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from aioserve.request import Usage
from aioserve.server.anthropic.request import (
    NAMES,
    Conversation,
    MessageRequest,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    asked_of,
    continues,
    conversation_of,
    plan_of,
    template_variables,
)
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.answering import (
    Answering,
    Arguments,
    CallBegun,
    Content,
    Piece,
    Reasoning,
)
from aioserve.server.chat_parts.turns import renamed
from aioserve.server.endpoint import Endpoint, Events
from aioserve.server.errors import ApiError

__all__ = [
    "ANTHROPIC_ERRORS",
    "COUNT_TOKENS",
    "MESSAGES",
    "AnthropicErrorBody",
    "AnthropicMessage",
    "MessageUsage",
    "TokenCount",
]


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: AnthropicErrorDetail
    request_id: str


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class _AnthropicErrors:
    kind: type[AnthropicErrorBody] = AnthropicErrorBody
    id_header: bytes | None = b"request-id"

    def body(self, error: ApiError, request_id: str) -> AnthropicErrorBody:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        return AnthropicErrorBody(
            AnthropicErrorDetail(_TYPES.get(error.status, kind), error.message), request_id
        )

    def event(self, error: ApiError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(self.body(error, request_id))


ANTHROPIC_ERRORS: _AnthropicErrors = _AnthropicErrors()


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
Block = TextBlock | ThinkingBlock | ToolUseBlock
Event = dict[str, Any]


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    """Tokens that were computed."""
    cache_creation_input_tokens: int = 0
    """Nothing is written that has a price of its own."""
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


def usage_of(usage: Usage, output_tokens: int) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=output_tokens,
    )


class BlockWriter:
    """From the pieces of an answer to its blocks, and the events that tell of them. One block is
    open at a time."""

    def __init__(self) -> None:
        self.content: list[Block] = []
        """Blocks that are whole, in order."""
        self.has_broken_call: bool = False
        self._open: Block | None = None
        self._texts: list[str] = []

    def write(self, piece: Piece) -> list[Event]:
        match piece:
            case Content():
                events = self._opened(TextBlock(text=""))
                delta = {"type": "text_delta", "text": piece.text}
            case Reasoning():
                events = self._opened(ThinkingBlock(thinking=""))
                delta = {"type": "thinking_delta", "thinking": piece.text}
            case CallBegun():
                return self._begin(ToolUseBlock(id=piece.id, name=piece.name, input={}))
            case Arguments():
                events = []
                delta = {"type": "input_json_delta", "partial_json": piece.text}
        self._texts.append(piece.text)
        return [*events, self._event("content_block_delta", delta=delta)]

    def finish(self) -> list[Event]:
        if self._open is None:
            return []
        text, self._texts = "".join(self._texts), []
        match self._open:
            case TextBlock():
                whole = TextBlock(text=text)
            case ThinkingBlock():
                whole = ThinkingBlock(thinking=text)
            case ToolUseBlock():
                whole = msgspec.structs.replace(self._open, input=self._parsed(text))
        events = [self._event("content_block_stop")]
        self.content.append(whole)
        self._open = None
        return events

    def _parsed(self, arguments: str) -> dict[str, Any]:
        """Nothing where they are no object, or don't end: the stop reason is another one then."""
        try:
            return msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            self.has_broken_call = True
            return {}

    def _opened(self, block: TextBlock | ThinkingBlock) -> list[Event]:
        return [] if type(self._open) is type(block) else self._begin(block)

    def _begin(self, block: Block) -> list[Event]:
        events = self.finish()
        self._open = block
        events.append(self._event("content_block_start", content_block=block))
        return events

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "index": len(self.content), **more}


class _Answered:
    """One message while it is written."""

    def __init__(self, answering: Answering, body: MessageRequest, interval: int) -> None:
        self._answering = answering
        self._interval = interval
        self._max_tokens = body.max_tokens
        self._writer = BlockWriter()
        self._message = AnthropicMessage(
            id=f"msg_{uuid.uuid4().hex}", model=body.model, usage=usage_of(answering.usage, 0)
        )

    async def whole(self) -> AnthropicMessage:
        try:
            async with aclosing(self._answering.batches()) as batches:
                async for pieces in batches:
                    for piece in pieces:
                        self._writer.write(piece)
        finally:
            self._answering.close()
        self._writer.finish()
        usage = self._answering.usage
        return msgspec.structs.replace(
            self._message,
            content=self._writer.content,
            stop_reason=self._stop_reason(),
            stop_sequence=self._answering.stop_string,
            usage=usage_of(usage, usage.completion_tokens),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        yield _encoded([{"type": "message_start", "message": self._message}, {"type": "ping"}])
        async with aclosing(self._answering.batches(self._interval)) as batches:
            async for pieces in batches:
                yield _encoded([one for piece in pieces for one in self._writer.write(piece)])
        events = self._writer.finish()
        usage = self._answering.usage
        delta = {
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._answering.stop_string,
        }
        counts = usage_of(usage, usage.completion_tokens)
        events.append({"type": "message_delta", "delta": delta, "usage": counts})
        yield _encoded([*events, {"type": "message_stop"}])

    def _stop_reason(self) -> StopReason:
        answering, writer = self._answering, self._writer
        if answering.is_cut_off:
            full = answering.usage.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        if answering.stop_string is not None:
            return "stop_sequence"
        calls = any(isinstance(block, ToolUseBlock) for block in writer.content)
        return "tool_use" if calls and not writer.has_broken_call else "end_turn"


def _encoded(events: list[Event]) -> bytes:
    return b"".join(
        [
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
            for event in events
        ]
    )


async def messages(call: Call, body: MessageRequest) -> AnthropicMessage | Events:
    answering = await Answering.begun(call.engine, asked_of(call, body))
    call.call_log.answers_with(answering)
    answered = _Answered(answering, body, call.settings.stream_interval)
    if body.stream:
        return Events(answered.events(), answering)
    return await answered.whole()


MESSAGES: Endpoint[MessageRequest] = Endpoint(
    "/v1/messages",
    messages,
    ANTHROPIC_ERRORS,
    kind=MessageRequest,
    answer=AnthropicMessage,
    summary="Answer a conversation in blocks",
)


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int
    """Cached or not."""


async def count_tokens(call: Call, body: Conversation) -> TokenCount:
    turns = conversation_of(call, body)
    goes_on = continues(turns, body)
    plan = plan_of(call, body)
    variables = template_variables(call, body)
    try:
        ids = await call.engine.encode(
            turns.messages,
            tools=plan.tools,
            chat_template_kwargs=variables,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
        )
    except Exception as error:
        raise renamed(error, NAMES, turns) from error
    return TokenCount(len(ids))


COUNT_TOKENS: Endpoint[Conversation] = Endpoint(
    "/v1/messages/count_tokens",
    count_tokens,
    ANTHROPIC_ERRORS,
    kind=Conversation,
    answer=TokenCount,
    summary="Count the tokens of a conversation",
)
