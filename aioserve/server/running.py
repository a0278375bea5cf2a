"""Runs an app under uvicorn on bound sockets, and drains it at the end.

Installs no signal handler: the caller sets `stop`, an event.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette

from aioserve.server.app_state import drain
from aioserve.server.connections import http_protocol
from aioserve.server.listening import Listening

__all__ = ["new_event_loop", "serve_app"]

BACKLOG = 2048
"""Most connections that wait to be accepted."""
CUT_SECONDS = 0.5
"""Fewest seconds from the end of a drain until connections are cut, to send what is written."""
LEAVE_SECONDS = 5
"""Seconds that calls may take to notice that their connection was cut."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """New event loop, from uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def serve_app(
    app: Starlette,
    sockets: list[socket.socket],
    listening: Listening,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None],
    on_drain: Callable[[], None],
) -> int:
    """Serve until `stop` is set and the running requests have ended.

    Returns the number of requests that the deadline, `listening.drain_seconds`, has ended. Calls
    `on_ready` once connections are accepted, and `on_drain` once new requests are refused. Raises
    as `drain` does, after all connections are closed.
    """
    server = _Server(_config(app, listening), on_ready)
    serving = asyncio.create_task(server.serve(sockets), name="aioserve server")
    stopping = asyncio.create_task(stop.wait(), name="aioserve stop")
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        # A server that has ended by itself has failed, and the last `await` raises its error.
        server.deadline_seconds = asyncio.get_running_loop().time() + listening.drain_seconds
        if serving.done():
            return 0
        draining = asyncio.create_task(drain(app, listening.drain_seconds), name="aioserve drain")
        await asyncio.sleep(0)  # until it has begun
        on_drain()
        return await draining
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self.deadline_seconds: float = 0.0
        """Time on the loop's clock until which clients may read what they were sent."""

    def capture_signals(self) -> AbstractContextManager[None]:
        """Install no signal handlers."""
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, and cut the connections of clients that don't read, which ends their calls.
        Calls that were cancelled instead would be reported as failed."""
        loop = asyncio.get_running_loop()
        seconds = max(CUT_SECONDS, self.deadline_seconds - loop.time())
        self.config.timeout_graceful_shutdown = math.ceil(seconds) + LEAVE_SECONDS
        cutting = loop.call_later(seconds, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _config(app: Starlette, listening: Listening) -> uvicorn.Config:
    options: dict[str, Any] = {
        "ssl_certfile": listening.tls_cert_file,
        "ssl_keyfile": listening.tls_key_file,
        "timeout_keep_alive": listening.keep_alive_seconds,
    }
    return uvicorn.Config(
        app,
        lifespan="on",
        http=http_protocol(app),
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        **options,
    )
