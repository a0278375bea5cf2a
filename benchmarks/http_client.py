"""Streams completions over HTTP and says how each went: the client of `server.py`.

    python benchmarks/http_client.py HOST:PORT < plan.json > outcomes.json

It reads bytes and counts events, so that it takes little of the machine that it measures.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["Outcome", "run_plan"]

CONNECTING_AT_ONCE = 64


@dataclasses.dataclass(slots=True)
class Outcome:
    """Of one stream."""

    tokens: int = 0
    ends: int = 0
    """Terminal events that came."""
    first_seconds: float | None = None
    """Since all began."""
    total_seconds: float = 0.0
    """Likewise."""
    error: str = ""


async def run_plan(url: str, plan: Sequence[dict[str, Any]]) -> list[Outcome]:
    host, _, port = url.rpartition(":")
    began, connecting = time.perf_counter(), asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def run(request: dict[str, Any]) -> Outcome:
        outcome = Outcome()
        try:
            async with connecting:
                reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
            try:
                writer.write(written(host, request))
                await read(reader, request, outcome, began)
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            outcome.error = repr(error)
        outcome.total_seconds = time.perf_counter() - began
        return outcome

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


async def read(
    reader: asyncio.StreamReader, request: dict[str, Any], outcome: Outcome, began: float
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    if status != b"200":
        rest = await reader.read()
        raise ValueError(f"status {status.decode()}: {rest[:200]!r}")
    leave_after, counted, tail = request["leave_after_tokens"], 0, b""
    while chunk := await reader.read(2**16):
        if outcome.first_seconds is None:
            outcome.first_seconds = time.perf_counter() - began
        data = tail + chunk
        counted += data.count(b'"choices":[{') - tail.count(b'"choices":[{')
        outcome.ends += data.count(b"[DONE]") - tail.count(b"[DONE]")
        outcome.ends += data.count(b'data: {"error"') - tail.count(b'data: {"error"')
        if (at := data.rfind(b'"completion_tokens":')) >= 0:
            outcome.tokens = int(data[at + 20 :].split(b",")[0].split(b"}")[0] or 0)
        tail = data[-600:]
        if leave_after is not None and counted >= leave_after:
            return
    if b'data: {"error"' in tail:
        raise ValueError(tail.decode(errors="replace"))


if __name__ == "__main__":
    found = asyncio.run(run_plan(sys.argv[1], json.load(sys.stdin)))
    json.dump([dataclasses.asdict(outcome) for outcome in found], sys.stdout)
