"""`aioserve bench throughput|latency MODEL`: random prompts through one engine in this process.

Prints a table, JSON, or both; the measuring itself is in `_load.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from aioserve.arguments import counted
from aioserve.cli._engine import Start, chosen_policy
from aioserve.cli._load import BenchOptions, measure

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["app"]

LATENCIES = {
    "queued": "queued",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "longest_gap": "longest gap between tokens",
    "e2e": "whole answer",
}

SPREAD = ("mean", "p50", "p90", "p99")

app: App = App(name="bench", help="Measure the engine with random prompts.")


Model = Annotated[
    str,
    Parameter(
        help="A model directory, an embedded model (pyhelp), or a hub id, which is downloaded "
        "where it isn't in the local cache; or random:30m, random:0.6b, a Qwen3 with random "
        "weights that is written to the user's cache directory once."
    ),
]


@app.command(usage="Usage: aioserve bench throughput [MODEL] [OPTIONS]")
def throughput(model: Model = "random:30m", /, *, options: BenchOptions | None = None) -> None:
    """Requests and tokens per second, with all requests submitted as early as possible."""
    _bench("throughput", model, options or BenchOptions())


@app.command(usage="Usage: aioserve bench latency [MODEL] [OPTIONS]")
def latency(model: Model = "random:30m", /, *, options: BenchOptions | None = None) -> None:
    """Time to first token, time per output token and whole answers, one request at a time."""
    _bench("latency", model, options or BenchOptions())


def _bench(kind: str, model: str, options: BenchOptions) -> None:
    options.check()
    concurrency = options.concurrency or (options.num_prompts if kind == "throughput" else 1)
    with redirect_stdout(sys.stderr):  # what a policy prints is no result
        policy = chosen_policy(options.policy)
        result = {"kind": kind} | asyncio.run(measure(model, options, policy, concurrency))
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
        f"{result['kind']}: {counted(options['num_prompts'], 'request')}, "
        f"{result['concurrency']} at once, "
        f"{counted(options['input_len'], 'token')} in ({options['shared_prefix_len']} shared), "
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
        for column in ("ms", *SPREAD):
            table.add_column(column, justify="left" if column == "ms" else "right")
        for name, values in result["latency_milliseconds"].items():
            table.add_row(
                LATENCIES[name],
                *("-" if values is None else f"{values[k]:,.2f}" for k in SPREAD),
            )
    console.print(table)
    console.print(str(Start(**result["start"])), highlight=False, soft_wrap=True)
    if lag := result["loop_lag_milliseconds"]:
        lags = f"p99 {lag['p99']:.2f} ms, max {lag['max']:.2f} ms"
        console.print(f"loop lag of a 1 ms ticker: {lags}")
    _print_host(console, result["host"])
    answers = result["answers"]
    console.print(
        f"{counted(answers['output_tokens'], 'token', form=',')} generated "
        f"in {result['seconds']:.2f} s, "
        f"{counted(stats['steps'], 'step')}, {counted(stats['preemptions'], 'preemption')}, "
        f"prompt tokens: {stats['tokens_prefilled']} computed, {stats['tokens_cached']} cached"
    )


def _print_host(console: Console, host: dict[str, float]) -> None:
    parts = ", ".join(
        f"{part} {host[f'{part}_microseconds_per_step']:.0f} µs"
        for part in ("planning", "commit", "delivery")
    )
    console.print(
        f"the host's share of a step: {host['share_of_step']:.1%} of "
        f"{host['step_milliseconds']:.2f} ms ({parts})",
        highlight=False,
        soft_wrap=True,
    )


def _line(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
