"""Parts of a completion, as they come and whole."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Sequence

import msgspec

from aioserve.arguments import brief, quoted

__all__ = ["Parts", "ToolCall", "ToolCallDelta", "call_id", "joined", "short_id", "whole_calls"]

_LETTERS = string.ascii_letters + string.digits


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """New part of one tool call. Its first delta has the id and the name."""

    index: int
    """Index of the call in its completion, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """Next piece of the arguments: joined over a call, the JSON that the model wrote."""

    def __repr__(self) -> str:
        about = {"id": self.id, "name": self.name, "arguments": self.arguments}
        return brief(self, self.index, **about)


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """One tool call of a completion."""

    id: str
    name: str
    arguments: str
    """Arguments as the model wrote them: JSON of an object, unless it made a mistake or was
    truncated.
    """

    def __repr__(self) -> str:
        return brief(self, quoted(self.id), quoted(self.name), quoted(self.arguments))


class Parts(msgspec.Struct, frozen=True):
    """New parts of a completion."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


def joined(parts: Sequence[Parts]) -> Parts:
    """Join consecutive parts into one."""
    if len(parts) == 1:
        return parts[0]
    return Parts(
        "".join([one.content for one in parts]),
        "".join([one.reasoning for one in parts]),
        tuple([call for one in parts for call in one.tool_calls]),
    )


def whole_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Put the tool calls of one completion together."""
    begun: dict[int, tuple[str, str]] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            begun[delta.index] = (delta.id, delta.name)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(ToolCall(*begun[index], "".join(pieces)) for index, pieces in arguments.items())


def call_id() -> str:
    """Return a new id of a tool call, in the form of OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Return a new id of nine letters and digits: Mistral's templates take nothing else."""
    return "".join([secrets.choice(_LETTERS) for _ in range(9)])
