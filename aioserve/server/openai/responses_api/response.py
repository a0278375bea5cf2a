"""A response, as it is answered and stored, and the events that write it.

    Content ─► output_item.added ─► content_part.added ─► output_text.delta ... ─► output_text.done
                                                          ─► content_part.done ─► output_item.done

One item is open at a time, and each event is about the open one. A response that isn't streamed is
written the same way, with events that no client reads.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aioserve.server.chat_parts.answering import Arguments, CallBegun, Content, Piece, Reasoning
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
from aioserve.server.openai.responses_api.request import (
    FunctionTool,
    ReasoningConfig,
    ResponseFunctionChoice,
    TextConfig,
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
    """Nothing is written that has a price of its own."""


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
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["auto", "none", "required"] | ResponseFunctionChoice
    tools: list[FunctionTool]
    top_logprobs: Literal[0] = 0
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


Event = dict[str, Any]


class _Open:
    """The item that is being written."""

    def __init__(self, item: Message | ReasoningItem | FunctionCall) -> None:
        self.item = item
        self.texts: list[str] = []


class ItemWriter:
    """Events lack their sequence numbers."""

    def __init__(self) -> None:
        self.output: list[Item] = []
        """Items that are whole, in order."""
        self._open: _Open | None = None

    def write(self, piece: Piece) -> list[Event]:
        match piece:
            case Content():
                events = self._opened(Message)
                events.append(self._delta("response.output_text.delta", piece.text, logprobs=[]))
            case Reasoning():
                events = self._opened(ReasoningItem)
                events.append(self._delta("response.reasoning_text.delta", piece.text))
            case CallBegun():
                events = self._begin(
                    FunctionCall(
                        id=new_id("fc"),
                        status="in_progress",
                        call_id=piece.id,
                        name=piece.name,
                        arguments="",
                    )
                )
            case Arguments():
                events = [self._delta("response.function_call_arguments.delta", piece.text)]
        return events

    @property
    def is_within_call(self) -> bool:
        """Whether a call is open whose arguments are no whole JSON."""
        if self._open is None or not isinstance(self._open.item, FunctionCall):
            return False
        try:
            msgspec.json.decode("".join(self._open.texts))
        except (msgspec.DecodeError, RecursionError):
            return True
        return False

    def finish(self, status: Status) -> list[Event]:
        """`status` is that of the item which is open, if one is. An answer without any text has a
        message without any."""
        events: list[Event] = []
        if self._open is None and not self.output:
            events = self._opened(Message)
        return events + self._close(status)

    def _opened(self, kind: type[Message] | type[ReasoningItem]) -> list[Event]:
        """See to it that an item of that kind is open, with one part of content."""
        if self._open is not None and type(self._open.item) is kind:
            return []
        if kind is Message:
            item = Message(id=new_id("msg"), status="in_progress", role="assistant", content=[])
            part = OutputText(text="")
        else:
            item = ReasoningItem(id=new_id("rs"), status="in_progress", content=[])
            part = ReasoningText(text="")
        return [*self._begin(item), self._part("response.content_part.added", part)]

    def _begin(self, item: Message | ReasoningItem | FunctionCall) -> list[Event]:
        events = self._close("completed")
        self._open = _Open(item)
        events.append(self._item("response.output_item.added", item))
        return events

    def _close(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        text = "".join(self._open.texts)
        item = self._open.item
        if isinstance(item, FunctionCall):
            whole = msgspec.structs.replace(item, status=status, arguments=text)
            kind = "response.function_call_arguments.done"
            events = [self._about(kind, name=item.name, arguments=text)]
        else:
            if isinstance(item, Message):
                part = OutputText(text=text)
                events = [self._text("response.output_text.done", text=text, logprobs=[])]
            else:
                part = ReasoningText(text=text)
                events = [self._text("response.reasoning_text.done", text=text)]
            whole = msgspec.structs.replace(item, status=status, content=[part])
            events.append(self._part("response.content_part.done", part))
        events.append(self._item("response.output_item.done", whole))
        self.output.append(whole)
        self._open = None
        return events

    def _delta(self, kind: str, delta: str, **more: Any) -> Event:
        now = self._now
        now.texts.append(delta)
        about = self._about if isinstance(now.item, FunctionCall) else self._text
        return about(kind, delta=delta, **more)

    @property
    def _now(self) -> _Open:
        if self._open is None:
            raise RuntimeError("arguments of a call that hasn't begun")
        return self._open

    def _item(self, kind: str, item: Item) -> Event:
        return {"type": kind, "output_index": len(self.output), "item": item}

    def _part(self, kind: str, part: OutputText | ReasoningText) -> Event:
        return self._text(kind, part=part)

    def _text(self, kind: str, **more: Any) -> Event:
        return self._about(kind, content_index=0, **more)

    def _about(self, kind: str, **more: Any) -> Event:
        about = {"item_id": self._now.item.id, "output_index": len(self.output)}
        return {"type": kind, **about, **more}
