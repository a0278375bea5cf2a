"""Calls of `held_loop.py`: each route at its limits, and bodies that are made to hold the loop.

A call of the server is an ASGI request in the same process, whose answer is dropped part by part.
The time that a client takes to read it is no hold of the server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from aioserve import Engine, SamplingParams

__all__ = ["CALLS", "CONTEXT_TOKENS", "Call", "post"]

CONTEXT_TOKENS = 40_000
SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)

Call = Callable[[Engine, Any], Awaitable[object]]


async def post(app: Any, path: str, body: bytes, *, statuses: tuple[int, ...] = (200,)) -> int:
    """Send a request to `app`, and count the bytes of its answer.

    Exits the program if the status is none of `statuses`.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"127.0.0.1"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    never, has_come, num_bytes, begun = asyncio.Event(), False, 0, b""
    status = 0

    async def receive() -> dict[str, Any]:
        nonlocal has_come
        if has_come:
            await never.wait()
        has_come = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, num_bytes, begun
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            part = message.get("body", b"")
            num_bytes += len(part)
            begun = begun or part[:300]

    await app(scope, receive, send)
    if status not in statuses:
        raise SystemExit(f"{path}: {status}: {begun.decode(errors='replace')}")
    return num_bytes


def posted(path: str, *, refused: bool = False, **body: Any) -> Call:
    """Return a call of the server, whose answer is read to its end, or which is `refused`."""
    encoded: list[bytes] = []

    async def call(_: Engine, app: Any) -> None:
        if not encoded:
            encoded.append(msgspec.json.encode({"model": "model", **body}))
        await post(app, path, encoded[0], statuses=(400,) if refused else (200,))

    return call


def streamed(path: str, **body: Any) -> Call:
    return posted(path, stream=True, **body)


def words(count: int) -> list[str]:
    drawn = random.Random(count)
    return ["".join(drawn.choices("abcdefgh ", k=12)) for _ in range(count)]


def stops(count: int, chars: int) -> list[str]:
    drawn = random.Random(count)
    return ["".join(drawn.choices("abc", k=chars)) for _ in range(count)]


def ids(count: int) -> list[int]:
    return [20 + number % 200 for number in range(count)]


