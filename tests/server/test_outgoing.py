"""The sending half of a connection, over real sockets: who reads slowly, and who has gone."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest import mock

import pytest

from aioserve.server.outgoing import Outgoing

STALL_SECONDS = 0.5


@asynccontextmanager
async def outgoing() -> AsyncIterator[tuple[Outgoing, socket.socket]]:
    """One over a connection of loopback, and the socket of its peer."""
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
        out = Outgoing(await made, loop, stall_seconds=STALL_SECONDS)
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
    """Less in each interval than makes the system take more from the buffer, and more than makes
    it tell what was taken."""
    async with outgoing() as (out, peer):
        out.write(bytes(64 * 2**20))
        loop = asyncio.get_running_loop()
        ends = loop.time() + 5 * STALL_SECONDS
        while loop.time() < ends:
            assert await loop.sock_recv(peer, 10_000)
            await asyncio.sleep(STALL_SECONDS / 20)
        assert not out.is_closing()


@pytest.mark.asyncio
async def test_a_peer_that_reads_nothing_loses_its_connection() -> None:
    async with outgoing() as (out, _):
        out.write(bytes(64 * 2**20))
        for _ in range(600):
            if out.is_closing():
                break
            await asyncio.sleep(0.05)
        assert out.is_closing()


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
