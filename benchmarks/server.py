"""Measures cost, load and leaks of the HTTP server: the client is a process of its own.

    python benchmarks/server.py overhead    tokens/s over HTTP against the same work in process
    python benchmarks/server.py load        1,000 streams at once: errors, ends, loop lag
    python benchmarks/server.py soak        minutes of mixed traffic whose clients vanish: slopes

The command `overhead` runs both sides in turn on one engine, for each `--stream-interval` with a
server of its own. The median of the pairs counts. The commands `load` and `soak` end with status 1
if a stream had no end or two, or if pages are left. See `beside.py` for a comparison with other
servers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from http_client import from_own_process, running, tokens_per_second

if TYPE_CHECKING:
    from aioserve import Engine


def main() -> None:
    options = parse_arguments()
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    sys.exit(running()(options.run(options)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("overhead")
    verb.set_defaults(run=overhead)
    verb.add_argument("--models", nargs="+", default=["pyhelp", "random:30m"])
    verb.add_argument("--streams", type=int, default=32)
    verb.add_argument("--prompt-tokens", type=int, default=32)
    verb.add_argument("--output-tokens", type=int, default=128)
    verb.add_argument("--repeats", type=int, default=5)
    verb.add_argument(
        "--stream-interval",
        dest="stream_intervals",
        metavar="TOKENS",
        type=int,
        nargs="+",
        default=[1],
        help="tokens of a chunk, as the server's setting; several are compared",
    )
    verb = verbs.add_parser("load")
    verb.set_defaults(run=load)
    verb.add_argument("--model", default="pyhelp")
    verb.add_argument("--streams", type=int, default=1000)
    verb.add_argument("--prompt-tokens", type=int, default=32)
    verb.add_argument("--output-tokens", type=int, default=64)
    verb = verbs.add_parser("soak")
    verb.set_defaults(run=soak)
    verb.add_argument("--model", default="pyhelp")
    verb.add_argument("--minutes", type=float, default=20)
    verb.add_argument("--streams", type=int, default=32)
    verb.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def overhead(options: argparse.Namespace) -> int:
    for model in options.models:
        pairs: dict[int, list[tuple[float, float]]] = {}
        async with engine_of(model, num_pages=4096) as engine:
            plan = whole_plan(engine, options)
            for repeat in range(options.repeats + 1):
                for interval in options.stream_intervals:
                    async with url_of(engine, interval) as url:
                        inside = await in_process(engine, plan)
                        outside = tokens_per_second(await from_own_process(url, plan))
                    if repeat:
                        pairs.setdefault(interval, []).append((inside, outside))
        for interval, its in pairs.items():
            ratio = statistics.median(outside / inside for inside, outside in its)
            inside, outside = (statistics.median(side) for side in zip(*its, strict=True))
            print(
                f"{model}: {options.streams} streams of {options.output_tokens} tokens, interval "
                f"{interval}: in process {inside:,.0f} tokens/s, over HTTP {outside:,.0f}; median "
                f"of {len(its)} pairs {ratio:.3f}",
                flush=True,
            )
    return 0


async def load(options: argparse.Namespace) -> int:
    async with serving(options.model) as (engine, url):
        plan = whole_plan(engine, options)
        late: list[float] = []
        watching = asyncio.create_task(watch_lag(late))
        outcomes = await from_own_process(url, plan)
        watching.cancel()
        left = engine.stats().pages_held_by_requests
    late.sort()
    errors = [outcome.error for outcome in outcomes if outcome.error]
    ends = [outcome.ends for outcome in outcomes]
    firsts = sorted(outcome.first_seconds for outcome in outcomes if outcome.first_seconds)
    rate = tokens_per_second(outcomes)
    print(
        f"{options.model}: {len(outcomes)} streams at once, {len(errors)} errors, "
        f"{ends.count(1)} with exactly one end; {rate:,.0f} tokens/s; time to first "
        f"token p50 {percentile(firsts, 50):.2f} s, p99 {percentile(firsts, 99):.2f} s; loop lag "
        f"p50 {1e3 * percentile(late, 50):.1f} ms, p99 {1e3 * percentile(late, 99):.1f} ms, "
        f"largest {1e3 * late[-1]:.1f} ms; pages held afterwards {left}"
    )
    for error in sorted(set(errors))[:5]:
        print(f"  {error}")
    return int(bool(errors) or ends.count(1) != len(ends) or left > 0)


async def soak(options: argparse.Namespace) -> int:
    draw = random.Random(options.seed)
    samples: list[tuple[float, ...]] = []
    counted = dict.fromkeys(("streams", "left", "errors", "wrong ends"), 0)
    async with serving(options.model, num_pages=2048) as (engine, url):
        began = time.perf_counter()
        while (now := time.perf_counter() - began) < 60 * options.minutes:
            plan = mixed_plan(draw, options.streams)
            outcomes = await from_own_process(url, plan)
            counted["streams"] += len(outcomes)
            for outcome, asked in zip(outcomes, plan, strict=True):
                leaves = asked["leave_after_tokens"] is not None
                counted["left"] += leaves
                counted["errors"] += bool(outcome.error)
                counted["wrong ends"] += not leaves and outcome.ends != 1
            await until(lambda: not engine.stats().num_running + engine.stats().num_waiting)
            held = engine.stats().pages_held_by_requests
            samples.append((now, rss_mib(), open_files(), float(len(asyncio.all_tasks())), held))
    print(f"{options.model}, {options.minutes:g} minutes, seed {options.seed}: {counted}")
    names = ("RSS in MiB", "open files", "tasks", "pages held by requests")
    steady = samples[len(samples) // 4 :]
    hours = [sample[0] / 3600 for sample in steady]
    for index, name in enumerate(names, 1):
        values = [sample[index] for sample in steady]
        slope = statistics.linear_regression(hours, values).slope if len(steady) > 1 else 0.0
        print(
            f"  {name}: {values[0]:,.0f} after a quarter, {values[-1]:,.0f} at the end, "
            f"{slope:+,.1f} per hour"
        )
    return int(counted["errors"] + counted["wrong ends"] + samples[-1][4] > 0)


@asynccontextmanager
async def serving(model: str, **options: Any) -> AsyncIterator[tuple[Engine, str]]:
    """Yield an engine in this process and the URL of its server, on the same event loop."""
    async with engine_of(model, **options) as engine, url_of(engine) as url:
        yield engine, url


def engine_of(model: str, **options: Any) -> Engine:
    from aioserve import Engine
    from aioserve.cli._models import model_or_random

    return Engine(model_or_random(model), **options)


@asynccontextmanager
async def url_of(engine: Engine, interval: int = 1) -> AsyncIterator[str]:
    """Yield the URL of a server with that `stream_interval`."""
    import uvicorn

    from aioserve.server import ServerSettings, create_app

    settings = ServerSettings(served_model_names=["served"], stream_interval=interval)
    app = create_app(engine, settings)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="warning", access_log=False, backlog=4096
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    await until(lambda: server.started)
    yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


def whole_plan(engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return requests that are sent at once and read to their end."""
    vocabulary = engine.limits.vocab_size
    return [
        {
            "prompt": [(7 * i + 13 * place) % (vocabulary - 20) + 10 for i in range(tokens)],
            "max_tokens": options.output_tokens,
            "leave_after_tokens": None,
        }
        for place, tokens in enumerate([options.prompt_tokens] * options.streams)
    ]


