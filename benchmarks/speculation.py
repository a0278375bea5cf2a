"""Measures the gain from drafters: how often draft tokens are right, and the effect on speed.

Sessions of four workloads (see `speculation_workloads.py`) go through an engine without speculation
and one with each drafter. They run in turn, by so many callers at once. The engines have the same
model and options. Each run has a namespace of its own, so it finds nothing of the run before it in
a cache or among recent answers.

    drafted, accepted   draft tokens that steps verified, and the share of these that was right
    tokens/step         tokens of completions for each step that a sequence was in
    tokens/s            of the best of `--repeats` runs
    ratio               to the same without speculation: of the best, and the median of two runs
                        in a row
    TPOT                median time per output token without speculation, divided by that with
    other               completions with another token than without; there should be none, but by
                        rejection sampling

`--acceptances match rejection` has an engine with each drafter for either rule.

A second table is about steps that verify, by the number of draft tokens. It has the expected tokens
(1 - a^(k+1)) / (1 - a), where a is the share of right first draft tokens. All tokens are taken to
be alike (Leviathan et al., arXiv 2211.17192, section 3.1). Beside them it has the tokens of the
runs. `--json` has both.

    python benchmarks/speculation.py
    python benchmarks/speculation.py --model DIR --drafters suffix --streams 1 8 --workloads edits
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from speculation_workloads import WORKLOADS, Session, Sizes, asks_by_messages, sessions_of

from aioserve import Completion, Engine, Speculation
from aioserve.config import Acceptance
from aioserve.simulation.expected_tokens import counted_tokens, expected_tokens

OFF = "off"
TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"


@dataclass
class Row:
    """One drafter, or none, on one workload by so many streams."""

    workload: str
    streams: int
    drafter: str
    tokens: int = 0
    steps: int = 0
    """Steps that sequences were in, including those of the first token of each."""
    drafted: list[int] = field(default_factory=list)
    """Draft tokens by their place, of all runs."""
    accepted: list[int] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    """Speed of each run."""
    seconds_per_output_token: list[float] = field(default_factory=list)
    """Median over the completions of each run."""
    other: int = 0
    """Completions with another token than without speculation."""
    ratio: float = 1.0
    median_ratio: float = 1.0
    tpot_ratio: float = 1.0


def main() -> None:
    options = parse_arguments()
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    rows = asyncio.run(measure(options))
    places = tokens_by_draft_length(rows)
    print_rows(rows, options)
    print_places(places)
    if options.json is not None:
        result = {"rows": [asdict(row) for row in rows], "expected_tokens": places}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pyhelp", metavar="pyhelp|random:|DIR")
    parser.add_argument("--drafters", nargs="+", default=["ngram", "suffix"])
    rules = get_args(Acceptance)
    parser.add_argument("--acceptances", nargs="+", default=["match"], choices=rules)
    parser.add_argument("--temperature", type=float, help="that of all completions")
    parser.add_argument("--plugins", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--sessions", type=int, default=8, help="at least one for each stream")
    parser.add_argument("--turns", type=int, default=3, help="at most, of a session")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--num-pages", type=int, default=4096)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--repeats", type=int, default=3)
    agents = TRACES / "agent_text_sessions.jsonl.gz"
    parser.add_argument("--agents", type=Path, default=agents, metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


async def measure(options: argparse.Namespace) -> list[Row]:
    from aioserve.cli._models import model_or_random

    given: dict[str, Any] = {
        "max_model_len": options.max_model_len,
        "num_pages": options.num_pages,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "plugins": options.plugins,
    }
    path = model_or_random(options.model)
    sizes = Sizes(
        output_tokens=options.output_tokens,
        prompt_tokens=options.max_model_len - options.output_tokens,
        turns=options.turns,
        agents=options.agents,
    )
    async with AsyncExitStack() as stack:
        engines = {OFF: await stack.enter_async_context(Engine(path, **given))}
        for drafter in options.drafters:
            for acceptance in options.acceptances:
                speculation = Speculation(
                    drafter=drafter, max_tokens=options.max_draft_tokens, acceptance=acceptance
                )
                engine = Engine(path, speculation=speculation, **given)
                name = drafter if acceptance == "match" else f"{drafter} {acceptance}"
                engines[name] = await stack.enter_async_context(engine)
        by_messages = await asks_by_messages(engines[OFF])
        vocab_size = engines[OFF].limits.vocab_size
        rows: list[Row] = []
        for workload in options.workloads:
            for streams in options.streams:
                count = max(options.sessions, streams)
                sessions = sessions_of(workload, count, by_messages, vocab_size, sizes)
                if options.temperature is not None:
                    sessions = [
                        one.drawn_at(options.temperature, seed) for seed, one in enumerate(sessions)
                    ]
                if not sessions:
                    print(f"{workload}: what it is made of isn't there", file=sys.stderr)
                    break
                cell = [Row(workload, streams, drafter) for drafter in engines]
                for repeat in range(-1, options.repeats):
                    await in_turn(engines, cell, sessions, sizes, repeat)
                rows += map(compared, cell, [cell[0]] * len(cell))
        for drafter, engine in engines.items():
            if faults := engine.stats().drafter_faults_total:
                raise RuntimeError(f"{drafter} failed in {faults} calls: see the log")
        return rows


async def in_turn(
    engines: dict[str, Engine],
    cell: Sequence[Row],
    sessions: Sequence[Session],
    sizes: Sizes,
    repeat: int,
) -> None:
    """Run the sessions through each engine, and add the results to its row.

    Repeat -1 is to warm up, by a part of them.
    """
    without: list[Completion] = []
    for row, engine in zip(cell, engines.values(), strict=True):
        taken = sessions if repeat >= 0 else sessions[: row.streams]
        before = engine.stats()
        began = time.perf_counter()
        salt = f"{row.workload} {row.streams} {repeat}"
        done = await run(engine, taken, row.streams, sizes, salt)
        seconds = time.perf_counter() - began
        after = engine.stats()
        if repeat < 0:
            continue
        tokens = sum([one.usage.completion_tokens for one in done])
        paces = [one.timings.seconds_per_output_token for one in done]
        row.tokens += tokens
        row.steps += tokens - sum([one.usage.accepted_draft_tokens for one in done])
        row.drafted = added(row.drafted, before.tokens_drafted_total, after.tokens_drafted_total)
        row.accepted = added(
            row.accepted, before.tokens_accepted_total, after.tokens_accepted_total
        )
        row.tokens_per_second.append(tokens / seconds)
        row.seconds_per_output_token.append(
            statistics.median([pace for pace in paces if pace is not None] or [0.0])
        )
        without = without or done
        pairs = zip(done, without, strict=True)
        row.other += sum([one.token_ids != other.token_ids for one, other in pairs])
        what = f"{row.workload}, {row.streams} at once, {row.drafter}"
        print(f"{what}: {tokens / seconds:.0f} tokens/s", file=sys.stderr, flush=True)


def added(totals: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return `totals` and what a run added to a counter by place, which may have grown longer."""

    def of(counts: Sequence[int], place: int) -> int:
        return counts[place] if place < len(counts) else 0

    places = range(max(len(totals), len(after)))
    return [of(totals, at) + of(after, at) - of(before, at) for at in places]


