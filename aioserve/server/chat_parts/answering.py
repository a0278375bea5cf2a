"""One answer, from its requests to the engine to the format of an API.

    Answering ──► Writer ──► one body, or events
    ChatStream ──► Reasoning │ Content │ CallBegun │ Arguments ──► parts of an answer, and events

`answered` is the same for all APIs, and a `Writer` formats the answer for one of them. Streams and
whole answers are made of the same pieces. Knows no API.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from aioserve.engine.chat_answers import ChatDelta
from aioserve.engine.interface import ChatStreamLike, EngineLike
from aioserve.request import FinishReason, SamplingParams, Token
from aioserve.server.answer_sizes import AnswerSize
from aioserve.server.app_state import Call
from aioserve.server.call_log import Counted
from aioserve.server.chat_parts.plan import AnswerPlan
from aioserve.server.chat_parts.sampling import units_of
from aioserve.server.endpoint import EVENT_STREAM, Events
from aioserve.server.errors import ApiError, as_named

__all__ = [
    "OWN_ENDS",
    "Answering",
    "Arguments",
    "CallBegun",
    "ChatInput",
    "Content",
    "Event",
    "PartWriter",
    "Piece",
    "Reasoning",
    "Source",
    "Writer",
    "answered",
    "size_of",
]

B = TypeVar("B")
P = TypeVar("P")
T = TypeVar("T")

OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
"""Reasons of answers that ended by themselves."""


class Source(Protocol):
    """Requests to the engine that make one answer, and their owner."""

    @property
    def streams(self) -> Sequence[Counted]: ...

    def in_words(self) -> AbstractContextManager[None]:
        """Raise errors of the block in the words of the API."""
        ...

    async def started(self) -> None:
        """Wait until there is a first token, or an end. Raises the error that ended a request."""
        ...

    def close(self) -> None:
        """End the requests that haven't ended."""
        ...


class Writer(ABC, Generic[B]):
    """Formatter of one answer for one API."""

    kind: ClassVar[bytes] = EVENT_STREAM
    """Media type of a stream."""

    def __init__(self, batches: Callable[[int], AsyncGenerator[B, None]]) -> None:
        self.batches: Callable[[int], AsyncGenerator[B, None]] = batches
        """Function that yields what is new. Its argument is the number of tokens to wait for, as in
        `TokenStream.batch`."""

    @abstractmethod
    async def whole(self) -> object:
        """Read to the end, and return the body."""

    def begin(self) -> bytes:
        """Return the events before the first batch."""
        return b""

    @abstractmethod
    def written(self, batch: B) -> AsyncGenerator[bytes, None]:
        """Yield the events of a batch, if any, in parts that are sent one by one."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the events after the last batch."""

    def failed(self, error: Exception) -> bytes:
        """Return the last events of an answer that `error` ends, or raise it."""
        raise error


async def answered(
    call: Call, source: Source, writer: Writer[Any], *, stream: bool | None
) -> object:
    """Answer with the output of `writer`, whole or event by event. Errors before the first event
    are raised, so that they have their own status."""
    if not stream:
        answer = await first_of(call, source, writer.whole())
        call.kept.made(sum([one.usage.completion_tokens for one in source.streams]))
        return answer
    await first_of(call, source, source.started())
    events = _events(source, writer, call.settings.stream_interval)
    return Events(events, source, kind=writer.kind)


async def first_of(call: Call, source: Source, awaited: Awaitable[T]) -> T:
    """Return the first result of `source`, which the call's log counts from here on, in place of an
    earlier one. On an error, closes the source and raises in the words of the API."""
    call.call_log.streams = [*source.streams]
    try:
        with source.in_words():
            return await awaited
    except BaseException:
        source.close()
        raise


