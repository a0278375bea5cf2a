"""Clients that leave at any moment, and prompts that fail: their resources are freed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest

from aioserve import Engine
from aioserve.server import connections, create_app
from aioserve.testing import FakeModel, run_simulated
from tests.server.serving import served
from tests.server.talking import ASK, events_of
from tests.waits import LIMIT_SECONDS, until

pytestmark = pytest.mark.asyncio
LONG: dict[str, Any] = {"model": "pyhelp", "max_tokens": 700, "ignore_eos": True, "temperature": 0}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "a"}),
    "several": ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}),
    "chat": ("/v1/chat/completions", {"messages": ASK, "n": 2}),
}


def is_free(engine: Engine) -> bool:
    stats = engine.stats()
    return not (stats.num_running or stats.num_waiting or stats.pages_held_by_requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
async def test_in_the_middle_of_an_answer(name: str, stream: bool) -> None:
    path, body = BODIES[name]
    async with served(num_pages=512) as (engine, client):
        for tokens in (1, 3, 20):
            before = engine.stats().tokens_generated_total
            call = asyncio.create_task(client.post(path, json=LONG | body | {"stream": stream}))
            wanted = before + tokens
            await until(lambda: engine.stats().tokens_generated_total >= wanted)  # noqa: B023
            call.cancel()
            await until(lambda: is_free(engine))
            assert engine.stats().tokens_generated_total < before + 700


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
async def test_while_they_wait_for_their_turn(name: str, stream: bool) -> None:
    path, body = BODIES[name]
    async with served(num_pages=512, max_num_seqs=2) as (engine, client):
        first = engine.stream("x", None)
        second = engine.stream("y", None)
        await first.started()
        await second.started()
        call = asyncio.create_task(client.post(path, json=LONG | body | {"stream": stream}))
        await until(lambda: engine.stats().num_waiting or engine.stats().num_running > 2)
        call.cancel()
        await until(lambda: not engine.stats().num_waiting)
        first.close()
        second.close()
        await until(lambda: is_free(engine))


async def test_while_a_long_prompt_is_encoded() -> None:
    async with served(num_pages=512) as (engine, client):
        body = LONG | {"prompt": "word " * 20_000}
        for seconds in (0, 0.002, 0.01):
            calls = [
                asyncio.create_task(client.post(path, json=body | more))
                for path, more in (
                    ("/v1/completions", {}),
                    ("/v1/completions", {"stream": True}),
                    ("/tokenize", {}),
                )
            ]
            await asyncio.sleep(seconds)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: is_free(engine))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_fails_ends_the_others(stream: bool) -> None:
    """Only encoding shows that the second prompt is too long."""
    async with served(num_pages=512) as (engine, client):
        body = LONG | {"prompt": ["a", "word " * 2000, "b"], "stream": stream}
        answer = await client.post("/v1/completions", json=body)
        await until(lambda: is_free(engine))
        assert engine.stats().tokens_generated_total < 700
    if answer.status_code == 200:
        assert stream
        *_, last = events_of(answer.text)
        error = last["error"]
        assert sum("error" in event for event in events_of(answer.text)) == 1
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


async def answer_with_a_deadline() -> httpx.Response:
    body = LONG | {"model": "fake", "prompt": [[1], [2]], "stream": True, "deadline_seconds": 0.2}
    async with Engine(FakeModel(step_seconds=lambda _: 0.005)) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post("/v1/completions", json=body)
        await until(lambda: is_free(engine))
    return answer


async def test_a_deadline_ends_a_stream_with_one_error() -> None:
    """Runs on a simulated clock: the stream has begun by the deadline, however slow the machine."""
    answer = await asyncio.to_thread(run_simulated, answer_with_a_deadline)
    events = events_of(answer.text)
    assert len(events) > 10
    assert [event["error"]["code"] for event in events if "error" in event] == ["deadline_exceeded"]
    assert "error" in events[-1]
    assert "[DONE]" not in answer.text


def raw_request() -> tuple[bytes, bytes]:
    body = json.dumps(LONG | {"prompt": "a", "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )
    return head, body


async def test_with_half_of_the_connection_closed() -> None:
    async with served(num_pages=256) as (engine, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.writelines(raw_request())
        await reader.readuntil(b"data: ")
        assert engine.stats().num_running == 1
        writer.write_eof()
        await until(lambda: is_free(engine))
        assert engine.stats().tokens_generated_total < 700
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()


BEGUN = b"GET /health HTTP/1.1\r\nhost: local"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("is_second", "begun"),
    [(False, b""), (False, b"G"), (False, BEGUN), (True, b"\r\n"), (True, BEGUN)],
)
async def test_a_connection_whose_headers_never_come_is_closed(
    is_second: bool, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 0.1)
    async with served(num_pages=256) as (engine, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        if is_second:
            writer.write(BEGUN + b"host\r\n\r\n")
            assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.write(begun)
        async with asyncio.timeout(LIMIT_SECONDS):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
        # An answer in progress takes as long as it takes, and so does a late body.
        head, body = raw_request()
        port = client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
        writer.write(head)
        await asyncio.sleep(0.3)
        writer.write(body)
        await reader.readuntil(b"data: [DONE]")
        writer.close()
        await until(lambda: is_free(engine))


async def test_with_another_request_sent_before_the_answer() -> None:
    head, body = raw_request()
    async with served(num_pages=256) as (engine, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(head + body)
        await reader.readuntil(b"data: ")
        assert engine.stats().num_running == 1
        writer.write(head + body)
        await until(lambda: is_free(engine))
        assert engine.stats().tokens_generated_total < 700
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