def mixed_plan(draw: random.Random, streams: int) -> list[dict[str, Any]]:
    """Return short and long requests, of which a third vanish somewhere."""
    plan: list[dict[str, Any]] = []
    for _ in range(4 * streams):
        output = draw.choice((1, 8, 32, 128))
        leaves = draw.random() < 1 / 3
        plan.append(
            {
                "prompt": [draw.randrange(10, 1000) for _ in range(draw.choice((4, 40, 200)))],
                "max_tokens": output,
                "leave_after_tokens": draw.randrange(output + 1) if leaves else None,
            }
        )
    return plan


async def in_process(engine: Engine, plan: Sequence[dict[str, Any]]) -> float:
    """Return tokens per second of the same streams, read in the engine's process."""
    from aioserve import SamplingParams

    async def read(request: dict[str, Any]) -> int:
        params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
        count = 0
        async for _ in engine.stream(request["prompt"], params):
            count += 1
        return count

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(read, plan)))
    return tokens / (time.perf_counter() - began)


async def watch_lag(late: list[float]) -> None:
    """Record how late the event loop is, in seconds, every 5 ms."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + 0.005
        await asyncio.sleep(0.005)
        late.append(max(0.0, loop.time() - due))


def percentile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def rss_mib() -> float:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> float:
    return float(len(os.listdir("/proc/self/fd")))


if __name__ == "__main__":
    main()