async def _events(
    source: Source, writer: Writer[Any], min_tokens: int
) -> AsyncGenerator[bytes, None]:
    if begun := writer.begin():
        yield begun
    try:
        with source.in_words():
            async with aclosing(writer.batches(min_tokens)) as batches:
                async for batch in batches:
                    async with aclosing(writer.written(batch)) as parts:
                        async for events in parts:
                            if events:
                                yield events
        last = writer.end()
    except Exception as error:
        last = writer.failed(error)
    yield last


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str
    tokens: tuple[Token, ...] = ()
    """Tokens of the text, including tokens before it that have no text."""


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """Next piece of the arguments of the call that began last."""

    text: str


Piece = Reasoning | Content | CallBegun | Arguments


class ChatInput(msgspec.Struct, frozen=True):
    """Request to the engine that a body asks for."""

    messages: list[dict[str, Any]]
    params: SamplingParams
    plan: AnswerPlan
    options: Mapping[str, Any] = {}
    """Options of `Engine.chat`, besides those of the plan."""
    names: Mapping[str, str] = {}
    """Names that the API has for arguments of the engine."""
    placed: Callable[[str], tuple[str, str | None]] | None = None
    """Names places in messages as the API does, like `Turns.placed`."""


def size_of(
    call: Call,
    params: SamplingParams,
    messages: Sequence[object],
    *,
    stream: bool | None,
    **more: Any,
) -> AnswerSize:
    """Return the largest size of the answer to `messages`. Other fields of the size are in
    `more`."""
    context, told = call.facts.limits.max_model_len, {}
    if params.prompt_logprobs is not None:
        # Messages as JSON have more bytes than their prompt has tokens.
        told = {"prompt_tokens": min(len(msgspec.json.encode(messages)), context)}
    sizes: dict[str, Any] = {
        "n": params.n,
        "tokens": min(params.max_tokens or context, context),
        "says_tokens": params.max_tokens is not None,
        "buffered_tokens": call.engine.config.max_buffered_tokens if stream else None,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        **told,
    }
    return AnswerSize(**sizes | more)