async def run(
    engine: Engine, sessions: Sequence[Session], streams: int, sizes: Sizes, salt: str
) -> list[Completion]:
    """Return the completions of all sessions, in their order; `streams` go on at once."""
    completions: list[list[Completion]] = [[] for _ in sessions]
    left = iter(zip(sessions, completions, strict=True))

    async def caller() -> None:
        for session, done in left:
            for turn in session.turns:
                prompt = turn([one.text for one in done])
                done.append(
                    await engine.generate(
                        prompt,
                        session.params,
                        cache_salt=salt,
                        truncate_prompt_tokens=sizes.prompt_tokens,
                    )
                )

    await asyncio.gather(*[caller() for _ in range(streams)])
    return [one for done in completions for one in done]


def compared(row: Row, without: Row) -> Row:
    rates, others = row.tokens_per_second, without.tokens_per_second
    paces, other_paces = row.seconds_per_output_token, without.seconds_per_output_token
    row.ratio = max(rates) / max(others)
    row.median_ratio = statistics.median([a / b for a, b in zip(rates, others, strict=True)])
    if statistics.median(paces):
        row.tpot_ratio = statistics.median(other_paces) / statistics.median(paces)
    return row


def tokens_by_draft_length(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the tokens of a step that verifies k draft tokens, for every k that occurred.

    They are by workload and drafter, from runs by the fewest streams, in which steps verify most.
    """
    found: list[dict[str, Any]] = []
    fewest = min([row.streams for row in rows], default=0)
    for row in rows:
        if row.streams != fewest or not sum(row.drafted):
            continue
        right = [
            accepted / drafted
            for accepted, drafted in zip(row.accepted, row.drafted, strict=False)
            if drafted
        ]
        by_length = range(1, len(right) + 1)
        found.append(
            {
                "workload": row.workload,
                "drafter": row.drafter,
                "acceptance": right[0],
                "right_by_place": right,
                "formula": [expected_tokens(right[0], k) for k in by_length],
                "measured": counted_tokens(row.drafted, row.accepted),
            }
        )
    return found


def print_rows(rows: Sequence[Row], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{Path(options.model).name}, at most {options.output_tokens} tokens out, contexts of "
        f"{options.max_model_len}, {options.max_draft_tokens} draft tokens at most; best of "
        f"{options.repeats}, and the median"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "streams", "drafter"):
        table.add_column(column, justify="right" if column == "streams" else "left")
    for column in ("drafted", "accepted", "tokens/step", "tokens/s", "ratio", "TPOT", "other"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        drafted, figures = sum(row.drafted), ["", "", ""]
        if row.drafter != OFF:
            share = f"{sum(row.accepted) / drafted:.0%}" if drafted else "-"
            figures = [f"{drafted:,}", share, f"{row.tokens / max(1, row.steps):.2f}"]
        ratios = [f"{row.ratio:.2f}, {row.median_ratio:.2f}", f"{row.tpot_ratio:.2f}"]
        ratios = [*ratios, str(row.other)] if row.drafter != OFF else ["", "", ""]
        table.add_row(
            *(row.workload, str(row.streams), row.drafter),
            *figures,
            f"{max(row.tokens_per_second):,.0f}",
            *ratios,
        )
    print(title)
    Console(width=max(120, Console().width)).print(table)


def print_places(places: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not places:
        return
    title = "tokens of a step that verifies k draft tokens: as expected, as measured"
    table = Table(box=None, pad_edge=False)
    for column in ("workload", "drafter", "a"):
        table.add_column(column, justify="right" if column == "a" else "left")
    most = max([len(one["measured"]) for one in places])
    for k in range(1, most + 1):
        table.add_column(f"k = {k}", justify="right", no_wrap=True)
    for one in places:
        pairs = zip(one["formula"], one["measured"], strict=True)
        table.add_row(
            *(one["workload"], one["drafter"], f"{one['acceptance']:.2f}"),
            *[f"{formula:.2f}, {measured:.2f}" for formula, measured in pairs],
        )
    print(f"\n{title}")
    Console(width=max(140, Console().width)).print(table)


if __name__ == "__main__":
    main()
