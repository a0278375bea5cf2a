"""Runs the same streams on running servers, one after the other: tokens per second of each.

It also prints how many times as fast the first one is.

    python benchmarks/beside.py aioserve=127.0.0.1:8000 other=127.0.0.1:8001
    python benchmarks/beside.py aioserve=127.0.0.1:8000 other=127.0.0.1:8001 --works many prefix

It takes any server with OpenAI's /v1/completions that supports prompts of token ids and
`ignore_eos`, and that calls its model `served`. The client is a process of its own, on the same
machine. Each repeat has prompts of its own, drawn from a seed that differs from run to run, so no
cache helps a later run. After a warm-up the median counts, of rates and of the ratios of each
repeat. Some servers spin for seconds after their last token, so each run first waits
`--pause-seconds`. If a stream fails or has too few tokens, the program exits with a message.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from http_client import Outcome, from_own_process, running, tokens_per_second

WORKS = {
    "one": "one of 128 tokens, 128 out",
    "many": "32 at once of 128 tokens, 128 out",
    "prefix": "32 at once of 1,056 tokens, of which 1,024 are the same in all, 32 out",
    "prompt": "one of 2,048 tokens, 1 out, in prompt tokens per second",
    "mixed": "64 at once of 32 to 512 tokens, 16 to 256 out",
}
LEAST_ID = 300
"""Ids below are those of special tokens and of single bytes in many vocabularies."""


def main() -> None:
    options = parse_arguments()
    running()(compare(options))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", metavar="NAME=HOST:PORT", nargs="+", type=named)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=[*WORKS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8192, help="ids are below it")
    parser.add_argument("--pause-seconds", type=float, default=5)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    return parser.parse_args()


def named(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.rpartition(":")[2].isdigit():
        raise argparse.ArgumentTypeError(f"expected NAME=HOST:PORT, got {text!r}")
    return name, url


async def compare(options: argparse.Namespace) -> None:
    for work in options.works:
        print(f"{work}: {WORKS[work]}", flush=True)
        rates: dict[str, list[float]] = {name: [] for name, _ in options.servers}
        for repeat in range(options.repeats + 1):
            plan = plan_of(
                work, random.Random(f"{options.seed} {work} {repeat}"), options.vocab_size
            )
            for name, url in options.servers:
                await asyncio.sleep(options.pause_seconds)
                outcomes = await from_own_process(url, plan)
                if fault := fault_of(plan, outcomes):
                    sys.exit(f"{name}: {fault}")
                if repeat:
                    rates[name].append(rate_of(work, plan, outcomes))
        tell(rates)


def fault_of(plan: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]) -> str:
    for request, outcome in zip(plan, outcomes, strict=True):
        if outcome.error or outcome.tokens != request["max_tokens"]:
            return outcome.error or f"{outcome.tokens} tokens of {request['max_tokens']}"
    return ""


def rate_of(work: str, plan: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]) -> float:
    if work != "prompt":
        return tokens_per_second(outcomes)
    seconds = max(outcome.total_seconds for outcome in outcomes)
    return sum(len(request["prompt"]) for request in plan) / seconds


def tell(rates: dict[str, list[float]]) -> None:
    first, *_ = rates.values()
    for name, its in rates.items():
        line = f"  {name} {statistics.median(its):,.0f} tokens/s"
        if its is not first:
            ratios = [ours / theirs for ours, theirs in zip(first, its, strict=True)]
            line += f"; the first to it {statistics.median(ratios):.2f}"
            line += f" ({min(ratios):.2f} to {max(ratios):.2f})"
        print(line, flush=True)


def plan_of(work: str, draw: random.Random, vocab_size: int) -> list[dict[str, Any]]:
    def ids(count: int) -> list[int]:
        return [draw.randrange(LEAST_ID, vocab_size) for _ in range(count)]

    match work:
        case "one":
            sized = [(ids(128), 128)]
        case "many":
            sized = [(ids(128), 128) for _ in range(32)]
        case "prefix":
            prefix = ids(1024)
            sized = [(prefix + ids(32), 32) for _ in range(32)]
        case "prompt":
            sized = [(ids(2048), 1)]
        case _:
            sized = [(ids(draw.randint(32, 512)), draw.randint(16, 256)) for _ in range(64)]
    return [
        {"prompt": prompt, "max_tokens": tokens, "leave_after_tokens": None}
        for prompt, tokens in sized
    ]


if __name__ == "__main__":
    main()