class Answering:
    """Answer to messages: a `Source`."""

    def __init__(self, engine: EngineLike, asked: ChatInput) -> None:
        """Submit the request. Raises `ApiError` in the words of the API."""
        self._asked = asked
        self._cut = False
        options = {**asked.options, **asked.plan.options}
        with self.in_words():
            self.stream: ChatStreamLike = engine.chat(asked.messages, asked.params, **options)

    @classmethod
    async def begun(
        cls, call: Call, asked: ChatInput, *, stream: bool | None, **size: Any
    ) -> Answering:
        """Submit the request when it is the call's turn. More fields of the answer's size are in
        `size`. Raises `ApiError` in the words of the API, also for an answer that may be too
        long."""
        call.kept.begin(size_of(call, asked.params, asked.messages, stream=stream, **size))
        await call.pace.before(units_of(asked.messages))
        return cls(call.engine, asked)

    @property
    def streams(self) -> Sequence[ChatStreamLike]:
        return (self.stream,)

    def in_words(self) -> AbstractContextManager[None]:
        return as_named(self._asked.names, self._asked.placed)

    async def started(self) -> None:
        await self.stream.started()

    def close(self) -> None:
        self.stream.close()

    @property
    def is_cut_off(self) -> bool:
        """True if a limit on its length ended it early."""
        return not self._cut and self.stream.finish_reason is FinishReason.LENGTH

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended it; None if there was none."""
        reason = None if self._cut else self.stream.stop_reasons[0]
        return reason if isinstance(reason, str) else None

    async def deltas(self, min_tokens: int) -> AsyncGenerator[list[ChatDelta], None]:
        """Yield deltas as `ChatStream.batch` returns them, until the end."""
        while deltas := await self.stream.batch(min_tokens):
            yield deltas

    async def batches(self, min_tokens: int = 1) -> AsyncGenerator[list[Piece], None]:
        """Yield pieces, as many at once as there are. Neighbours of one kind are joined. The wait
        for tokens is that of `TokenStream.batch`. Raises `ApiError` if the server ended the
        answer."""
        if self._asked.plan.function is not None:
            yield [CallBegun(uuid.uuid4().hex[:9], self._asked.plan.function)]
        while not self._cut and (deltas := await self.stream.batch(min_tokens, by_token=True)):
            if pieces := self._pieces_of_all(deltas):
                yield pieces
        if self._cut:
            self.stream.close()
        elif self.stream.finish_reason not in OWN_ENDS:
            raise ApiError(503, "the answer was ended by the server", code="draining")

    def _pieces_of_all(self, deltas: Sequence[ChatDelta]) -> list[Piece]:
        """Return the pieces of all deltas, up to the second call if only one is allowed."""
        pieces: list[Piece] = []
        for delta in deltas:
            pieces += self._pieces_of(delta)
            if self._cut:
                break
        return pieces if len(pieces) < 2 else _joined(pieces)

    def _pieces_of(self, delta: ChatDelta) -> list[Piece]:
        """Return reasoning, more arguments of a call, text, and new calls, in this order. A delta
        has no order, and most models write in this one."""
        before: list[Piece] = [Reasoning(delta.reasoning)] if delta.reasoning else []
        begun: list[Piece] = []
        for call in delta.tool_calls:
            if call.index and self._asked.plan.one_call:
                self._cut = True
                break
            if call.id is not None and call.name is not None:
                begun.append(CallBegun(call.id, call.name))
            if call.arguments:
                (begun or before).append(Arguments(call.arguments))
        if content := self._asked.plan.content_of(delta.content):
            is_call = self._asked.plan.function is not None
            before.append(Arguments(content) if is_call else Content(content, delta.tokens))
        return before + begun


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join neighbouring pieces of one kind."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is None or isinstance(piece, CallBegun) or type(last) is not type(piece):
            found.append(piece)
        elif isinstance(last, Content) and isinstance(piece, Content):
            found[-1] = Content(last.text + piece.text, last.tokens + piece.tokens)
        else:
            found[-1] = type(piece)(getattr(last, "text", "") + piece.text)
    return found


Event = dict[str, Any]


class PartWriter(ABC, Generic[P]):
    """Converts the pieces of an answer to its parts and their events.

    One part is open at a time. Whole answers are written the same way, and their events are
    dropped.
    """

    def __init__(self) -> None:
        self.parts: list[P] = []
        """Finished parts, in order."""
        self._open: P | None = None
        self._kind: type[Piece] | None = None
        """Kind of the piece that the open part began with."""
        self._texts: list[str] = []

    def write(self, piece: Piece) -> list[Event]:
        if isinstance(piece, CallBegun):
            return self._begin(piece)
        events: list[Event] = []
        if not isinstance(piece, Arguments) and type(piece) is not self._kind:
            events = self._begin(piece)
        self._texts.append(piece.text)
        return [*events, self._delta(piece)]

    async def write_all(self, answering: Answering) -> None:
        """Write all pieces of an answer, to its end."""
        async with aclosing(answering.batches()) as batches:
            async for pieces in batches:
                for piece in pieces:
                    self.write(piece)

    @property
    def text(self) -> str:
        """Text of the open part so far."""
        return "".join(self._texts)

    @abstractmethod
    def _begun(self, piece: Reasoning | Content | CallBegun) -> tuple[P, list[Event]]:
        """Return the part that begins with `piece`, and the events of its start."""

    @abstractmethod
    def _delta(self, piece: Reasoning | Content | Arguments) -> Event:
        """Return the event that adds `piece` to the open part."""

    @abstractmethod
    def _ended(self, part: P, text: str, status: Any) -> tuple[P, list[Event]]:
        """Return the open part with its text, and the events of its end."""

    def _begin(self, piece: Reasoning | Content | CallBegun) -> list[Event]:
        events = self._close()
        self._open, begun = self._begun(piece)
        self._kind = type(piece)
        return [*events, *begun]

    def _close(self, status: Any = "completed") -> list[Event]:
        if self._open is None:
            return []
        part, events = self._ended(self._open, self.text, status)
        self.parts.append(part)
        self._open, self._kind, self._texts = None, None, []
        return events
