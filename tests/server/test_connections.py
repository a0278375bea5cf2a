"""Behaviour of clients on a connection, as bytes on a socket, with httptools and with h11."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from aioserve import Engine, SamplingParams
from aioserve.server import ServerSettings, connections, create_app, outgoing
from aioserve.server.listening import Listening, bound
from aioserve.server.running import serve_app
from aioserve.testing import FakeModel
from tests.server.serving import port_of, running
from tests.tiers import clock_counts
from tests.waits import LIMIT_SECONDS, until

pytestmark = pytest.mark.asyncio

LIMIT = 1024
KEY = "some-very-secret-key"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
BODY = json.dumps({"model": "fake", "prompt": [1], "max_tokens": 1}).encode()
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
ENDLESS = {
    "value": (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ", b"y"),
    "name": (b"GET / HTTP/1.1\r\nhost: localhost\r\nx", b"y"),
    "url": (b"GET /", b"y"),
    "query": (b"GET /?", b"y"),
    "headers": (b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"a:b\r\n"),
    "trailer": (CHUNKED + CHUNK + b"0\r\nx: ", b"y"),
    "trailers": (CHUNKED + CHUNK + b"0\r\n", b"a:b\r\n"),
    "extension": (CHUNKED + b"1;", b"y"),
}


@pytest.fixture(params=["httptools", "h11"], autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "h11":
        monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    return request.param


@asynccontextmanager
async def fake(
    settings: ServerSettings | None = None,
    *,
    send_buffer_bytes: int | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Engine, uvicorn.Server]]:
    async with Engine(FakeModel(), **options) as engine:
        app = create_app(engine, settings)
        async with running(app, send_buffer_bytes=send_buffer_bytes) as server:
            yield engine, server


@asynccontextmanager
async def connected(
    server: uvicorn.Server,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            yield reader, writer
    finally:
        writer.close()


async def said(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the connection ends."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while more := await reader.read(65536):
            found += more
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ENDLESS)
async def test_what_comes_beside_a_body_ends_at_its_limit(name: str) -> None:
    begun, more = ENDLESS[name]
    async with (
        fake(ServerSettings(max_header_bytes=LIMIT, max_headers=8)) as (engine, server),
        connected(server) as (reader, writer),
    ):
        writer.write(begun)
        writer.write(more * (4 * LIMIT // len(more)))  # no more: the answer comes without it
        answer = await said(reader)
        assert engine.stats().tokens_generated_total == 0
    assert answer.split()[1:2] == [b"431"]
    assert b'"headers_too_large"' in answer
    assert b"connection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1") == 1


async def test_a_parser_sees_no_more_than_the_limit_of_what_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_fed = 0
    feed = connections._OneAtATime._feed

    def counting(self: Any, piece: bytes) -> None:
        nonlocal num_fed
        num_fed += len(piece)
        feed(self, piece)

    monkeypatch.setattr(connections._OneAtATime, "_feed", counting)
    async with fake(ServerSettings(max_header_bytes=LIMIT, max_headers=8)) as (_, server):
        for begun, more in ENDLESS.values():
            num_fed = 0
            async with connected(server) as (reader, writer):
                writer.write(begun)
                with contextlib.suppress(ConnectionError):
                    for _ in range(64):
                        writer.write(more * (65536 // len(more)))
                        await writer.drain()
                    writer.write_eof()
                await said(reader)
            assert num_fed < 4 * LIMIT


@pytest.mark.more
async def test_small_chunks_earn_no_room_and_need_none() -> None:
    body = BODY + b" " * 3000
    chunks = b"".join(b"1\r\n%c\r\n" % one for one in body)
    settings = ServerSettings(max_header_bytes=LIMIT, max_headers=8)
    async with fake(settings) as (_, server):
        async with connected(server) as (reader, writer):
            writer.write(CHUNKED + chunks + b"0\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"200"
        async with connected(server) as (reader, writer):
            writer.write(CHUNKED)
            for byte in chunks:
                writer.write(b"%c" % byte)
                await asyncio.sleep(0)  # so that many segments have one byte
            writer.write(b"0\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"200"
        async with connected(server) as (reader, writer):
            writer.write(CHUNKED + chunks + b"0\r\nx: " + b"y" * 8 * LIMIT)
            assert (await said(reader)).split()[1] == b"431"


async def test_a_head_at_the_limit_is_answered_and_the_next_on_the_same_connection() -> None:
    head = b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: %b\r\n\r\n" % (b"y" * (LIMIT - 50))
    async with (
        fake(ServerSettings(max_header_bytes=LIMIT, max_headers=8)) as (_, server),
        connected(server) as (reader, writer),
    ):
        for _ in range(5):
            for byte in range(0, len(head), 100):
                writer.write(head[byte : byte + 100])
                await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.split()[1] == b"200"
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("head", "trailer", "status"),
    [
        (b"x-api-key: " + KEY.encode() + b"\r\n", b"host: localhost\r\n", b"400"),
        (b"host: localhost\r\n", b"authorization: Bearer " + KEY.encode() + b"\r\n", b"401"),
        (b"host: localhost\r\n", b"x-api-key: " + KEY.encode() + b"\r\n", b"401"),
        (b"host: evil.example\r\nx-api-key: %b\r\n" % KEY.encode(), b"host: localhost\r\n", b"403"),
        (b"host: localhost\r\nx-api-key: %b\r\n" % KEY.encode(), b"host: evil.example\r\n", b"200"),
    ],
)
async def test_trailers_are_no_headers(head: bytes, trailer: bytes, status: bytes) -> None:
    begin = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n" + head
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    async with (
        fake(ServerSettings(api_keys=[KEY])) as (_, server),
        connected(server) as (reader, writer),
    ):
        writer.write(begin + chunked + CHUNK + b"0\r\n" + trailer + b"\r\n")
        found = (await reader.readline()).split()[1]
    assert found == status


class Unread:
    """Clients with small buffers that send requests, and read nothing of the answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._sockets: list[socket.socket] = []

    async def ask(self, request: bytes) -> None:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setblocking(False)
        self._sockets.append(one)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(one, ("127.0.0.1", self._port))
        await loop.sock_sendall(one, request)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


