"""How long calls of the largest sizes hold the event loop.

    python benchmarks/held_loop.py [--repeats 3] [--only NAME ...] [--json FILE]

An engine with a random model of 1 layer, and a server over it in the same process, take one call
after the other. Meanwhile a task on the same loop sleeps one millisecond at a time and sees when it
wakes late: that is how long the loop was held, by a callback or by another thread that kept the
interpreter's lock. What counts is the processor time that the process took meanwhile, as far as it
is less than the delay: other programs on the machine delay every task.

Printed is the least over `--repeats` of the longest hold of each call, and the call's whole time.
The promise is 50 ms on a machine that adds a million numbers in a Python loop within 20 ms; how
long that takes here is printed too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from aioserve import Engine, SamplingParams
from aioserve.server import ServerSettings, create_app
from aioserve.testing.random_model import write_random_model

TICK_SECONDS = 0.001
CONTEXT_TOKENS = 40_000
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)

Call = Callable[[Engine, httpx.AsyncClient], Awaitable[object]]


def posted(path: str, **body: Any) -> Call:
    """A call of the server, whose response is read to its end."""

    async def call(engine: Engine, client: httpx.AsyncClient) -> None:
        response = await client.post(path, json={"model": "model", **body})
        if response.status_code != 200:
            raise SystemExit(f"{path}: {response.status_code}: {response.text[:300]}")

    return call


def words(count: int) -> list[str]:
    drawn = random.Random(count)
    return ["".join(drawn.choices("abcdefgh ", k=12)) for _ in range(count)]


def stops(count: int, chars: int) -> list[str]:
    drawn = random.Random(count)
    return ["".join(drawn.choices("abc", k=chars)) for _ in range(count)]


LONG_TEXT = "".join(random.Random(1).choices("abcdefgh ", k=30_000))
CALLS: dict[str, Call] = {
    "gather of 1,000 generate": lambda engine, client: asyncio.gather(
        *(engine.generate(text, SHORT) for text in words(1000))
    ),
    "generate, n=256": lambda engine, client: engine.generate(
        "abc", SamplingParams(n=256, max_tokens=2, ignore_eos=True)
    ),
    "score_each of 3,000": lambda engine, client: engine.score_each("abc", words(3000)),
    "embed of 3,000": lambda engine, client: engine.embed(words(3000)),
    "POST completions, 64 prompts, n=16, 1,024 characters of stops": posted(
        "/v1/completions", prompt=["x"] * 64, n=16, max_tokens=2, stop=stops(16, 64)
    ),
    "POST completions, echo and logprobs of 30,000 tokens": posted(
        "/v1/completions", prompt=LONG_TEXT, echo=True, logprobs=5, max_tokens=1
    ),
    "POST completions, the same streamed": posted(
        "/v1/completions", prompt=LONG_TEXT, echo=True, logprobs=5, max_tokens=1, stream=True
    ),
    "POST embeddings of 64": posted("/v1/embeddings", input=words(64)),
    "POST completions, n=16, logprobs of 256 tokens": posted(
        "/v1/completions", prompt="abc", n=16, max_tokens=256, logprobs=5, ignore_eos=True
    ),
}


async def longest_hold(call: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """The longest hold of the loop during `call`, and its whole time, in seconds."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            began, computed = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_SECONDS)
            late = time.perf_counter() - began - TICK_SECONDS
            longest = max(longest, min(late, time.process_time() - computed))

    gc.collect()
    gc.disable()
    watching = asyncio.create_task(watch())
    try:
        await asyncio.sleep(0)
        began = time.perf_counter()
        await call()
        took = time.perf_counter() - began
        await asyncio.sleep(2 * TICK_SECONDS)
    finally:
        gc.enable()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return longest, took


async def measure(names: list[str], repeats: int, model: Path) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    async with Engine(model, max_num_seqs=256, max_waiting=8192, num_pages=8192) as engine:
        app = create_app(engine, ServerSettings(served_model_names=["model"]))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for name in names:
                held, took = zip(
                    *[
                        await longest_hold(lambda name=name: CALLS[name](engine, client))
                        for _ in range(repeats)
                    ],
                    strict=True,
                )
                rows[name] = {"held_seconds": min(held), "total_seconds": min(took)}
    return rows


def million_additions_seconds() -> float:
    began, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="calls whose names have that")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = options.only or [""]
    names = [name for name in CALLS if any(part in name for part in wanted)]
    if not names:
        sys.exit(f"--only: no call has that in its name; there are: {', '.join(CALLS)}")
    with tempfile.TemporaryDirectory() as directory:
        model = write_random_model(Path(directory) / "model", MODEL, dtype="float32")
        rows = asyncio.run(measure(names, options.repeats, model))
    print(f"a million additions take {million_additions_seconds() * 1e3:.0f} ms here")
    width = max(map(len, rows))
    print(f"{'call':<{width}}  held, ms  whole, s")
    for name, row in rows.items():
        print(f"{name:<{width}}  {row['held_seconds'] * 1e3:8.0f}  {row['total_seconds']:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
