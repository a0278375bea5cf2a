"""`aioserve bench`: random prompts through one engine in this process, or a load for a server.

    aioserve bench throughput|latency MODEL
    aioserve bench serve URL

Prints a table, JSON, or both. The measurements are in `_load.py` and `_http_load`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from aioserve.arguments import counted
from aioserve.cli._engine import Start
from aioserve.cli._flags import option_flags, takes_flags
from aioserve.cli._http_load.options import FLAGS, LoadOptions, requests_of
from aioserve.cli._load import BenchOptions, measure
from aioserve.errors import ConfigError

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

API_KEY_VARIABLE = "AIOSERVE_BENCH_API_KEY"

app: App = App(name="bench", help="Measure the engine with random prompts, or a server.")


Model = Annotated[
    str,
    Parameter(
        help="A model directory, a GGUF file, an embedded model (pyhelp), or a hub id, which is "
        "downloaded where it isn't in the local cache; or random:30m, random:0.6b, a Qwen3 with "
        "random weights that is written to the user's cache directory once."
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


def serve(url: str, trace: Path | None = None, /, **flags: Any) -> None:
    """Times to first token, per output token and of whole answers of a server, under load.

    Args:

        url: Address of a server of completions, as http://127.0.0.1:8000.
        trace: A file of requests, as `aioserve simulate` reads it; random prompts when not given.
    """
    options = LoadOptions(**flags)
    options.check(trace)
    try:
        from aioserve.cli._http_load.client import ServerError, base_url_of
        from aioserve.cli._http_load.measure import measure_server
        from aioserve.cli._http_load.tables import print_measured, write_measured
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"aioserve bench serve needs {missing.name}: pip install 'aioserve[bench]'"
        ) from missing
    base_url, requests = base_url_of(url), requests_of(trace, options)
    api_key = options.api_key or os.environ.get(API_KEY_VARIABLE) or None
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        measured = runner.run(measure_server(base_url, requests, options, api_key))
    if options.json != "-":
        print_measured(measured, trace, options)
    write_measured(measured, trace, options)
    if measured.load.interrupted:
        raise KeyboardInterrupt
    if not measured.metrics.finished:
        kinds = ", ".join(measured.metrics.failures) or "none was sent"
        raise ServerError(f"no request got a completion: {kinds}")


takes_flags(serve, option_flags(LoadOptions, FLAGS))
app.command(serve, usage="Usage: aioserve bench serve URL [TRACE] [OPTIONS]")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return a function that makes uvloop's loops, if the server's packages are installed."""
    try:
        from aioserve.server.running import new_event_loop
    except ModuleNotFoundError:
        return None
    return new_event_loop


def _bench(kind: str, model: str, options: BenchOptions) -> None:
    options.check()
    concurrency = options.concurrency or (options.num_prompts if kind == "throughput" else 1)
    with redirect_stdout(sys.stderr):  # output of a policy is no result
        result = {"kind": kind} | asyncio.run(measure(model, options, concurrency))
    text = json.dumps(result, indent=2)
    if options.json == "-":
        print(text)
        return
    _print_table(result)
    if options.json is not None:
        Path(options.json).write_text(text + "\n", encoding="utf-8")


def _print_table(result: dict[str, Any]) -> None:
    from rich.table import Table

    from aioserve.cli._console import plain_console

    console = plain_console()
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
    if drafted := sum(stats["tokens_drafted"]):
        right = sum(stats["tokens_accepted"])
        console.print(f"{right:,} of {drafted:,} draft tokens right ({right / drafted:.0%})")


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