@contextlib.contextmanager
def unread(server: uvicorn.Server) -> Iterator[Unread]:
    clients = Unread(port_of(server))
    try:
        yield clients
    finally:
        clients.close()


def posted(**fields: Any) -> bytes:
    body = json.dumps({"model": "fake", "prompt": [1], "ignore_eos": True} | fields).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


LARGE = {
    "stream": posted(max_tokens=250, n=8, stream=True, logprobs=5),
    "whole": posted(max_tokens=250, n=8, logprobs=5),
    "description": b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "live": b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "trace": b"GET /trace HTTP/1.1\r\nhost: localhost\r\n\r\n",
}
"""Requests for answers that don't fit into the buffers of a connection."""


@pytest.mark.more
async def test_readers_that_never_read_lose_their_places() -> None:
    settings = ServerSettings(max_concurrent_calls=3)
    async with (
        fake(settings, send_buffer_bytes=4096, stall_timeout_seconds=1.0) as (engine, server),
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port_of(server)}", timeout=LIMIT_SECONDS
        ) as client,
    ):
        ask: dict[str, Any] = {"model": "fake", "prompt": [1], "max_tokens": 1}
        with unread(server) as clients:
            for _ in range(3):
                await clients.ask(LARGE["stream"])
            await until(lambda: engine.stats().tokens_generated_total)

            async def is_let_in() -> bool:
                answer = await client.post("/v1/completions", json=ask)
                assert answer.status_code in (200, 503)
                return answer.status_code == 200

            await until(is_let_in)
            await until(lambda: len(server.server_state.connections) == 1)
            gauge = "aioserve_http_requests_in_flight 1.0"  # the scrape itself
            assert gauge in (await client.get("/metrics")).text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["stream", "whole", "description", "live", "trace"])
