"""Chunks of a streamed answer, as server-sent events.

All chunks of an answer begin alike, so that is encoded once; each costs the encoding of its choice
and of the counts, where those are asked for.
"""

from __future__ import annotations

import msgspec

from aioserve.request import Usage
from aioserve.server.openai.usage import StreamOptions, usage_of

__all__ = ["DONE", "Chunks"]

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class Chunks:
    """`about` is what all chunks say of the answer, as an object of JSON."""

    __slots__ = ("_head", "_tail", "counts_always", "counts_last")

    def __init__(self, about: msgspec.Struct, options: StreamOptions | None) -> None:
        options = StreamOptions() if options is None else options
        self._head = b"data: " + _encode(about)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        self.counts_last: bool = bool(options.include_usage)
        """A chunk without choices tells them."""
        self.counts_always: bool = bool(options.continuous_usage_stats)
        """Every chunk tells those so far."""

    def chunk(self, choice: msgspec.Struct, usage: Usage | None = None) -> bytes:
        """One event. `usage` where every chunk tells it."""
        if usage is None:
            return self._head + _encode(choice) + self._tail
        return self._head + _encode(choice) + self._counted(usage)

    def end(self, usage: Usage) -> bytes:
        """The last events of an answer that is whole."""
        return self._head + self._counted(usage) + DONE if self.counts_last else DONE

    def _counted(self, usage: Usage) -> bytes:
        return b'],"usage":' + _encode(usage_of(usage)) + b"}\n\n"
