"""Experiments of `techniques.py`: the run of each row, and its counts."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from teaching import Answer, Step, WatchedEngine, random_ids, teaching_prompts, watched_engine

PAGE_SIZE = 16
UNCHUNKED_TOKENS = 1 << 16
"""Token budget that no step of these workloads reaches."""
CONTIGUOUS_TOKENS = 2048
"""Tokens for which an engine without pages sets memory aside, for each request."""


@dataclass(frozen=True)
class Run:
    """One row of a table, run once."""

    answers: list[Answer]
    steps: list[Step]
    seconds: float
    started: float
    prompt_tokens: int
    cached_tokens: int
    kv_bytes_per_token: int

    @property
    def tokens_computed(self) -> int:
        return sum(sum(step.tokens.values()) for step in self.steps)

    @property
    def first_token_seconds(self) -> list[float]:
        """Seconds to the first token of each request, since all came."""
        return [answer.token_times[0] - self.started for answer in self.answers]


Client = Callable[[WatchedEngine], Awaitable[list[Answer]]]


@dataclass(frozen=True)
class Row:
    """Client and the options of the engine that it talks to."""

    name: str
    client: Client
    options: dict[str, Any] = field(default_factory=dict)


# -- the three experiments


def technique_rows(options: argparse.Namespace) -> list[Row]:
    prompts = teaching_prompts(options.requests, options.prefix_tokens)
    output_tokens = [options.output_tokens] * options.requests
    seats = options.seats
    shared: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "num_pages": seats * CONTIGUOUS_TOKENS // PAGE_SIZE,
        "max_num_batched_tokens": UNCHUNKED_TOKENS,
        "prefix_caching": False,
    }
    few = {**shared, "max_num_seqs": seats}
    many = {**shared, "max_num_seqs": options.requests}
    cached = {**many, "prefix_caching": True}
    chunked = {**cached, "max_num_batched_tokens": options.chunk_tokens}
    at_once = all_at_once(prompts, output_tokens)
    return [
        Row("one at a time, no KV cache", without_kv_cache(prompts, output_tokens), few),
        Row("+ KV cache", in_batches(prompts, output_tokens, 1), few),
        Row("+ static batching", in_batches(prompts, output_tokens, seats), few),
        Row("+ continuous batching", at_once, few),
        Row("+ paged memory", at_once, many),
        Row("+ prefix cache", at_once, cached),
        Row("+ chunked prefill", at_once, chunked),
    ]


def wait_rows(options: argparse.Namespace) -> list[Row]:
    client = behind_a_long_prompt(options)
    chunk = options.chunk_tokens
    shared: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 512, "prefix_caching": False}
    chunked = {**shared, "max_num_batched_tokens": chunk}
    rotation = f"round_robin:chunk_size={max(1, chunk // 2)}"
    return [
        Row("whole prompts", client, {**shared, "max_num_batched_tokens": UNCHUNKED_TOKENS}),
        Row(f"chunks, {chunk} tokens a step", client, chunked),
        Row("the same, round_robin", client, {**chunked, "policy": rotation}),
    ]


def length_rows(options: argparse.Namespace) -> list[Row]:
    source = random.Random(0)
    lengths = options.lengths * options.length_rounds
    prompts = [random_ids(source, 32) for _ in lengths]
    seats = len(options.lengths)
    engine: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "num_pages": seats * CONTIGUOUS_TOKENS // PAGE_SIZE,
        "max_num_seqs": seats,
        "max_num_batched_tokens": UNCHUNKED_TOKENS,
        "prefix_caching": False,
    }
    return [
        Row("static", in_batches(prompts, lengths, seats), engine),
        Row("continuous", all_at_once(prompts, lengths), engine),
    ]


# -- clients


def without_kv_cache(prompts: list[list[int]], output_tokens: list[int]) -> Client:
    """Return a client that sends a request for each token, for one more after all known ones."""

    async def client(engine: WatchedEngine) -> list[Answer]:
        answers = []
        for prompt, count in zip(prompts, output_tokens, strict=True):
            parts: list[Answer] = []
            for _ in range(count):
                known = [token_id for part in parts for token_id in part.token_ids]
                parts.append(await engine.answer(prompt + known, 1))
            answers.append(
                Answer(
                    tuple(part.token_ids[0] for part in parts),
                    parts[0].submitted,
                    tuple(part.token_times[0] for part in parts),
                )
            )
        return answers

    return client


def in_batches(prompts: list[list[int]], output_tokens: list[int], batch_size: int) -> Client:
    """Return a client that submits the next batch when all of the one before have their answers."""

    async def client(engine: WatchedEngine) -> list[Answer]:
        answers: list[Answer] = []
        for first in range(0, len(prompts), batch_size):
            batch = slice(first, first + batch_size)
            reads = map(engine.answer, prompts[batch], output_tokens[batch])
            answers += await asyncio.gather(*reads)
        return answers

    return client


def all_at_once(prompts: list[list[int]], output_tokens: list[int]) -> Client:
    return in_batches(prompts, output_tokens, len(prompts))


def behind_a_long_prompt(options: argparse.Namespace) -> Client:
    """Return a client that sends a long prompt while others decode, and short ones right after it.

    Answers are in that order: of `--decoding` that run, the long one, and `--short` others.
    """
    source = random.Random(0)
    running = [random_ids(source, 32) for _ in range(options.decoding)]
    long = random_ids(source, options.long_tokens)
    short = [random_ids(source, 32) for _ in range(options.short)]

    async def client(engine: WatchedEngine) -> list[Answer]:
        later: list[asyncio.Future[Answer]] = []

        def submit_the_others(count: int) -> None:
            if count == options.output_tokens // 2:
                answers = [engine.answer(p, options.output_tokens) for p in (long, *short)]
                later.extend(map(asyncio.ensure_future, answers))

        first = engine.answer(running[0], 2 * options.output_tokens, on_token=submit_the_others)
        others = [engine.answer(p, 2 * options.output_tokens) for p in running[1:]]
        answers = await asyncio.gather(first, *others)
        return [*answers, *await asyncio.gather(*later)]

    return client


# -- running them


async def run(row: Row, model: Path) -> Run:
    async with watched_engine(model, **row.options) as watched:
        before = watched.engine.stats()
        started = time.perf_counter()
        answers = await row.client(watched)
        seconds = time.perf_counter() - started
        after = watched.engine.stats()
        computed = after.tokens_prefilled_total - before.tokens_prefilled_total
        cached = after.tokens_cached_total - before.tokens_cached_total
        return Run(
            answers,
            list(watched.steps),
            seconds,
            started,
            computed + cached,
            cached,
            watched.kv_bytes_per_token,
        )


def run_all(rows: list[Row], model: Path, repeats: int) -> dict[str, Run]:
    """Return the quickest run of each row.

    Raises RuntimeError if their answers aren't all the same, or if runs of one row differ in their
    counts.
    """
    best: dict[str, Run] = {}
    for repeat in range(repeats):
        for row in rows:
            print(f"{row.name}, run {repeat + 1}", file=sys.stderr, flush=True)
            one = asyncio.run(run(row, model))
            if row.name in best and best[row.name].steps != one.steps:
                raise RuntimeError(f"{row.name}: two runs took different steps")
            if row.name not in best or one.seconds < best[row.name].seconds:
                best[row.name] = one
            first = best[rows[0].name]
            if [a.token_ids for a in one.answers] != [a.token_ids for a in first.answers]:
                raise RuntimeError(f"{row.name}: the answers are not those of {rows[0].name}")
    return best


# -- contents of the tables


def technique_table(runs: dict[str, Run]) -> list[dict[str, Any]]:
    slowest = next(iter(runs.values())).seconds
    table = []
    for name, one in runs.items():
        at_once = max(len(step.tokens) for step in one.steps)
        contiguous = at_once * CONTIGUOUS_TOKENS * one.kv_bytes_per_token
        peak = max(step.kv_bytes for step in one.steps)
        table.append(
            {
                "name": name,
                "steps": len(one.steps),
                "tokens_computed": one.tokens_computed,
                "tokens_per_step": one.tokens_computed / len(one.steps),
                "seconds": one.seconds,
                "speedup": slowest / one.seconds,
                "first_token_seconds_mean": mean(one.first_token_seconds),
                "hit_share": one.cached_tokens / one.prompt_tokens,
                "peak_requests": at_once,
                "peak_kv_bytes": peak,
                "contiguous_kv_bytes": contiguous,
                "contiguous_ratio": contiguous / peak,
            }
        )
    return table


def wait_table(runs: dict[str, Run], options: argparse.Namespace) -> list[dict[str, Any]]:
    table = []
    for name, one in runs.items():
        running, long = one.answers[: options.decoding], one.answers[options.decoding]
        short = one.answers[options.decoding + 1 :]
        waits = [answer.token_times[0] - answer.submitted for answer in short]
        gaps = [gap for answer in running for gap in gaps_of(answer)]
        table.append(
            {
                "name": name,
                "steps": len(one.steps),
                "largest_step_tokens": max(sum(step.tokens.values()) for step in one.steps),
                "short_ttft_seconds": {"p50": median(waits), "max": max(waits)},
                "short_ttft_tokens_p50": median(first_token_tokens(one.steps, options)),
                "short_tpot_seconds_p50": median(mean(gaps_of(answer)) for answer in short),
                "running_gap_seconds": {"p50": median(gaps), "max": max(gaps)},
                "long_ttft_seconds": long.token_times[0] - long.submitted,
                "seconds": one.seconds,
            }
        )
    return table


def first_token_tokens(steps: list[Step], options: argparse.Namespace) -> list[int]:
    """Return tokens computed from the arrival of the long prompt to the first token of each short
    one.
    """
    done = 0
    waited: dict[int, int] = {}
    for step in steps_from(steps, options.decoding):
        done += sum(step.tokens.values())
        for request in step.sampled:
            if request > options.decoding:
                waited.setdefault(request, done)
    return list(waited.values())


def steps_from(steps: list[Step], first_request: int) -> list[Step]:
    """Return the steps from the first on that computes a request from `first_request` on."""
    begun = next(n for n, step in enumerate(steps) if max(step.tokens) >= first_request)
    return steps[begun:]


def gaps_of(answer: Answer) -> list[float]:
    return [after - before for before, after in pairwise(answer.token_times)]


def length_table(runs: dict[str, Run], options: argparse.Namespace) -> list[dict[str, Any]]:
    seats = len(options.lengths)
    table = []
    for name, one in runs.items():
        ends = last_steps(one.steps)
        begun = next(n for n, step in enumerate(one.steps) if len(one.answers) - 1 in step.tokens)
        crowded = one.steps[: begun + 1]
        table.append(
            {
                "name": name,
                "steps": len(one.steps),
                "idle_share": idle_share(one.steps, seats),
                "idle_share_while_any_waits": idle_share(crowded, seats),
                "seconds": one.seconds,
                "mean_end_step": {
                    str(length): mean(ends[place::seats])
                    for place, length in enumerate(options.lengths)
                },
            }
        )
    return table


def idle_share(steps: list[Step], seats: int) -> float:
    return 1 - sum(len(step.tokens) for step in steps) / (seats * len(steps))


def last_steps(steps: list[Step]) -> list[int]:
    """Return the number, from 1, of the last step of each request."""
    ends: dict[int, int] = {}
    for number, step in enumerate(steps, start=1):
        ends.update(dict.fromkeys(step.tokens, number))
    return [ends[request] for request in sorted(ends)]