async def test_no_answer_waits_for_ever_for_its_reader(name: str) -> None:
    async with fake(send_buffer_bytes=4096, stall_timeout_seconds=0.3) as (engine, server):
        for _ in range(3):  # steps for the page to show
            await engine.generate([1, 2], SamplingParams(max_tokens=250, n=8, ignore_eos=True))
        with unread(server) as clients:
            await clients.ask(LARGE[name])
            await until(lambda: server.server_state.connections)
            await until(lambda: not server.server_state.connections)
            await until(lambda: not server.server_state.tasks)


@pytest.mark.more  # the clock tells a slow reader from a stalled one
async def test_a_reader_that_is_slow_gets_all() -> None:
    async with fake(send_buffer_bytes=4096, stall_timeout_seconds=2.0) as (_, server):
        with unread(server) as clients:
            await clients.ask(LARGE["whole"])
            [one] = clients._sockets
            loop = asyncio.get_running_loop()
            began, found = loop.time(), b""
            while b"\r\n\r\n" not in found:
                found += await loop.sock_recv(one, 1024)
            head, _, body = found.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(body) < length:
                more = await loop.sock_recv(one, length // 60)
                assert more
                body += more
                if loop.time() < began + 5:  # well beyond the timeout
                    await asyncio.sleep(0.1)
            assert json.loads(body)["usage"]["completion_tokens"] == 2000


@pytest.mark.parametrize("kind", ["key", "length", "chunked"])
async def test_a_refused_body_is_not_read_for_ever(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "LINGER_BYTES", 2**20)
    monkeypatch.setattr(outgoing, "LINGER_SECONDS", 600.0)  # another limit ends it
    head = HEAD if kind == "key" else HEAD + b"x-api-key: " + KEY.encode() + b"\r\n"
    if kind == "chunked":
        head += b"transfer-encoding: chunked\r\n\r\n1000000\r\n"
    else:
        head += b"content-length: %d\r\n\r\n" % 2**40
    num_sent = 0
    async with (
        fake(ServerSettings(api_keys=[KEY])) as (_, server),
        connected(server) as (reader, writer),
    ):
        writer.write(head)
        reading = asyncio.create_task(said(reader))
        with contextlib.suppress(ConnectionError):
            while not num_sent or (num_sent < 2**26 and server.server_state.connections):
                writer.write(b" " * 65536)
                await writer.drain()
                num_sent += 65536
        assert num_sent < 2**26
        await until(lambda: not server.server_state.connections)
        answer = await reading
    assert answer.split()[1] == (b"401" if kind == "key" else b"413")
    assert b"connection: close\r\n" in answer


async def test_a_client_that_sends_on_sees_why_it_is_refused() -> None:
    body = b" " * 2**22
    async with fake() as (_, server), connected(server) as (reader, writer):
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body))
        for begin in range(0, len(body), 65536):
            writer.write(body[begin : begin + 65536])
            await writer.drain()
        answer = await reader.read()  # until the end, without a reset
        assert answer.split()[1] == b"413"
        assert b'"body_too_large"' in answer


async def test_a_client_that_stays_without_sending_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "LINGER_SECONDS", 0.1)
    async with (
        fake(ServerSettings(api_keys=[KEY])) as (_, server),
        connected(server) as (reader, writer),
    ):
        writer.write(HEAD + b"content-length: 10\r\n\r\n")
        assert (await said(reader)).split()[1] == b"401"
        await until(lambda: not server.server_state.connections)


