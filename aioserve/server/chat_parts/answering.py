"""One answer from its requests to the engine: submitted, awaited, written as an API writes it.

    Answering ──► Writer ──► one body, or events
    ChatStream ──► Reasoning │ Content │ CallBegun │ Arguments ──► parts of an answer, and events

`answered` is the same for all APIs: what differs is a `Writer`, which formats. Streams and whole
answers are made of the same pieces. Knows no API.
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
    "Asked",
    "CallBegun",
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
"""Reasons of answers that came to an end of their own."""


class Source(Protocol):
    """Requests to the engine that make one answer. It owns them."""

    @property
    def streams(self) -> Sequence[Counted]: ...

    def in_words(self) -> AbstractContextManager[None]:
        """Raise what is raised inside in the words of the API."""
        ...

    async def started(self) -> None:
        """Wait until there is a first token, or an end. Raises what ended a request."""
        ...

    def close(self) -> None:
        """End the requests that haven't ended."""
        ...


class Writer(ABC, Generic[B]):
    """One answer as an API writes it."""

    kind: ClassVar[bytes] = EVENT_STREAM
    """Media type of what is streamed."""

    def __init__(self, batches: Callable[[int], AsyncGenerator[B, None]]) -> None:
        self.batches: Callable[[int], AsyncGenerator[B, None]] = batches
        """Gives what is new each time, for as many tokens as `TokenStream.batch` waits for."""

    @abstractmethod
    async def whole(self) -> object:
        """Read to the end, and return the body."""

    def begin(self) -> bytes:
        """Return the events before the first batch."""
        return b""

    @abstractmethod
    def written(self, batch: B) -> AsyncGenerator[bytes, None]:
        """Give the events of a batch, which may be none, in parts that are sent one by one."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the events behind the last batch."""

    def failed(self, error: Exception) -> bytes:
        """Return the last events of an answer that `error` ends, or raise it."""
        raise error


async def answered(
    call: Call, source: Source, writer: Writer[Any], *, stream: bool | None
) -> object:
    """Answer with what `writer` makes, at once or event by event. Raises what can be refused
    before the first event."""
    if not stream:
        answer = await first_of(call, source, writer.whole())
        call.kept.made(sum([one.usage.completion_tokens for one in source.streams]))
        return answer
    await first_of(call, source, source.started())
    events = _events(source, writer, call.settings.stream_interval)
    return Events(events, source, kind=writer.kind)


async def first_of(call: Call, source: Source, awaited: Awaitable[T]) -> T:
    """Wait for what comes first of `source`, which is the call's from here on, in place of one
    before it. Closes the source and raises, in the words of the API, what that raises."""
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
    """Tokens that wrote the text, with the ones before it that wrote nothing."""


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of those of the call that began last."""

    text: str


Piece = Reasoning | Content | CallBegun | Arguments


class Asked(msgspec.Struct, frozen=True):
    """What a body asks of an engine."""

    messages: list[dict[str, Any]]
    params: SamplingParams
    plan: AnswerPlan
    options: Mapping[str, Any] = {}
    """Options of `Engine.chat`, beside those of the plan."""
    names: Mapping[str, str] = {}
    """What the API calls arguments of the engine."""
    placed: Callable[[str], tuple[str, str | None]] | None = None
    """Names places in messages as the API does, as `Turns.placed`."""


def size_of(
    call: Call,
    params: SamplingParams,
    messages: Sequence[object],
    *,
    stream: bool | None,
    **more: Any,
) -> AnswerSize:
    """Return the size that the answer to messages may have, with `more` of its fields."""
    context, told = call.facts.limits.max_model_len, {}
    if params.prompt_logprobs is not None:
        # As JSON they have more bytes than the prompt has tokens.
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
    """The answer to messages: a `Source`."""

    def __init__(self, engine: EngineLike, asked: Asked) -> None:
        """Submit. Raises `ApiError` in the words of the API."""
        self._asked = asked
        self._cut = False
        options = {**asked.options, **asked.plan.options}
        with self.in_words():
            self.stream: ChatStreamLike = engine.chat(asked.messages, asked.params, **options)

    @classmethod
    async def begun(
        cls, call: Call, asked: Asked, *, stream: bool | None, **size: Any
    ) -> Answering:
        """Submit when it is the call's turn. `size` are further fields of the answer's. Raises
        `ApiError` in the words of the API, for an answer that may be too long too."""
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
        """Whether it had to end before its end."""
        return not self._cut and self.stream.finish_reason is FinishReason.LENGTH

    @property
    def stop_string(self) -> str | None:
        """The one that ended it."""
        reason = None if self._cut else self.stream.stop_reasons[0]
        return reason if isinstance(reason, str) else None

    async def deltas(self, min_tokens: int) -> AsyncGenerator[list[ChatDelta], None]:
        """As `ChatStream.batch`, until the end."""
        while deltas := await self.stream.batch(min_tokens):
            yield deltas

    async def batches(self, min_tokens: int = 1) -> AsyncGenerator[list[Piece], None]:
        """The pieces, as many at once as there are, for whose tokens it waits as
        `TokenStream.batch` does; neighbours of one kind are one. Raises `ApiError` for what ends
        the answer too soon."""
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
        """Up to the one behind which nothing is told."""
        pieces: list[Piece] = []
        for delta in deltas:
            pieces += self._pieces_of(delta)
            if self._cut:
                break
        return pieces if len(pieces) < 2 else _joined(pieces)

    def _pieces_of(self, delta: ChatDelta) -> list[Piece]:
        """Reasoning, what goes on with a call, text, calls that begin: a delta doesn't say in which
        order they came, and this is the one in which most models write."""
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
    """Join pieces of one kind that follow each other."""
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
    """From the pieces of an answer to its parts, and the events that tell of them. One part is open
    at a time. An answer that isn't streamed is written the same way, with events that no client
    reads."""

    def __init__(self) -> None:
        self.parts: list[P] = []
        """Parts that are whole, in order."""
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
        """Write what comes of an answer to its end."""
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
        """Return the part that begins with `piece`, and the events of its begin."""

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
