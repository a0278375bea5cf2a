"""One answer to messages, as pieces in the order in which they were written.

    ChatStream ──► Reasoning │ Content │ CallBegun │ Arguments ──► an API's items and events

Streams and whole answers are made of the same pieces. Knows no API.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from aioserve.engine.chat import ChatDelta, ChatStream
from aioserve.engine.engine import Engine
from aioserve.request import FinishReason, SamplingParams, Timings, Usage
from aioserve.server.chat_parts.plan import AnswerPlan
from aioserve.server.chat_parts.turns import Turns, renamed
from aioserve.server.errors import ApiError

__all__ = ["Answering", "Arguments", "Asked", "CallBegun", "Content", "Piece", "Reasoning"]


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of those of the call that began last."""

    text: str


Piece = Reasoning | Content | CallBegun | Arguments


class Asked(msgspec.Struct, frozen=True):
    """What a body asks of an engine."""

    turns: Turns
    params: SamplingParams
    plan: AnswerPlan
    continues: bool = False
    """The answer goes on with the last message, which is the assistant's."""
    options: Mapping[str, Any] = {}
    """Options of every request to the engine."""
    names: Mapping[str, str] = {}
    """What the API calls arguments of the engine."""


class Answering:
    """An answer that has begun. It owns the request to the engine, which `close` ends."""

    def __init__(self, stream: ChatStream, asked: Asked) -> None:
        self._stream = stream
        self._asked = asked
        self._cut = False
        self.reasoning_tokens: int = 0
        """Tokens that said something of the reasoning; the marks around it that say nothing count
        with what comes next."""

    @classmethod
    async def begun(cls, engine: Engine, asked: Asked) -> Answering:
        """Once the first token is there, so that what can be refused has been. Raises `ApiError`
        in the words of the API."""
        plan = asked.plan
        options = {**asked.options, **plan.options}
        if asked.continues:
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        try:
            stream = engine.chat(asked.turns.messages, asked.params, **options)
        except Exception as error:
            raise renamed(error, asked.names, asked.turns) from error
        try:
            await stream.started()
        except Exception as error:
            raise renamed(error, asked.names, asked.turns) from error
        except BaseException:
            stream.close()
            raise
        return cls(stream, asked)

    @property
    def usage(self) -> Usage:
        """So far."""
        return self._stream.usage

    @property
    def timings(self) -> Timings:
        """So far."""
        return self._stream.timings

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        return self._stream.finish_reasons

    @property
    def is_cut_off(self) -> bool:
        """Whether it had to end before its end."""
        return not self._cut and self._stream.finish_reason is FinishReason.LENGTH

    @property
    def stop_string(self) -> str | None:
        """The one that ended it."""
        reason = None if self._cut else self._stream.stop_reasons[0]
        return reason if isinstance(reason, str) else None

    async def batches(self, min_tokens: int = 1) -> AsyncGenerator[list[Piece], None]:
        """The pieces, as many at once as there are, for whose tokens it waits as
        `TokenStream.batch` does; neighbours of one kind are one. Raises `ApiError` for what ends
        the answer too soon."""
        if self._asked.plan.function is not None:
            yield [CallBegun(uuid.uuid4().hex[:9], self._asked.plan.function)]
        try:
            while not self._cut and (deltas := await self._stream.batch(min_tokens, by_token=True)):
                if pieces := self._pieces_of_all(deltas):
                    yield pieces
        except Exception as error:
            raise renamed(error, self._asked.names, self._asked.turns) from error
        if self._cut:
            self._stream.close()
        elif self._stream.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise ApiError(503, "the answer was ended by the server", code="draining")

    def _pieces_of_all(self, deltas: Sequence[ChatDelta]) -> list[Piece]:
        """Up to the one behind which nothing is told."""
        pieces: list[Piece] = []
        for delta in deltas:
            if delta.reasoning:
                self.reasoning_tokens += len(delta.tokens)
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
        if delta.content:
            is_call = self._asked.plan.function is not None
            before.append(Arguments(delta.content) if is_call else Content(delta.content))
        return before + begun

    def close(self) -> None:
        self._stream.close()


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces of one kind that follow each other."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is None or isinstance(piece, CallBegun) or type(last) is not type(piece):
            found.append(piece)
        else:
            found[-1] = type(piece)(getattr(last, "text", "") + piece.text)
    return found
