"""Cancellation for web apps that answer with a whole completion.

    @app.post("/complete")
    async def complete(request: Request, body: Body):
        async with until_disconnected(request):
            return await engine.generate(body.prompt)
        return Response(status_code=499)

An ASGI framework lets a route run on after its client has left, because no send fails. This block
is cancelled when the client leaves, which frees the engine's request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast

import anyio

__all__ = ["Receive", "Request", "until_disconnected"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's `receive` callable."""


class Request(Protocol):
    """Request of Starlette, FastAPI or Litestar: an object with ASGI's `receive`."""

    @property
    def receive(self) -> Receive: ...


def until_disconnected(request: Request | Receive) -> AbstractAsyncContextManager[None]:
    """Cancel the block when the client of `request` disconnects, and go on behind it.

    `request` is ASGI's `receive`, or has it. Its body must have been read: what is received from
    here on is thrown away. Exceptions of the block pass through unchanged. A block that was
    cancelled from outside stays cancelled. Raises TypeError for another kind of request.
    """
    receive = cast("Receive", getattr(request, "receive", request))
    if not callable(receive):
        raise TypeError(f"request must have ASGI's receive, or be it, got {type(request).__name__}")
    return _until_disconnected(receive)


@asynccontextmanager
async def _until_disconnected(receive: Receive) -> AsyncIterator[None]:
    with anyio.CancelScope() as scope:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
