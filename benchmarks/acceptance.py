"""Measures how often draft tokens are right, by kind of draft: one table for a model, greedy and
sampled.

Sessions of named workloads (see `speculation_workloads.py`) go through an engine without
speculation and one with each draft, one after the other by one caller. Every sequence has as many
draft tokens in every step as it may, whatever they cost. No clock is read, so the same command
counts the same on every machine of a kind.

    1, 2, ..      share of the draft tokens at that place that were right: all before them were, too
    length        mean number of right draft tokens of a step that verified any
    tokens/step   tokens of completions for each step that a sequence was in
    other         completions with another token than without speculation; there should be none

A draft token that ends a completion brings no token and counts as wrong, so the model itself isn't
always right. At temperature 1 each session has a seed of its own, and a draft model draws with it
as well.

    python benchmarks/acceptance.py
    python benchmarks/acceptance.py --drafts "other family=model:path=DIR"
    python benchmarks/acceptance.py --model DIR --workloads edits agents

The option `--drafts` adds drafts to those of `DRAFTS`, each a name and a drafter with its options.
With `--only` just the named drafts are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from speculation import TRACES, added, run
from speculation_workloads import WORKLOADS, Session, Sizes, asks_by_messages, sessions_of

from aioserve import Engine, Speculation
from aioserve.assets import draft_path
from aioserve.scheduling.speculation.draft_lengths import DraftLengths, DraftRecord

OFF = "none"
DRAFTS = {
    "the model itself": "model:path={model}",
    "same family": "model",
    "EAGLE-3 head": "eagle3",
    "the model in int8": "model:quantization=int8",
    "the model in int4": "model:quantization=int4",
    "ngram": "ngram",
    "suffix": "suffix",
}
"""Drafters by the kind of draft that they are; `{model}` is the model. A line adds a kind."""


@dataclass
class Row:
    """One draft, or none, on one workload at one temperature."""

    workload: str
    temperature: float
    draft: str
    tokens: int = 0
    steps: int = 0
    """Steps that sequences were in, including those of the first token of each."""
    drafted: list[int] = field(default_factory=list)
    """Draft tokens by their place."""
    accepted: list[int] = field(default_factory=list)
    other: int = 0
    """Completions with another token than without speculation."""

    @property
    def shares(self) -> list[float]:
        """Right draft tokens by place, as a share of all at that place."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return [accepted / drafted for accepted, drafted in pairs if drafted]

    @property
    def accepted_length(self) -> float:
        """Right draft tokens of a step that verified any."""
        return sum(self.accepted) / max(1, self.drafted[0]) if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)


