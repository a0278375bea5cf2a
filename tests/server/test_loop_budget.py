"""Work of the largest calls in one piece on the event loop, which must be little.

It is counted in calls of Python functions during one callback of the loop, which neither clock nor
load changes. Calls in C aren't seen here; `benchmarks/held_loop.py` sees them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from aioserve import Engine
from aioserve.server import create_app

MOST_CALLS = 60_000
"""Most calls in one callback: about 10 ms."""
READ_AT_ONCE = {"messages": 200_000, "messages of api/chat": 200_000, "items": 100_000}
"""Most calls where the engine reads as many messages as it takes, in one piece: about 30 ms."""
USER = [{"role": "user", "content": "a"}]
OF_ALL = {"n": 16, "max_tokens": 1, "ignore_eos": True}
TOP = {"logprobs": True, "top_logprobs": 20}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def turns(count: int) -> list[dict[str, Any]]:
    return [
        {"role": "user" if number % 2 else "assistant", "content": "a"} for number in range(count)
    ]


DOCUMENT = {
    "type": "document",
    "source": {"type": "content", "content": [{"type": "text", "text": "a"}] * 60_000},
}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "many short lists of log-probabilities": (
        COMPLETIONS,
        {"prompt": ["x"] * 64, "logprobs": 20, **OF_ALL},
    ),
    "the same streamed": (
        COMPLETIONS,
        {"prompt": ["x"] * 64, "logprobs": 20, "stream": True, **OF_ALL},
    ),
    "echoes": (
        COMPLETIONS,
        {"prompt": ["x " * 100] * 16, "echo": True, "logprobs": 20, **OF_ALL},
    ),
    "ids of each choice": (
        COMPLETIONS,
        {"prompt": ["x " * 400] * 64, "return_token_ids": True, **OF_ALL},
    ),
    "messages": (CHAT, {"messages": turns(9999), "max_tokens": 1}),
    "a batch": (
        f"{CHAT}/batch",
        {"messages": [USER] * 64, "max_tokens": 8, "ignore_eos": True, **TOP},
    ),
    "a batch of messages": (f"{CHAT}/batch", {"messages": [turns(500)] * 64, "max_tokens": 1}),
    "items": (RESPONSES, {"input": turns(4095), "max_output_tokens": 1}),
    "items that are too many in their parts": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 40_000}]},
    ),
    "parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 55_000}]},
    ),
    "calls of api/chat": (
        "/api/chat",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * 38_000,
                }
            ]
        },
    ),
    "messages of api/chat": ("/api/chat", {"messages": turns(9999)}),
    "blocks": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4000}],
            "max_tokens": 1,
        },
    ),
    "blocks in blocks": (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "text", "text": "a"}] * 50_000,
                        }
                    ],
                }
            ],
            "max_tokens": 1,
        },
    ),
    "texts in documents": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [DOCUMENT]}], "max_tokens": 1},
    ),
    "texts in documents in results": (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [DOCUMENT]}],
                }
            ],
            "max_tokens": 1,
        },
    ),
    "tools beside a null": (
        CHAT,
        {
            "messages": USER,
            "tools": [{"type": "function", "function": {"name": "f"}}] * 30_000,
            "odd": None,
        },
    ),
    "null fields": (CHAT, {"messages": USER, **{f"a{number}": None for number in range(120_000)}}),
    "null fields of a message": (
        CHAT,
        {"messages": [USER[0] | {f"a{number}": None for number in range(120_000)}]},
    ),
    "embeddings": ("/v1/embeddings", {"input": ["x"] * 64}),
}


class Counted:
    """Largest number of calls in one callback of the loop."""

    def __init__(self) -> None:
        self.most = 0
        self.now = 0

    def note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.now += 1


@contextmanager
def calls_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    counted = Counted()
    run = asyncio.Handle._run

    def noted(self: asyncio.Handle) -> None:
        counted.now = 0
        sys.setprofile(counted.note)
        try:
            run(self)
        finally:
            sys.setprofile(None)
            counted.most = max(counted.most, counted.now)

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.Handle, "_run", noted)
        yield counted


@asynccontextmanager
async def calling() -> AsyncIterator[httpx.AsyncClient]:
    """Client in the same process, without a socket."""
    async with Engine("pyhelp", max_num_seqs=256, max_waiting=8192, num_pages=8192) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.asyncio
async def test_no_callback_does_much_for_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fields = CALLS[name]
    body = msgspec.json.encode({"model": "pyhelp", **fields})
    headers = {"content-type": "application/json"}
    async with calling() as client:
        with calls_counted(monkeypatch) as counted:
            await asyncio.sleep(0)  # the current callback began before the counting
            answer = await client.post(path, content=body, headers=headers)
            await asyncio.sleep(0)
    assert answer.status_code in (200, 400), answer.text
    assert counted.most < READ_AT_ONCE.get(name, MOST_CALLS)


@pytest.mark.asyncio
async def test_what_is_done_in_one_piece_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with calls_counted(monkeypatch) as counted:
        await asyncio.sleep(0)
        for _ in range(MOST_CALLS):
            turns(0)
        await asyncio.sleep(0)
    assert counted.most >= MOST_CALLS
