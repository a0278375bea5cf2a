"""Server of completions with scripted behaviour: answers in pieces, errors, or no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

__all__ = ["Then", "answering", "chunk", "event"]

Bodies = list[dict[str, Any]]


class Then(Enum):
    """Events in place of a piece."""

    DROP = "the connection is reset"
    HANG = "nothing more comes"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **more})


@asynccontextmanager
async def answering(
    *pieces: bytes | Then, status: int = 200, content_type: str = "text/event-stream; charset=utf-8"
) -> AsyncIterator[tuple[str, Bodies]]:
    """Serve these pieces to every request; yield the URL, and the bodies that were sent."""
    bodies: Bodies = []
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer(reader, writer, pieces, status, content_type, bodies, over)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", bodies
        over.set()


async def _answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    pieces: Sequence[bytes | Then],
    status: int,
    content_type: str,
    bodies: Bodies,
    over: asyncio.Event,
) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lengths = [line for line in head.splitlines() if line.lower().startswith("content-length:")]
    if lengths:
        bodies.append(json.loads(await reader.readexactly(int(lengths[0].partition(":")[2]))))
    if pieces and pieces[0] is Then.DROP:
        writer.transport.abort()
        return
    writer.write(
        f"HTTP/1.1 {status} Whatever\r\ncontent-type: {content_type}\r\n"
        "transfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode()
    )
    for piece in pieces:
        if piece is Then.DROP:
            await writer.drain()
            writer.transport.abort()
            return
        if piece is Then.HANG:
            await over.wait()
            return
        assert isinstance(piece, bytes)
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()
