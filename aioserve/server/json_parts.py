"""JSON answers of any length, in parts of a bounded size that are made while they are sent.

    value ──► msgspec ──► text ─ place ─ text ─ place ─ text
                                   └─ LongJson: its own parts, made when it is their turn

A whole answer with log-probabilities may be a thousand times as long as its request. Encoded at
once, it would be in memory several times, however slowly its client reads. Short values are encoded
by msgspec, and a `LongJson` stands for a long one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from aioserve.server.pace import Pace

__all__ = [
    "ENCODED_BYTES_PER_UNIT",
    "PART_BYTES",
    "LongJson",
    "gathered",
    "inner_json",
    "long_ids",
    "parts_of",
    "sliced",
]

PART_BYTES = 64 * 2**10
"""Bytes that are sent at once, about: as many as the transport takes before it asks to wait."""
PART_UNITS = 64
"""Units of work to send one part."""
ENCODED_BYTES_PER_UNIT = 1024
"""Bytes of encoded JSON that are copied in one unit of work, several times over."""
IDS_AT_ONCE = 16_384
"""Ids that are encoded at once, in less than a millisecond."""

_PLACE = b"\0"
"""Placeholder of a `LongJson`. JSON has no such byte: in a str it is written `\\u0000`."""


class LongJson:
    """JSON value in parts, which may stand in any field of an answer."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Callable[[], AsyncIterator[bytes]]) -> None:
        """`parts` begins a new iteration at each call."""
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts()

    @classmethod
    def of_list(cls, values: Callable[[], AsyncIterable[object]]) -> LongJson:
        """List whose values are made one at a time, and may have long parts themselves."""

        async def parts() -> AsyncGenerator[bytes, None]:
            before = b"["
            async for value in values():
                yield before
                before = b","
                async for part in parts_of(value):
                    yield part
            yield b"[]" if before == b"[" else b"]"

        return cls(parts)

    @classmethod
    def of_inner(cls, *pieces: Sequence[bytes] | Callable[[], AsyncIterable[bytes]]) -> LongJson:
        """List of entries that are JSON already. A piece has several entries, without brackets."""

        async def parts() -> AsyncGenerator[bytes, None]:
            before = b"["
            for some in pieces:
                async for piece in some() if callable(some) else _each(some):
                    yield before
                    before = b","
                    yield piece
            yield b"[]" if before == b"[" else b"]"

        return cls(parts)

    @classmethod
    def of_json(cls, data: bytes) -> LongJson:
        """Value that is JSON already."""

        async def parts() -> AsyncGenerator[bytes, None]:
            for start in range(0, len(data), PART_BYTES):
                yield data[start : start + PART_BYTES]

        return cls(parts)


async def _each(pieces: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece


def inner_json(values: list[Any]) -> bytes:
    """JSON of a list, without its brackets."""
    return msgspec.json.encode(values)[1:-1]


async def long_ids(ids: Sequence[int], pace: Pace) -> LongJson:
    """Token ids, encoded once for all their places."""
    pieces: list[bytes] = []
    for start in range(0, len(ids), IDS_AT_ONCE):
        some = list(ids[start : start + IDS_AT_ONCE])
        await pace.before(len(some) // 16)
        pieces.append(inner_json(some))
    return LongJson.of_inner(pieces)


async def parts_of(value: object) -> AsyncGenerator[bytes, None]:
    """Yield `value` as JSON. A value that isn't JSON raises msgspec's error before the first
    part."""
    long: list[LongJson] = []

    def placed(one: object) -> msgspec.Raw:
        if not isinstance(one, LongJson):
            raise NotImplementedError(f"{type(one).__name__} can't be written as JSON")
        long.append(one)
        return msgspec.Raw(_PLACE)

    texts = msgspec.json.encode(value, enc_hook=placed).split(_PLACE)
    for text, one in zip_longest(texts, long):
        yield text
        if one is not None:
            async for part in one:
                yield part


async def gathered(
    parts: AsyncIterator[bytes], pace: Pace, first_bytes: int = PART_BYTES
) -> AsyncGenerator[bytes, None]:
    """Yield the same bytes in larger parts, with turns of the loop between them. The first part has
    at least `first_bytes`, and the others `PART_BYTES`, except the last."""
    some: list[bytes] = []
    length, least = 0, first_bytes
    async for part in parts:
        some.append(part)
        length += len(part)
        if length >= least:
            await pace.before(PART_UNITS + length // ENCODED_BYTES_PER_UNIT)
            yield b"".join(some)
            some, length, least = [], 0, PART_BYTES
    if some:
        yield b"".join(some)


async def sliced(data: bytes, pace: Pace) -> AsyncGenerator[bytes, None]:
    """Yield `data` in parts of at most `PART_BYTES`."""
    if len(data) <= PART_BYTES:
        yield data
        return
    for start in range(0, len(data), PART_BYTES):
        await pace.before(PART_UNITS)
        yield data[start : start + PART_BYTES]
