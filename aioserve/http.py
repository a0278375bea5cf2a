"""Cancellation for web apps that answer with a whole completion.

    @app.post("/complete")
    async def complete(request: Request, body: Body):
        async with until_disconnected(request):
            return await engine.generate(body.prompt)
        return Response(status_code=499)

An ASGI framework keeps running a route after its client has disconnected. Here the disconnect
cancels the block, which frees the engine's request.
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
    """Cancel the block when the client of `request` disconnects, and go on after it.

    `request` is a request object with a `receive` attribute, or ASGI's `receive` itself. Read the
    body first: later messages are thrown away. Exceptions of the block propagate unchanged, and so
    does a cancellation from outside. Raises TypeError for any other kind of request.
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
