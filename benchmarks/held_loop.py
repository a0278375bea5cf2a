"""Measures how long calls of the largest sizes hold the event loop.

    python benchmarks/held_loop.py [--repeats 3] [--only NAME ...] [--json FILE]

The calls of `held_loop_calls.py` run one after the other. The engine has a random model of 1 layer,
and its server is in the same process. Meanwhile a task on the same loop sleeps one millisecond at a
time and records how late it wakes. That is how long the loop was held, by a callback or by another
thread that kept the interpreter's lock. The process's processor time in that delay counts, but no
more than the delay: other programs on the machine delay every task.

Printed is the longest hold of the first such call of an engine and its server (cold). Of later
calls it is the least over `--repeats` (warm), beside the whole time of a warm call. The promise is
50 ms on a machine that adds a million numbers in a Python loop within 20 ms. The time for that on
this machine is printed too, and longer holds have a mark.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from held_loop_calls import CALLS, CONTEXT_TOKENS

from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from aioserve.testing.random_model import write_random_model

MOST_SECONDS = 0.05
TICK_SECONDS = 0.001
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
TEMPLATE = (
    "{% for message in messages %}{{ message.role[:1] }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
)


async def longest_hold(call: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return the longest hold of the loop during `call`, and its whole time, in seconds."""
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


async def measure(name: str, repeats: int, model: Path) -> dict[str, float]:
    """Measure the holds of a call, in an engine of its own."""
    async with Engine(model, max_num_seqs=256, max_waiting=8192, num_pages=8192) as engine:
        app = create_app(engine, ServerSettings(served_model_names=["model"]))
        cold, _ = await longest_hold(lambda: CALLS[name](engine, app))
        warm = [await longest_hold(lambda: CALLS[name](engine, app)) for _ in range(repeats)]
    held, took = zip(*warm, strict=True)
    return {"cold_seconds": cold, "held_seconds": min(held), "total_seconds": min(took)}


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
        (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        width = max(map(len, names))
        print(f"{'call':<{width}}  cold, ms  warm, ms  whole, s")
        rows: dict[str, dict[str, float]] = {}
        for name in names:
            slow = million_additions_seconds()
            row = rows[name] = asyncio.run(measure(name, options.repeats, model))
            slow = max(1.0, slow / 0.02, million_additions_seconds() / 0.02)
            is_long = max(row["cold_seconds"], row["held_seconds"]) > MOST_SECONDS * slow
            print(
                f"{name:<{width}}  {row['cold_seconds'] * 1e3:8.0f}  "
                f"{row['held_seconds'] * 1e3:8.0f}  {row['total_seconds']:8.2f}"
                f"{' !' if is_long else ''}",
                flush=True,
            )
    print(f"a million additions take {million_additions_seconds() * 1e3:.0f} ms here")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
