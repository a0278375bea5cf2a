"""Microseconds that the server takes to make each chunk of a streamed answer.

    python benchmarks/chunks.py

Tokens are there already, as batches of a stream; no socket is written to. Time is the best of
seven rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from aioserve import Engine, FinishReason, Token
from aioserve.engine.chat import ChatDelta
from aioserve.request import Logprobs, TopLogprob, Usage
from aioserve.server.chat_parts.plan import AnswerPlan
from aioserve.server.openai.chat import AboutChunk, ChatChoices
from aioserve.server.openai.chat_request import ChatRequest
from aioserve.server.openai.completions import AboutCompletion, PromptChoices
from aioserve.server.openai.completions_request import CompletionRequest
from aioserve.server.openai.fields import Chunks, StreamOptions
from aioserve.server.openai.together import Batch

COUNT = 20_000
USAGE = Usage(100, 50, 0)


class Stream:
    """As far as it is looked at."""

    finish_reasons: tuple[FinishReason | None, ...] = (None,)
    stop_reasons = (None,)
    prompt_token_ids = ()
    prompt_logprobs = ()
    usage = USAGE


def micros(what: str, run: Callable[[], Any]) -> None:
    best = min(_seconds(run) for _ in range(7))
    print(f"{what:<44}{best / COUNT * 1e6:6.2f} us a chunk")


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def completions(engine: Engine, token: Token, options: StreamOptions, **fields: Any) -> None:
    body = CompletionRequest(model="pyhelp", prompt="a", **fields)
    maker = PromptChoices(engine, body, "a", 0)
    about = AboutCompletion(id="cmpl-0", created=0, model="pyhelp")
    chunks, stream = Chunks(about, options), Stream()
    for _ in range(COUNT):
        batch = Batch([token], (None,))
        pieces = maker.pieces(batch, stream)  # pyright: ignore[reportArgumentType]
        chunks.chunk(pieces[0], USAGE if chunks.counts_always else None)


def chat(engine: Engine, token: Token, options: StreamOptions, **fields: Any) -> None:
    body = ChatRequest(model="pyhelp", messages=[], **fields)
    choices = ChatChoices(engine, body, AnswerPlan())
    about = AboutChunk(id="chatcmpl-0", created=0, model="pyhelp")
    chunks, stream = Chunks(about, options), Stream()
    for _ in range(COUNT):
        deltas = [ChatDelta(token.text, tokens=(token,))]
        pieces = choices.pieces(deltas, stream)  # pyright: ignore[reportArgumentType]
        chunks.chunk(pieces[0], USAGE if chunks.counts_always else None)


async def main() -> None:
    plain, counted = StreamOptions(), StreamOptions(continuous_usage_stats=True)
    top = tuple(TopLogprob(i, -float(i)) for i in range(5))
    token, likely = Token(5, " word", 0), Token(5, " word", 0, logprobs=Logprobs(-1.0, top))
    async with Engine(num_pages=16) as engine:
        micros("completions", lambda: completions(engine, token, plain))
        micros("completions, counts in each", lambda: completions(engine, token, counted))
        micros("completions, logprobs=5", lambda: completions(engine, likely, plain, logprobs=5))
        micros("chat", lambda: chat(engine, token, plain))
        micros("chat, counts in each", lambda: chat(engine, token, counted))
        logprobs = {"logprobs": True, "top_logprobs": 5}
        micros("chat, top_logprobs=5", lambda: chat(engine, likely, plain, **logprobs))


if __name__ == "__main__":
    asyncio.run(main())
