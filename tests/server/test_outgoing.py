"""Sending half of a connection, over real sockets, with peers that read slowly or have gone."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast
from unittest import mock

import pytest

from aioserve.server.outgoing import Outgoing
from tests.waits import until

STALL_SECONDS = 0.5


class TimersByHand:
    """Timers of a loop, which run when a test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def call_later(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        self.calls.append(call)
        return mock.Mock(asyncio.TimerHandle)

    def pass_by(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


@asynccontextmanager
async def outgoing(
    timers: TimersByHand | None = None,
) -> AsyncIterator[tuple[Outgoing, socket.socket]]:
    """An `Outgoing` over a loopback connection, and the socket of its peer."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[asyncio.Transport] = loop.create_future()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            made.set_result(transport)

    server = await loop.create_server(Protocol, "127.0.0.1", 0)
    peer = socket.socket()
    peer.setblocking(False)
    try:
        await loop.sock_connect(peer, server.sockets[0].getsockname())
        clock = cast(asyncio.AbstractEventLoop, timers) if timers else loop
        out = Outgoing(await made, clock, stall_seconds=STALL_SECONDS)
        yield out, peer
        out.lost()
        out.abort()
    finally:
        peer.close()
        server.close()
        await server.wait_closed()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't tell what was taken")
@pytest.mark.asyncio
async def test_a_peer_that_reads_little_at_a_time_keeps_its_connection() -> None:
    """The peer takes just enough in each interval for the system to report it. The system decides
    how much that is."""
    timers, loop = TimersByHand(), asyncio.get_running_loop()
    async with outgoing(timers) as (out, peer):

        async def tells() -> bool:
            assert await loop.sock_recv(peer, 10_000)
            return out._written_bytes - out._untaken_bytes() > out._taken_bytes

        out.write(bytes(64 * 2**20))
        for _ in range(5):
            await until(tells)
            assert len(timers.calls) == 1
            timers.pass_by()
            assert not out.is_closing()


@pytest.mark.asyncio
async def test_a_peer_that_reads_nothing_loses_its_connection() -> None:
    async with outgoing() as (out, _):
        out.write(bytes(64 * 2**20))
        await until(out.is_closing)


@pytest.mark.asyncio
async def test_a_peer_that_has_gone_is_no_error_of_whoever_closes() -> None:
    transport = mock.Mock(asyncio.Transport)
    transport.is_closing.return_value = False
    transport.can_write_eof.return_value = True
    transport.write_eof.side_effect = OSError(107, "not connected")
    out = Outgoing(transport, asyncio.get_running_loop(), stall_seconds=STALL_SECONDS)
    out.lingers = True
    out.close()
    transport.abort.assert_called_once_with()