def turns(count: int) -> list[dict[str, Any]]:
    """Return messages of a user and an assistant, the user's last."""
    roles = ["user", "assistant"] * (count // 2) + ["user"]
    return [{"role": role, "content": "a"} for role in roles]


def parts(count: int, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": "a"}] * count


LONG_TEXT = "".join(random.Random(1).choices("abcdefgh ", k=30_000))
USER = [{"role": "user", "content": "a"}]
LARGE = [{"role": "user", "content": LONG_TEXT}]
NULLS = {f"a{number}": None for number in range(120_000)}
OF_ALL = {"max_tokens": 2, "n": 16, "ignore_eos": True}
TOP = {"logprobs": True, "top_logprobs": 20}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
BRIEF = {"num_predict": 1}
MANY_CALLS = [
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * 38_000},
    *USER,
]

CALLS: dict[str, Call] = {
    "gather of 1,000 generate": lambda engine, _: asyncio.gather(
        *(engine.generate(text, SHORT) for text in words(1000))
    ),
    "generate, n=256": lambda engine, _: engine.generate(
        "abc", SamplingParams(n=256, max_tokens=2, ignore_eos=True)
    ),
    "score_each of 3,000": lambda engine, _: engine.score_each("abc", words(3000)),
    "embed of 3,000": lambda engine, _: engine.embed(words(3000)),
    "completions, 64 x 16, 1,024 characters of stops": posted(
        COMPLETIONS, prompt=["x"] * 64, stop=stops(16, 64), **OF_ALL
    ),
    "completions, 64 x 16, 20 logprobs": posted(
        COMPLETIONS, prompt=["x"] * 64, logprobs=20, **OF_ALL
    ),
    "the same streamed": streamed(COMPLETIONS, prompt=["x"] * 64, logprobs=20, **OF_ALL),
    "completions, echo of 30,000 with logprobs": posted(
        COMPLETIONS, prompt=LONG_TEXT, echo=True, logprobs=5, max_tokens=1
    ),
    "the same streamed, n=16": streamed(
        COMPLETIONS, prompt=LONG_TEXT, echo=True, logprobs=5, max_tokens=1, n=16
    ),
    "completions, 16 echoes of 12,000 with 20": posted(
        COMPLETIONS, prompt=LONG_TEXT[:12_000], echo=True, logprobs=20, **OF_ALL
    ),
    "completions, 16 prompt_logprobs of 8,000": posted(
        COMPLETIONS, prompt=LONG_TEXT[:8000], prompt_logprobs=20, **OF_ALL
    ),
    "completions, echo of 30,000 ids, n=16": posted(
        COMPLETIONS, prompt=ids(30_000), echo=True, **OF_ALL
    ),
    "completions, 64 x 16 with ids": posted(
        COMPLETIONS, prompt=["x" * 400] * 64, echo=True, return_token_ids=True, **OF_ALL
    ),
    "completions, 16 samples of 256 with logprobs": posted(
        COMPLETIONS, prompt="abc", n=16, max_tokens=256, logprobs=5, ignore_eos=True
    ),
    "completions, 64 x 16 beams": posted(
        COMPLETIONS, prompt=["x"] * 64, n=16, max_tokens=4, use_beam_search=True, temperature=0
    ),
    "completions that would be too long": posted(
        COMPLETIONS, prompt=["x" * 30_000] * 64, echo=True, logprobs=20, refused=True, **OF_ALL
    ),
    "chat of 9,999 messages": posted(CHAT, messages=turns(9998), max_tokens=1),
    "chat of 3,300 parts": posted(
        CHAT, messages=[{"role": "user", "content": parts(3300)}], max_tokens=1
    ),
    "chat of 55,000 parts": posted(
        CHAT, messages=[{"role": "user", "content": parts(55_000)}], refused=True
    ),
    "chat of 120,000 null fields": posted(CHAT, messages=USER, refused=True, **NULLS),
    "the same in a message": posted(CHAT, messages=[USER[0] | NULLS], refused=True),
    "chat, 16 samples of 256 with logprobs": posted(
        CHAT, messages=USER, n=16, max_tokens=256, return_token_ids=True, ignore_eos=True, **TOP
    ),
    "chat, the same streamed": streamed(
        CHAT, messages=USER, n=16, max_tokens=256, return_token_ids=True, ignore_eos=True, **TOP
    ),
    "chat, 16 beams": posted(
        CHAT, messages=USER, n=16, max_tokens=16, use_beam_search=True, temperature=0
    ),
    "batch of 64 with logprobs": posted(
        f"{CHAT}/batch", messages=[USER] * 64, max_tokens=64, ignore_eos=True, **TOP
    ),
    "batch of 64 of 30,000 characters": posted(
        f"{CHAT}/batch", messages=[LARGE] * 64, max_tokens=1, return_token_ids=True
    ),
    "batch of 64 of 1,000 messages": posted(
        f"{CHAT}/batch", messages=[turns(1000)] * 64, max_tokens=1
    ),
    "responses of 4,096 items": posted(RESPONSES, input=turns(4095), max_output_tokens=1),
    "responses of 4,096 parts": posted(
        RESPONSES,
        input=[{"role": "user", "content": parts(4096, "input_text")}],
        max_output_tokens=1,
    ),
    "responses, shortened": posted(
        RESPONSES,
        input=[{"role": "user", "content": "x" * 20}] * 4096,
        truncation="auto",
        max_output_tokens=1,
    ),
    "responses with logprobs, streamed": streamed(
        RESPONSES,
        input="a",
        max_output_tokens=512,
        top_logprobs=20,
        include=["message.output_text.logprobs"],
    ),
    "messages of 4,095 turns": posted(MESSAGES, messages=turns(4094), max_tokens=1),
    "messages of 4,000 blocks": posted(
        MESSAGES, messages=[{"role": "user", "content": parts(4000)}], max_tokens=1
    ),
    "count_tokens of 4,000 blocks": posted(
        f"{MESSAGES}/count_tokens", messages=[{"role": "user", "content": parts(4000)}]
    ),
    "api/chat of 9,999 messages": posted(OLLAMA, messages=turns(9998), options=BRIEF, stream=False),
    "api/chat of 38,000 calls": posted(OLLAMA, messages=MANY_CALLS, stream=False, refused=True),
    "api/generate of 30,000 characters": posted(
        "/api/generate", prompt=LONG_TEXT, options=BRIEF, stream=False
    ),
    "tokenize of 39,000 with texts": posted(
        "/tokenize", prompt=LONG_TEXT + LONG_TEXT[:9000], return_token_strs=True
    ),
    "tokenize of 9,999 messages": posted("/tokenize", messages=turns(9998)),
    "detokenize of 40,000": posted("/detokenize", tokens=ids(40_000)),
    "embeddings of 64": posted("/v1/embeddings", input=words(64)),
    "embeddings of 64 x 6,000 ids": posted("/v1/embeddings", input=[ids(6000)] * 64),
    "pooling of 64": posted("/pooling", input=words(64)),
    "score of 64": posted("/v1/score", text_1=words(1), text_2=words(63)),
    "rerank of 63": posted("/rerank", query="abc", documents=words(63)),
}
