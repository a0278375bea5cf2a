"""Microseconds that the server takes to make each chunk of a streamed answer.

    python benchmarks/chunks.py

Tokens exist already, as batches of a stream, and nothing is written to a socket. Time is the best
of seven rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aioserve import Engine, FinishReason, SamplingParams, Token
from aioserve.engine.chat_stream import ChatDelta
from aioserve.request import Logprobs, TopLogprob, Usage
from aioserve.server import ServerSettings
from aioserve.server.app_state import AppState, Call
from aioserve.server.call_log import CallLog
from aioserve.server.chat_parts.plan import AnswerPlan
from aioserve.server.openai.chat_completions import ChatWriter
from aioserve.server.openai.chat_request import ChatRequest
from aioserve.server.openai.completions import CompletionWriter
from aioserve.server.openai.completions_request import CompletionRequest
from aioserve.server.openai.fields import StreamOptions
from aioserve.server.openai.multi_request import Batch

COUNT = 20_000
USAGE = Usage(100, 50, 0)


class Stream:
    """Stand-in for a stream, and for the source of one, with only the attributes that are used."""

    finish_reasons: tuple[FinishReason | None, ...] = (None,)
    stop_reasons = (None,)
    prompt_token_ids = ()
    prompt_logprobs = ()
    usage = given_usage = USAGE
    deltas = batches = None

    @property
    def stream(self) -> Any:
        return self

    @property
    def streams(self) -> Any:
        return [self]


async def micros(what: str, run: Callable[[], Awaitable[None]]) -> None:
    best = min([await _seconds(run) for _ in range(7)])
    print(f"{what:<44}{best / COUNT * 1e6:6.2f} us a chunk")


async def _seconds(run: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await run()
    return time.perf_counter() - began


async def completions(call: Call, token: Token, options: StreamOptions, **fields: Any) -> None:
    body = CompletionRequest(model="pyhelp", prompt="a", stream_options=options, **fields)
    source: Any = Stream()
    writer = CompletionWriter(call, body, SamplingParams(), ["a"], source)
    for _ in range(COUNT):
        async for _ in writer.written((0, Batch([token], (None,)))):
            pass


async def chat(call: Call, token: Token, options: StreamOptions, **fields: Any) -> None:
    body = ChatRequest(model="pyhelp", messages=[], stream_options=options, **fields)
    source: Any = Stream()
    writer = ChatWriter(call, body, AnswerPlan(), source)
    for _ in range(COUNT):
        async for _ in writer.written([ChatDelta(token.text, tokens=(token,))]):
            pass


async def main() -> None:
    plain, counted = StreamOptions(), StreamOptions(continuous_usage_stats=True)
    top = tuple(TopLogprob(i, -float(i)) for i in range(5))
    token, likely = Token(5, " word", 0), Token(5, " word", 0, logprobs=Logprobs(-1.0, top))
    async with Engine(num_pages=16) as engine:
        call = Call(AppState(engine, ServerSettings()), CallLog())
        await micros("completions", lambda: completions(call, token, plain))
        await micros("completions, counts in each", lambda: completions(call, token, counted))
        await micros(
            "completions, logprobs=5", lambda: completions(call, likely, plain, logprobs=5)
        )
        await micros("chat", lambda: chat(call, token, plain))
        await micros("chat, counts in each", lambda: chat(call, token, counted))
        logprobs = {"logprobs": True, "top_logprobs": 5}
        await micros("chat, top_logprobs=5", lambda: chat(call, likely, plain, **logprobs))


if __name__ == "__main__":
    asyncio.run(main())