async def test_nothing_behind_a_refused_body_is_a_request() -> None:
    second = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with (
        fake(ServerSettings(api_keys=[KEY])) as (_, server),
        connected(server) as (reader, writer),
    ):
        writer.write(HEAD + b"content-length: 10\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"x" * 10 + second)
        writer.write_eof()
        assert b"HTTP/1.1" not in await said(reader)


@pytest.mark.parametrize("at_once", [False, True])
async def test_nothing_behind_an_upgrade_is_a_request(at_once: bool) -> None:
    """httptools takes the body for another protocol's, and what follows for a request."""
    second = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n"
    async with fake() as (_, server), connected(server) as (reader, writer):
        writer.write(HEAD + upgrade + b"content-length: %d\r\n\r\n" % len(second))
        if not at_once:
            await asyncio.sleep(0.05)
        writer.write(second)
        writer.write_eof()
        answer = await said(reader)
    assert answer.count(b"HTTP/1.1") <= 1
    assert b'"version"' not in answer


async def test_a_request_with_an_upgrade_is_answered_once_and_its_connection_ends(
    parser: str,
) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n"
    async with fake() as (_, server):
        async with connected(server) as (reader, writer):
            writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + upgrade + b"\r\n")
            answer = await said(reader)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
        body = b'{"model": "fake", "prompt": [1], "max_tokens": 1}'
        async with connected(server) as (reader, writer):
            length = b"content-length: %d\r\n\r\n" % len(body)
            writer.write(HEAD + b"content-type: application/json\r\n" + upgrade + length + body)
            answer = await said(reader)
        refused = answer.startswith(b"HTTP/1.1 400") and b"upgrade_not_supported" in answer
        assert refused if parser == "httptools" else answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()


async def test_a_client_that_waits_to_send_is_refused_and_one_that_may_send_is_not() -> None:
    expects = HEAD + b"expect: 100-continue\r\n"
    async with fake(ServerSettings(max_body_bytes=1024)) as (_, server):
        async with connected(server) as (reader, writer):
            writer.write(expects + b"content-length: 1025\r\n\r\n")
            answer = await said(reader)
            assert answer.split()[1] == b"413"
            assert b"connection: close\r\n" in answer
        async with connected(server) as (reader, writer):
            writer.write(expects + b"content-length: %d\r\n\r\n" % len(BODY))
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"100"
            writer.write(BODY)
            assert (await reader.readline()).split()[1] == b"200"


async def test_a_refused_call_whose_body_is_there_keeps_its_connection() -> None:
    async with (
        fake(ServerSettings(api_keys=[KEY])) as (_, server),
        connected(server) as (reader, writer),
    ):
        for _ in range(3):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.split()[1] == b"401"
            assert b"connection: close" not in answer
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)


@pytest.mark.clock
async def test_a_drain_ends_at_its_deadline_whoever_does_not_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Counts turns of a clock that stops while the loop does, so that a busy machine adds none."""
    num_turns = 0

    async def counting() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.1)
            num_turns += 1

    listening = Listening(port=0, drain_seconds=0.5)
    async with Engine(FakeModel()) as engine:
        app, stop, ready = create_app(engine), asyncio.Event(), asyncio.Event()
        with bound(listening) as sockets:
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            port = sockets[0].getsockname()[1]
            serving = asyncio.create_task(
                serve_app(
                    *(app, sockets, listening),
                    stop=stop,
                    on_ready=ready.set,
                    on_drain=lambda: None,
                )
            )
            await ready.wait()
            clients = Unread(port)
            try:
                for name in ("stream", "stream", "whole", "trace", "live"):
                    await clients.ask(LARGE[name])
                await clients.ask(HEAD + b"content-length: 100\r\n\r\n{")
                await clients.ask(b"GET / HTTP/1.1\r\nx")
                await until(lambda: app.state.app_state.calls.num_running >= 3)
                await until(lambda: not engine.stats().num_running)
                stop.set()
                clock = asyncio.create_task(counting())
                await serving
                clock.cancel()
            finally:
                clients.close()
    # 0.5 s, a second for the ends, and half a second for what is written.
    assert not clock_counts() or num_turns < 40
    assert not [one for one in caplog.records if one.levelname in ("ERROR", "CRITICAL")]
    assert not [one for one in caplog.records if one.exc_info]
