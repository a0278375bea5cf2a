"""Response, as it is answered and stored, and the events that write it.

    Content ─► output_item.added ─► content_part.added ─► output_text.delta ... ─► output_text.done
                                                          ─► content_part.done ─► output_item.done

Each event is about the item that is open.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aioserve.server.chat_parts.answering import (
    Arguments,
    CallBegun,
    Content,
    Event,
    PartWriter,
    Reasoning,
)
from aioserve.server.openai.logprobs import GatheredLogprobs
from aioserve.server.openai.responses_api.items import (
    FunctionCall,
    Item,
    Message,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
    new_id,
)
from aioserve.server.openai.responses_api.response_request import (
    FunctionTool,
    ReasoningConfig,
    TextConfig,
    ToolChoice,
)

__all__ = [
    "IncompleteDetails",
    "InputTokensDetails",
    "ItemWriter",
    "OutputTokensDetails",
    "Response",
    "ResponseError",
    "ResponseUsage",
]


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Always 0: writing to the cache has no price of its own."""


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct, frozen=True):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


class ItemWriter(PartWriter[Item]):
    """Writer of items. Its events lack their sequence numbers."""

    def __init__(self, logprobs: GatheredLogprobs | None = None) -> None:
        """`logprobs` collects the log-probabilities of messages, if they are wanted."""
        super().__init__()
        self._logprobs = logprobs

    @property
    def is_within_call(self) -> bool:
        """True if a call is open whose arguments aren't whole JSON."""
        if not isinstance(self._open, FunctionCall):
            return False
        try:
            msgspec.json.decode(self.text)
        except (msgspec.DecodeError, RecursionError):
            return True
        return False

    def finish(self, status: Status) -> list[Event]:
        """Return the last events. An open item gets the status `status`. An answer without any text
        has an empty message."""
        events: list[Event] = []
        if self._open is None and not self.parts:
            events = self._begin(Content(""))
        return events + self._close(status)

    def _begun(self, piece: Reasoning | Content | CallBegun) -> tuple[Item, list[Event]]:
        match piece:
            case Content():
                item = Message(id=new_id("msg"), status="in_progress", role="assistant", content=[])
                part = OutputText(text="")
            case Reasoning():
                item = ReasoningItem(id=new_id("rs"), status="in_progress", content=[])
                part = ReasoningText(text="")
            case CallBegun():
                item = FunctionCall(
                    id=new_id("fc"),
                    status="in_progress",
                    call_id=piece.id,
                    name=piece.name,
                    arguments="",
                )
                part = None
        events = [self._item("response.output_item.added", item)]
        if part is not None:
            events.append(self._text("response.content_part.added", item, part=part))
        return item, events

    def _delta(self, piece: Reasoning | Content | Arguments) -> Event:
        item, delta = self._open, piece.text
        match piece:
            case Content():
                told = [] if self._logprobs is None else self._logprobs.add(piece.tokens)
                return self._text("response.output_text.delta", item, delta=delta, logprobs=told)
            case Reasoning():
                return self._text("response.reasoning_text.delta", item, delta=delta)
            case Arguments():
                return self._about("response.function_call_arguments.delta", item, delta=delta)

    def _ended(self, part: Item, text: str, status: Status) -> tuple[Item, list[Event]]:
        if isinstance(part, FunctionCall):
            whole = msgspec.structs.replace(part, status=status, arguments=text)
            kind = "response.function_call_arguments.done"
            events = [self._about(kind, part, name=part.name, arguments=text)]
        else:
            if isinstance(part, Message):
                told: Any = [] if self._logprobs is None else self._logprobs.take()
                content = OutputText(text=text, logprobs=told)
                events = [self._text("response.output_text.done", part, text=text, logprobs=told)]
            else:
                content = ReasoningText(text=text)
                events = [self._text("response.reasoning_text.done", part, text=text)]
            whole = msgspec.structs.replace(part, status=status, content=[content])
            events.append(self._text("response.content_part.done", part, part=content))
        return whole, [*events, self._item("response.output_item.done", whole)]

    def _item(self, kind: str, item: Item) -> Event:
        return {"type": kind, "output_index": len(self.parts), "item": item}

    def _text(self, kind: str, item: Item | None, **more: Any) -> Event:
        return self._about(kind, item, content_index=0, **more)

    def _about(self, kind: str, item: Item | None, **more: Any) -> Event:
        if item is None:
            raise RuntimeError("arguments of a call that hasn't begun")
        return {"type": kind, "item_id": item.id, "output_index": len(self.parts), **more}
