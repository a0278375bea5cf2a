"""`aioserve bench throughput|latency`: random prompts through one engine in this process.

Prints a table, JSON, or both; the measuring itself is in `_load.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from aioserve.errors import ConfigError

__all__ = ["BenchOptions", "app"]

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "e2e": "whole answer",
}

app = App(name="bench", help="Measure the engine with random prompts.")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to run."""

    model: str = "random:30m"
    """A model directory, embedded model or hub id; or random:30m, random:0.6b, a Qwen3 with random
    weights that is written to the user's cache directory once."""
    num_prompts: int = 32
    """Requests in all."""
    input_len: int = 128
    """Tokens of each prompt."""
    output_len: int = 128
    """Tokens of each answer; end-of-sequence tokens are ignored."""
    shared_prefix_len: int = 0
    """The first tokens of every prompt that are the same in all."""
    concurrency: int | None = None
    """Requests at once; throughput: all, latency: 1, when not given."""
    dtype: str = "auto"
    """float32, bfloat16 or auto (what the model directory says)."""
    policy: str = "fcfs"
    """The scheduling policy, or one with options: NAME:OPTION=VALUE,OPTION=VALUE."""
    page_size: int = 16
    """Tokens of one KV page."""
    max_num_batched_tokens: int = 2048
    """Tokens of one engine step."""
    overlap: Annotated[bool, Parameter(negative="--no-overlap")] = True
    """Plan the next step while one runs."""
    prefix_caching: Annotated[bool, Parameter(negative="--no-prefix-caching")] = True
    """Start requests from what is cached of their prefix."""
    partial_page_reuse: Annotated[bool, Parameter(negative="--no-partial-page-reuse")] = True
    """Copy the valid part of a cached page."""
    eviction: str = "lru"
    """Which cached pages go first: lru, lfu, fifo, slru, or a name that a plugin offers."""
    num_host_pages: int = 0
    """Pages in the host's memory for evicted and swapped-out KV."""
    preemption: str = "auto"
    """auto, recompute or swap."""
    seed: int = 0
    """Key of the random prompts."""
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """Also write the result to this file; "-" prints JSON alone."""

    def check(self) -> None:
        """Raises `ConfigError` for a count that makes no sense."""
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.concurrency is not None and self.concurrency > self.num_prompts:
            raise ConfigError(
                f"concurrency must be at most num_prompts = {self.num_prompts}, "
                f"got {self.concurrency}"
            )
        if self.json not in (None, "-") and not Path(self.json).parent.is_dir():
            raise ConfigError(f"json: there is no directory for {self.json}")
        if not 0 <= self.shared_prefix_len <= self.input_len:
            raise ConfigError(
                f"shared_prefix_len must be in [0, input_len={self.input_len}], "
                f"got {self.shared_prefix_len}"
            )


@app.command
def throughput(options: BenchOptions | None = None) -> None:
    """Requests and tokens per second, with all requests submitted as early as possible."""
    _bench("throughput", options or BenchOptions())


@app.command
def latency(options: BenchOptions | None = None) -> None:
    """Time to first token, time per output token and whole answers, one request at a time."""
    _bench("latency", options or BenchOptions())


def _bench(kind: str, options: BenchOptions) -> None:
    options.check()
    from aioserve.cli._load import measure

    concurrency = options.concurrency or (options.num_prompts if kind == "throughput" else 1)
    result = {"kind": kind} | asyncio.run(measure(options, concurrency))
    text = json.dumps(result, indent=2)
    if options.json == "-":
        print(text)
        return
    _print_table(result)
    if options.json is not None:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    options, machine, stats = result["options"], result["machine"], result["stats"]
    console.print(
        f"{result['kind']}: {options['num_prompts']} requests, {result['concurrency']} at once, "
        f"{options['input_len']} tokens in ({options['shared_prefix_len']} shared), "
        f"{options['output_len']} out, {options['policy']}",
        highlight=False,
    )
    console.print(f"{result['model']}: " + _line(machine), highlight=False)
    table = Table(box=None, pad_edge=False)
    if result["kind"] == "throughput":
        for column in ("", "per second"):
            table.add_column(column, justify="right" if column else "left")
        for name, value in result["throughput"].items():
            table.add_row(name.removesuffix("_per_second").replace("_", " "), f"{value:,.1f}")
    else:
        for column in ("ms", "mean", "p50", "p90", "p99"):
            table.add_column(column, justify="left" if column == "ms" else "right")
        for name, values in result["latency_milliseconds"].items():
            table.add_row(
                LATENCIES[name], *(f"{values[k]:,.2f}" for k in ("mean", "p50", "p90", "p99"))
            )
    console.print(table)
    lag = result["loop_lag_milliseconds"]
    console.print(f"loop lag of a 1 ms ticker: p99 {lag['p99']:.2f} ms, max {lag['max']:.2f} ms")
    console.print(
        f"{result['seconds']:.2f} s, {stats['steps']} steps, {stats['preemptions']} preemptions, "
        f"prompt tokens: {stats['tokens_prefilled']} computed, {stats['tokens_cached']} cached"
    )


def _line(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
