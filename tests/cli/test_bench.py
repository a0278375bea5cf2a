"""`aioserve bench` runs the requested load, and its numbers are consistent."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from aioserve import Engine, EngineStats, SamplingParams, Timings, Usage
from aioserve.cli._load import (
    TICK_SECONDS,
    LoopLag,
    figures,
    host_share,
    random_prompts,
    run_requests,
)
from tests.cli.command import Run
from tests.tiers import clock_counts
from tests.waits import until

SMALL = ("--num-prompts", 6, "--input-len", 20, "--output-len", 5, "--shared-prefix-len", 8)


@pytest.mark.clock
def test_throughput_prints_json_alone(aioserve_here: Run, tiny_model: Path) -> None:
    options = ("--page-size", 4, "--eviction", "slru", "--json", "-")
    done = aioserve_here("bench", "throughput", tiny_model, *SMALL, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rates, seconds = result["throughput"], result["seconds"]
    assert rates["requests_per_second"] * seconds == pytest.approx(6)
    assert rates["prompt_tokens_per_second"] * seconds == pytest.approx(120)
    assert rates["output_tokens_per_second"] * seconds == pytest.approx(30)
    stats = result["stats"]
    assert stats["pages_held_at_end"] == 0 < stats["pages_total"]
    assert stats["steps"] >= 5
    # The first of six requests computes the 8 shared tokens.
    assert (stats["tokens_prefilled"], stats["tokens_cached"]) == (80, 40)
    lag = result["loop_lag_milliseconds"]  # none if the run took less than a tick
    assert lag["max"] >= lag["p99"] >= 0 if lag else not clock_counts()
    assert {"isa", "threads", "dtype"} <= result["machine"].keys()
    host = result["host"]
    assert host["share_of_step"] > 0
    assert host["step_milliseconds"] * stats["steps"] < seconds * 1000


@pytest.mark.more
def test_drafts_are_counted_by_their_place(aioserve_here: Run) -> None:
    options = ("--num-prompts", 2, "--input-len", 20, "--output-len", 40, "--seed", 1)
    draft_options = ("--speculation", "ngram:min_ngram=1", "--speculation-max-tokens", 3)
    done = aioserve_here("bench", "latency", "pyhelp", *options, *draft_options, "--json", "-")
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)["stats"]
    drafted, accepted = stats["tokens_drafted"], stats["tokens_accepted"]
    assert 0 < len(drafted) <= 3
    assert all(right <= all_of for right, all_of in zip(accepted, drafted, strict=True))


@pytest.mark.more
def test_drafts_may_be_kept_by_rejection(aioserve_here: Run) -> None:
    options = ("--num-prompts", 2, "--input-len", 20, "--output-len", 40, "--seed", 1)
    draft_options = ("--speculation", "model", "--speculation-acceptance")
    done = aioserve_here(
        "bench", "latency", "pyhelp", *options, *draft_options, "rejection", "--json", "-"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stats"]["pages_held_at_end"] == 0
    refused = aioserve_here("bench", "latency", "pyhelp", *options, *draft_options, "all")
    assert refused.returncode != 0
    assert "--speculation-acceptance: acceptance must be one of" in refused.stderr


def test_latency_prints_a_table_and_writes_json(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    options = ("--dtype", "bfloat16", "--page-size", 2, "--no-overlap", "--no-prefix-caching")
    memory = ("--num-host-pages", 8, "--preemption", "swap")
    done = aioserve_here("bench", "latency", tiny_model, *SMALL, *options, *memory, "--json", file)
    assert done.returncode == 0, done.stderr
    for shown in (
        "queued",
        "time to first token",
        "time per output token",
        "longest gap between tokens",
        "whole answer",
        "host's share",
    ):
        assert shown in done.stdout
    result = json.loads(file.read_text())
    assert ("loop lag" in done.stdout) == (result["loop_lag_milliseconds"] is not None)
    assert result["concurrency"] == 1
    assert result["stats"]["tokens_prefilled"] == 120
    assert result["machine"]["dtype"] == "bfloat16"
    for spread in result["latency_milliseconds"].values():
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]


def test_more_at_once_than_there_are_requests_is_refused(aioserve_here: Run) -> None:
    done = aioserve_here("bench", "latency", "--num-prompts", 6, "--concurrency", 7)
    assert done.returncode == 2
    assert "concurrency must be at most num_prompts = 6, got 7" in done.stderr


def test_rates_divide_what_was_generated_and_not_what_was_asked_for() -> None:
    answers = [(Usage(8, tokens), Timings(0.5, 2.0, tokens)) for tokens in (1, 4)]
    rates = figures(answers, 2.0)["throughput"]
    assert rates == {
        "requests_per_second": 1.0,
        "prompt_tokens_per_second": 8.0,
        "output_tokens_per_second": 2.5,
        "total_tokens_per_second": 10.5,
    }


@pytest.mark.more
@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_an_answer_that_the_model_cannot_hold_is_refused(
    aioserve_here: Run, tiny_model: Path, kind: str
) -> None:
    lengths = ("--input-len", 500, "--num-prompts", 2, "--output-len")
    done = aioserve_here("bench", kind, tiny_model, *lengths, 13)
    assert (done.returncode, done.stdout) == (2, "")
    message = "input_len + output_len must be at most max_model_len = 512 of tiny, got 500 + 13"
    assert done.stderr == f"aioserve: {message}\n"
    done = aioserve_here("bench", kind, tiny_model, *lengths, 12, "--json", "-")
    result = json.loads(done.stdout)
    assert result["answers"] == {"requests": 2, "prompt_tokens": 1000, "output_tokens": 24}
    rate = result["throughput"]["output_tokens_per_second"]
    assert rate * result["seconds"] == pytest.approx(24)


@pytest.mark.more
def test_what_no_request_has_is_no_zero(aioserve_here: Run, tiny_model: Path) -> None:
    arguments = ("bench", "latency", tiny_model, *SMALL, "--output-len", 1)
    words = [*map(str, arguments)]
    del words[words.index("--output-len") : words.index("--output-len") + 2]  # SMALL has one
    result = json.loads(aioserve_here(*words, "--json", "-").stdout)
    assert result["latency_milliseconds"]["tpot"] is None
    assert result["latency_milliseconds"]["longest_gap"] is None
    assert result["latency_milliseconds"]["ttft"]["p50"] > 0
    rows = [line.split() for line in aioserve_here(*words).stdout.splitlines()]
    assert ["time", "per", "output", "token", *"----"] in rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-prompts", 10**6), "num_prompts must be in [1, 65536], got 1000000"),
        (
            ("--input-len", 10**7),
            "num_prompts * input_len must be at most 10000000, got 32 * 10000000",
        ),
        (("--output-len", 0), "output_len must be at least 1, got 0"),
        (("--seed", -1), "seed must be at least 0, got -1"),
    ],
)
def test_a_load_beyond_bounds_is_refused_before_the_model_loads(
    aioserve_here: Run, options: tuple[object, ...], message: str
) -> None:
    done = aioserve_here("bench", "throughput", "/no/such/model", *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_prompts_share_exactly_the_prefix_that_was_asked_for() -> None:
    first, second, third = random_prompts(3, 64, 40, vocab_size=1000, seed=5)
    assert first[:40] == second[:40] == third[:40]
    assert first[40:] != second[40:] != third[40:]
    assert {len(prompt) for prompt in (first, second, third)} == {64}
    assert all(0 <= token < 1000 for token in first)


def test_the_host_has_its_share_of_the_steps_in_between() -> None:
    totals = {"steps": 10, "step_seconds": 1.0, "planning_seconds": 0.5, "commit_seconds": 0.25}
    before = SimpleNamespace(
        **{f"{name}_total": value for name, value in totals.items()}, delivery_seconds_total=0.0
    )
    after = SimpleNamespace(
        steps_total=14,
        step_seconds_total=1.25,
        planning_seconds_total=0.5625,
        commit_seconds_total=0.28125,
        delivery_seconds_total=0.015625,
    )
    assert host_share(cast(EngineStats, before), cast(EngineStats, after)) == {
        "planning_microseconds_per_step": 15625,
        "commit_microseconds_per_step": 7812.5,
        "delivery_microseconds_per_step": 3906.25,
        "step_milliseconds": 62.5,
        "share_of_step": 0.4375,
    }


@pytest.mark.asyncio
async def test_thousands_of_requests_are_submitted_in_turns_with_other_tasks() -> None:
    turns = 0
    submitted_in: Counter[int] = Counter()

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    class Stream:
        usage, timings = Usage(1, 1), Timings(0.0, 0.0, 1)

        def __aiter__(self) -> Stream:
            return self

        async def __anext__(self) -> None:
            if submitted_in.total() == 1000:
                raise StopAsyncIteration
            await asyncio.sleep(0)

    class Submits:
        def stream(self, prompt: list[int], params: SamplingParams) -> Stream:
            submitted_in[turns] += 1
            return Stream()

    others = asyncio.create_task(take_turns())
    answers = await run_requests(cast(Engine, Submits()), [[1]] * 1000, 1, 1000)
    others.cancel()
    assert len(answers) == submitted_in.total() == 1000
    assert max(submitted_in.values()) <= 100


@pytest.mark.asyncio
async def test_the_ticker_sees_a_blocked_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("aioserve.cli._load.time", clock)
    async with LoopLag() as lag:
        await until(lambda: lag.samples)
        now[0] += 0.08  # while a callback computes, for example
        num_ticks = len(lag.samples)
        await until(lambda: len(lag.samples) > num_ticks)
    assert max(lag.samples) == pytest.approx(0.08 - TICK_SECONDS)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path
) -> None:
    done = aioserve_here("bench", "throughput", tiny_model, *SMALL, "--json", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "can't be written: Is a directory" in done.stderr
