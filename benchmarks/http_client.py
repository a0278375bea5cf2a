"""Streams completions over HTTP and reports how each went: the client of the servers' benchmarks.

    python benchmarks/http_client.py HOST:PORT < plan.json > outcomes.json

It reads bytes and counts events, so that it takes little of the machine that it measures.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Outcome", "from_own_process", "run_plan", "running", "tokens_per_second"]

CONNECTING_AT_ONCE = 64
CHUNK, COUNT = b'"choices":[{', b'"completion_tokens":'
END, ERROR = b"[DONE]", b'data: {"error"'
TAIL_BYTES = 600
"""Most bytes of an event that is looked for."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """Outcome of one stream."""

    tokens: int = 0
    ends: int = 0
    """Terminal events that came."""
    first_seconds: float | None = None
    """Seconds to the first token, from the start of all."""
    total_seconds: float = 0.0
    """Seconds to the end, from the start of all."""
    error: str = ""


async def from_own_process(url: str, plan: Sequence[dict[str, Any]]) -> list[Outcome]:
    """Return the outcomes that a client in a process of its own saw."""
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    written, _ = await client.communicate(json.dumps(plan).encode())
    if client.returncode:
        raise RuntimeError(f"the client ended with status {client.returncode}")
    return [Outcome(**outcome) for outcome in json.loads(written)]


def tokens_per_second(outcomes: Sequence[Outcome]) -> float:
    """Return tokens per second from the first request to the last end."""
    seconds = max(outcome.total_seconds for outcome in outcomes)
    return sum(outcome.tokens for outcome in outcomes) / seconds


async def run_plan(url: str, plan: Sequence[dict[str, Any]]) -> list[Outcome]:
    host, _, port = url.rpartition(":")
    loop, began = asyncio.get_running_loop(), time.perf_counter()
    connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def run(request: dict[str, Any]) -> Outcome:
        reading = Reading(host, request, began)
        try:
            async with connecting:
                await loop.create_connection(lambda: reading, host, int(port))
            await reading.ended
        except OSError as error:
            reading.outcome.error = repr(error)
        reading.outcome.total_seconds = time.perf_counter() - began
        return reading.outcome

    return list(await asyncio.gather(*map(run, plan)))


def written(host: str, request: dict[str, Any]) -> bytes:
    body = json.dumps(
        {
            "model": "served",
            "prompt": request["prompt"],
            "max_tokens": request["max_tokens"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class Reading(asyncio.Protocol):
    """One connection, which sends its request once connected and ends with its answer."""

    def __init__(self, host: str, request: dict[str, Any], began: float) -> None:
        self.outcome: Outcome = Outcome()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._host = host
        self._request = request
        self._began = began
        self._transport: Any = None
        self._tail = b""
        """Last bytes that came: an event may come in pieces."""
        self._has_head = False
        self._num_chunks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # uvloop's is no `asyncio.Transport`
        self._transport.write(written(self._host, self._request))

    def data_received(self, data: bytes) -> None:
        if not self._has_head:
            data = self._behind_head(data)
        if not data or self.ended.done():
            return
        outcome, tail = self.outcome, self._tail
        if outcome.first_seconds is None:
            outcome.first_seconds = time.perf_counter() - self._began
        new = tail + data
        leave_after = self._request["leave_after_tokens"]
        if leave_after is not None:
            self._num_chunks += new.count(CHUNK) - tail.count(CHUNK)
        if END in new or ERROR in new:
            outcome.ends += new.count(END) - tail.count(END)
            outcome.ends += new.count(ERROR) - tail.count(ERROR)
        if (at := new.rfind(COUNT)) >= 0:
            outcome.tokens = int(new[at + len(COUNT) :].split(b",")[0].split(b"}")[0] or 0)
        self._tail = new[-TAIL_BYTES:]
        if leave_after is not None and self._num_chunks >= leave_after:
            self._end()

    def _behind_head(self, data: bytes) -> bytes:
        self._tail += data
        head, end, body = self._tail.partition(b"\r\n\r\n")
        if not end:
            return b""
        self._has_head, self._tail = True, b""
        status = head.split(b" ", 2)[1]
        if status != b"200":
            self.outcome.error = f"status {status.decode()}: {body[:200]!r}"
            self._end()
        return body

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            if exc is not None:
                self.outcome.error = repr(exc)
            elif not self._has_head:
                self.outcome.error = "the connection ended before the answer began"
            elif ERROR in self._tail:
                self.outcome.error = self._tail.decode(errors="replace")
            self.ended.set_result(None)

    def _end(self) -> None:
        self.ended.set_result(None)
        self._transport.close()


def running() -> Callable[[Any], Any]:
    """Return the runner of the event loop: uvloop if it is installed, as under `aioserve serve`."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


if __name__ == "__main__":
    found = running()(run_plan(sys.argv[1], json.load(sys.stdin)))
    json.dump([dataclasses.asdict(outcome) for outcome in found], sys.stdout)
