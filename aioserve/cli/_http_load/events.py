"""Parser of a completion's stream: server-sent events, in any pieces of bytes, become chunks.

Only what a measurement needs is decoded of a chunk. Knows neither clocks nor connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

__all__ = ["DONE", "Choice", "Chunk", "EventLines", "Usage", "decoded_chunk"]

DONE = b"[DONE]"
MAX_LINE_BYTES = 2**23
"""Most bytes of a line of a stream: a chunk has some hundred."""
MAX_TOKENS = 10**12

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def has_tokens(self) -> bool:
        """True if it carries something that the model generated.

        A chunk with only a role, or with an empty text, does not.
        """
        if self.text or self.token_ids:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content
            or delta.reasoning_content
            or delta.reasoning
            or delta.refusal
            or delta.tool_calls
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class Usage(msgspec.Struct):
    """Token counts of a request, as the server reports them."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


def decoded_chunk(data: bytes) -> Chunk:
    """Decode a chunk. Raises `msgspec.MsgspecError` for anything else."""
    try:
        return _decode(data)
    except RecursionError:
        raise msgspec.DecodeError("a chunk is nested too deep") from None


class EventLines:
    """Takes pieces of a stream, and yields the data of each data line."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def of(self, piece: bytes) -> Iterator[bytes]:
        """Yield data of the lines that this piece completes, with what earlier pieces left.

        Raises `msgspec.DecodeError` for a line of more than `MAX_LINE_BYTES`.
        """
        first, *others = piece.split(b"\n")
        self._rest += first
        if len(self._rest) > MAX_LINE_BYTES:
            raise msgspec.DecodeError(f"a line has more than {MAX_LINE_BYTES} bytes")
        if not others:
            return
        lines = [bytes(self._rest), *others]
        self._rest = bytearray(lines.pop())
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()

    def end(self) -> Iterator[bytes]:
        """Yield data of a last line without a line end."""
        return self.of(b"\n")
