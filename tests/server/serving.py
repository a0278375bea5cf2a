"""App behind a real socket, on the event loop of the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from aioserve.server.connections import http_protocol
from tests.waits import LIMIT_SECONDS, until

__all__ = ["client_of", "listening", "port_of", "running", "served"]


@asynccontextmanager
async def running(
    app: Any, *, send_buffer_bytes: int | None = None
) -> AsyncIterator[uvicorn.Server]:
    """Serve `app` on its own port of 127.0.0.1. The buffers of its sockets have this size for
    sending."""
    is_ours = hasattr(getattr(app, "state", None), "app_state")
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="warning",
        lifespan="off",
        http=http_protocol(app if is_ours else None),
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())  # without the signal handlers of `serve`
    try:
        await until(lambda: server.started or task.done())
        if task.done():
            await task
        if send_buffer_bytes is not None:
            listener = server.servers[0].sockets[0]
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        yield server
    finally:
        server.should_exit = True
        server.force_exit = True
        await task


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve `app`, and yield its URL."""
    async with running(app) as server:
        yield f"http://127.0.0.1:{port_of(server)}"


def port_of(server: uvicorn.Server) -> int:
    return server.servers[0].sockets[0].getsockname()[1]


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        listening(app) as url,
        httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as client,
    ):
        yield client


@asynccontextmanager
async def served(
    settings: ServerSettings | None = None, **options: Any
) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    """Yield an engine with the embedded model and these options, and a client of its app."""
    async with Engine(**options) as engine, client_of(create_app(engine, settings)) as client:
        yield engine, client
