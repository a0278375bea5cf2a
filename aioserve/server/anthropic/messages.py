"""`/v1/messages`: answers in blocks, whole or as events, and token counts of conversations."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec

from aioserve.request import Usage
from aioserve.server.anthropic.message_request import (
    NAMES,
    Conversation,
    MessageRequest,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    chat_input_of,
    conversation_of,
    framing_of,
    plan_of,
)
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.answering import (
    Answering,
    Arguments,
    CallBegun,
    Content,
    Event,
    PartWriter,
    Piece,
    Reasoning,
    Writer,
    answered,
)
from aioserve.server.chat_parts.sampling import units_of
from aioserve.server.endpoint import ErrorShape, endpoint, named_event
from aioserve.server.errors import TYPES, ApiError, as_named

__all__ = [
    "ANTHROPIC_ERRORS",
    "AnthropicErrorBody",
    "AnthropicMessage",
    "MessageUsage",
    "TokenCount",
    "count_tokens",
    "messages",
]


class AnthropicErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: dict[str, Any] | None = None
    """Facts for clients that retry without the refused feature."""


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: AnthropicErrorDetail
    request_id: str


def _error_body(error: ApiError, request_id: str) -> AnthropicErrorBody:
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    types = TYPES | {413: "request_too_large", 504: "timeout_error"}
    details = None if error.details is None else dict(error.details)
    return AnthropicErrorBody(
        AnthropicErrorDetail(types.get(error.status, kind), error.message, details), request_id
    )


ANTHROPIC_ERRORS: ErrorShape = ErrorShape(AnthropicErrorBody, _error_body, "error", b"request-id")


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_creation_input_tokens: int = 0
    """Always 0: writing to the cache has no price of its own."""
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


class BlockWriter(PartWriter[Block]):
    """Writer of blocks."""

    has_broken_call: bool = False

    def finish(self) -> list[Event]:
        return self._close()

    def _begun(self, piece: Reasoning | Content | CallBegun) -> tuple[Block, list[Event]]:
        match piece:
            case Content():
                block = TextBlock(text="")
            case Reasoning():
                block = ThinkingBlock(thinking="")
            case CallBegun():
                block = ToolUseBlock(id=piece.id, name=piece.name, input={})
        return block, [self._event("content_block_start", content_block=block)]

    def _delta(self, piece: Reasoning | Content | Arguments) -> Event:
        match piece:
            case Content():
                delta = {"type": "text_delta", "text": piece.text}
            case Reasoning():
                delta = {"type": "thinking_delta", "thinking": piece.text}
            case Arguments():
                delta = {"type": "input_json_delta", "partial_json": piece.text}
        return self._event("content_block_delta", delta=delta)

    def _ended(self, part: Block, text: str, status: Any) -> tuple[Block, list[Event]]:
        match part:
            case TextBlock():
                whole = TextBlock(text=text)
            case ThinkingBlock():
                whole = ThinkingBlock(thinking=text)
            case ToolUseBlock():
                whole = msgspec.structs.replace(part, input=self._parsed(text))
        return whole, [self._event("content_block_stop")]

    def _parsed(self, arguments: str) -> dict[str, Any]:
        """Parse the arguments of a call. Incomplete or invalid ones become an empty object, and
        change the stop reason."""
        try:
            return msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            self.has_broken_call = True
            return {}

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "index": len(self.parts), **more}


class MessageWriter(Writer[list[Piece]]):
    """Writer of one message."""

    def __init__(self, body: MessageRequest, answering: Answering) -> None:
        super().__init__(answering.batches)
        self._body = body
        self._answering = answering
        self._blocks = BlockWriter()
        self._id = f"msg_{uuid.uuid4().hex}"

    async def whole(self) -> AnthropicMessage:
        await self._blocks.write_all(self._answering)
        self._blocks.finish()
        return self._message(content=self._blocks.parts, usage=self._usage, **self._stopped)

    def begin(self) -> bytes:
        message = self._message(usage=usage_of(self._answering.stream.usage, 0))
        return _encoded([{"type": "message_start", "message": message}, {"type": "ping"}])

    async def written(self, batch: list[Piece]) -> AsyncGenerator[bytes, None]:
        yield _encoded([event for piece in batch for event in self._blocks.write(piece)])

    def end(self) -> bytes:
        events = self._blocks.finish()
        events.append({"type": "message_delta", "delta": self._stopped, "usage": self._usage})
        return _encoded([*events, {"type": "message_stop"}])

    def _message(self, **more: Any) -> AnthropicMessage:
        return AnthropicMessage(id=self._id, model=self._body.model, **more)

    @property
    def _usage(self) -> MessageUsage:
        usage = self._answering.stream.usage
        return usage_of(usage, usage.completion_tokens)

    @property
    def _stopped(self) -> dict[str, Any]:
        stop_sequence = self._answering.stop_string
        return {"stop_reason": self._stop_reason(), "stop_sequence": stop_sequence}

    def _stop_reason(self) -> StopReason:
        answering, blocks = self._answering, self._blocks
        if answering.is_cut_off:
            full = answering.stream.usage.completion_tokens < self._body.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        if answering.stop_string is not None:
            return "stop_sequence"
        calls = any(isinstance(block, ToolUseBlock) for block in blocks.parts)
        return "tool_use" if calls and not blocks.has_broken_call else "end_turn"


def _encoded(events: list[Event]) -> bytes:
    return b"".join([named_event(event["type"], event) for event in events])


@endpoint(
    ANTHROPIC_ERRORS,
    "/v1/messages",
    "Answer a conversation in blocks",
    method="POST",
    answer=AnthropicMessage,
    streams="if asked",
)
async def messages(call: Call, body: MessageRequest) -> object:
    answering = await Answering.begun(call, await chat_input_of(call, body), stream=body.stream)
    return await answered(call, answering, MessageWriter(body, answering), stream=body.stream)


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int
    """Tokens of the prompt, cached or not."""


@endpoint(
    ANTHROPIC_ERRORS,
    "/v1/messages/count_tokens",
    "Count the tokens of a conversation",
    method="POST",
)
async def count_tokens(call: Call, body: Conversation) -> TokenCount:
    turns = await conversation_of(call, body)
    framing, tools = framing_of(call, body, turns), plan_of(call, body).tools
    await call.pace.before(units_of(turns.messages))
    with as_named(NAMES, turns.placed):
        ids = await call.engine.encode(turns.messages, tools=tools, **framing)
    return TokenCount(len(ids))