def main() -> None:
    options = parse_arguments()
    rows = asyncio.run(measure(options))
    print_rows(rows, options)
    if options.json is not None:
        figures = [
            asdict(row)
            | {
                "shares": row.shares,
                "accepted_length": row.accepted_length,
                "tokens_per_step": row.tokens_per_step,
            }
            for row in rows
        ]
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pyhelp", metavar="pyhelp|DIR|FILE")
    parser.add_argument("--drafts", nargs="+", default=[], type=named, metavar="NAME=DRAFTER")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--draft-tokens", type=int, default=8)
    workloads = [*WORKLOADS]
    parser.add_argument("--workloads", nargs="+", default=workloads[:2], choices=workloads)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3, help="at most, of a session")
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--num-pages", type=int, default=1024)
    parser.add_argument("--dtype", default="auto")
    agents = TRACES / "agent_text_sessions.jsonl.gz"
    parser.add_argument("--agents", type=Path, default=agents, metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    drafts = {**DRAFTS, **dict(options.drafts)}
    for name, drafter in [*drafts.items()]:
        if drafter in ("model", "eagle3") and draft_path(options.model, drafter) is None:
            del drafts[name]  # none comes with the model
    names = [*drafts] if options.only is None else options.only
    if unknown := [name for name in names if name not in drafts]:
        parser.error(f"--only: no draft is named {unknown[0]!r}, there are {', '.join(drafts)}")
    options.drafts = {name: drafts[name].replace("{model}", options.model) for name in names}
    return options


def named(text: str) -> tuple[str, str]:
    name, _, drafter = text.partition("=")
    if not name or not drafter:
        raise argparse.ArgumentTypeError(f"expected NAME=DRAFTER, got {text!r}")
    return name, drafter


@contextmanager
def all_drafts() -> Iterator[None]:
    """Give every sequence as many draft tokens as it may have, in every step with room for them."""

    def choose(
        _: DraftLengths, records: Sequence[DraftRecord], others: int, prefilled: int, most: int
    ) -> list[int]:
        lengths = [record.limit for record in records]
        return lengths if sum(lengths) <= most else [0] * len(records)

    with patch.object(DraftLengths, "choose", choose):
        yield


async def measure(options: argparse.Namespace) -> list[Row]:
    """Measure all rows, grouped by workload and temperature, those without a drafter first."""
    cells: dict[tuple[str, float], list[Row]] = {
        (workload, temperature): []
        for workload in options.workloads
        for temperature in options.temperatures
    }
    sessions: dict[tuple[str, float], list[Session]] = {}
    without: dict[tuple[str, float], list[tuple[int, ...]]] = {}
    for draft, drafter in {OFF: None, **options.drafts}.items():
        speculation = None
        if drafter is not None:
            speculation = Speculation(drafter=drafter, max_tokens=options.draft_tokens)
        given: dict[str, Any] = {
            "max_model_len": options.max_model_len,
            "num_pages": options.num_pages,
            "dtype": options.dtype,
        }
        with all_drafts():
            async with Engine(options.model, speculation=speculation, **given) as engine:
                for cell, rows in cells.items():
                    row = Row(*cell, draft)
                    if cell not in sessions:
                        sessions[cell] = await sessions_for(engine, row, options)
                    ids = await counted(engine, row, sessions[cell], options)
                    expected = without.setdefault(cell, ids)
                    row.other = sum([a != b for a, b in zip(ids, expected, strict=True)])
                    rows.append(row)
                if faults := engine.stats().drafter_faults_total:
                    raise RuntimeError(f"{draft} failed in {faults} calls: see the log")
    return [row for rows in cells.values() for row in rows]


def sizes_for(row: Row, options: argparse.Namespace) -> Sizes:
    return Sizes(
        output_tokens=options.output_tokens,
        prompt_tokens=options.max_model_len - options.output_tokens,
        turns=options.turns,
        agents=options.agents,
        temperature=row.temperature,
    )


async def sessions_for(engine: Engine, row: Row, options: argparse.Namespace) -> list[Session]:
    by_messages = await asks_by_messages(engine)
    count, vocab_size = options.sessions, engine.limits.vocab_size
    sizes = sizes_for(row, options)
    found = sessions_of(row.workload, count, by_messages, vocab_size, sizes)
    if not found:
        raise SystemExit(f"{row.workload}: what it is made of isn't there")
    return found


async def counted(
    engine: Engine, row: Row, sessions: Sequence[Session], options: argparse.Namespace
) -> list[tuple[int, ...]]:
    """Run the sessions, add the counts to their row, and return token ids of the completions."""
    sizes = sizes_for(row, options)
    before = engine.stats()
    done = await run(engine, sessions, 1, sizes, f"{row.workload} {row.temperature}")
    after = engine.stats()
    row.tokens = sum([one.usage.completion_tokens for one in done])
    row.steps = row.tokens - sum([one.usage.accepted_draft_tokens for one in done])
    row.drafted = added([], before.tokens_drafted_total, after.tokens_drafted_total)
    row.accepted = added([], before.tokens_accepted_total, after.tokens_accepted_total)
    what = f"{row.draft}: {row.workload} at {row.temperature:g}"
    print(f"{what}, {row.tokens_per_step:.2f} tokens a step", file=sys.stderr, flush=True)
    return [one.samples[0].token_ids for one in done]


def print_rows(rows: Sequence[Row], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("workload", "temperature", "draft"):
        table.add_column(column, justify="right" if column == "temperature" else "left")
    places = [str(place + 1) for place in range(options.draft_tokens)]
    for column in (*places, "length", "tokens/step", "other"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if row.draft == OFF:
            continue
        shares = [f"{share:.2f}" for share in row.shares]
        table.add_row(
            *(row.workload, f"{row.temperature:g}", row.draft),
            *shares,
            *[""] * (len(places) - len(shares)),
            *(f"{row.accepted_length:.2f}", f"{row.tokens_per_step:.2f}", str(row.other)),
        )
    print(
        f"{Path(options.model).name}, {options.dtype}, {options.sessions} sessions, at most "
        f"{options.output_tokens} tokens out, contexts of {options.max_model_len}, "
        f"{options.draft_tokens} draft tokens"
    )
    Console(width=max(140, Console().width)).print(table)


if __name__ == "__main__":
    main()
