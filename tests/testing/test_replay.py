"""A policy's metrics on a trace, for tests of policies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioserve import PageUse, RequestView, SchedulerView, SchedulingPolicy
from aioserve.errors import ConfigError, TraceError, UnknownPolicyError
from aioserve.steps.plan import StepPlan
from aioserve.testing import replay
from aioserve.traces.synthetic import synthetic_trace
from aioserve.traces.trace_request import TraceRequest


class ShortestFirst(SchedulingPolicy):
    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        return sorted(waiting, key=lambda request: request.prompt_tokens)


class SecondPerStep:
    def step_seconds(self, plan: StepPlan) -> float:
        return 1.0


def test_a_policy_that_sorts_by_length_has_lower_latencies() -> None:
    trace = synthetic_trace("heavy-tails", 200, rate=1000.0)
    first_come = replay(trace, "fcfs", page_size=64)
    shortest = replay(trace, ShortestFirst(), page_size=64)
    assert first_come.finished == shortest.finished == 200
    assert first_come.ttft_seconds is not None
    assert shortest.ttft_seconds is not None
    assert shortest.ttft_seconds.p50 < first_come.ttft_seconds.p50 / 2


def test_a_trace_may_be_a_file_or_the_name_of_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 513, "output_length": 3, "hash_ids": [0, 1]}
    path.write_text(json.dumps(row))
    options = {"max_num_batched_tokens": 512, "overlap": False}
    metrics = replay(str(path), "fcfs", cost=SecondPerStep(), **options)
    assert metrics.steps == 4
    assert metrics.goodput is None
    assert replay("bursts", SchedulingPolicy(), cost=SecondPerStep()).requests == 500


def test_targets_count_goodput() -> None:
    trace = [TraceRequest(n, 0.0, 100, 2, (), 100) for n in range(4)]
    metrics = replay(
        trace, "fcfs", cost=SecondPerStep(), max_num_batched_tokens=100, ttft_target_seconds=3.5
    )
    assert metrics.goodput is not None
    assert 0 < metrics.goodput.requests < 4


def test_a_policy_sees_the_targets() -> None:
    seen: set[tuple[float | None, float | None]] = set()

    class Recording(SchedulingPolicy):
        def arrived(self, requests: Sequence[RequestView]) -> None:
            seen.update((r.ttft_target_seconds, r.tpot_target_seconds) for r in requests)

    replay("bursts", Recording(), ttft_target_seconds=3.5, tpot_target_seconds=0.1)
    assert seen == {(3.5, 0.1)}


def test_a_trace_that_is_neither_file_nor_workload_is_named_with_the_workloads(
    tmp_path: Path,
) -> None:
    with pytest.raises(TraceError, match=r"'burst'.* there are: prefix-trees, .*, bursts, "):
        replay("burst", "fcfs")
    with pytest.raises(TraceError, match="bursts: No such file"):
        replay(tmp_path / "bursts", "fcfs")


def test_what_is_unknown_is_named() -> None:
    with pytest.raises(UnknownPolicyError, match="'slowest'"):
        replay("bursts", "slowest")
    with pytest.raises(ConfigError, match="page_size must be one of 1, 2, 4"):
        replay("bursts", "fcfs", page_size=0)


class MostRecentFirst:
    def key(self, use: PageUse) -> float:
        return -use.last_used_tick


def test_policies_take_options_and_strategies_are_names_or_objects() -> None:
    options: dict[str, Any] = {"num_pages": 500, "max_num_seqs": 8}
    native = replay("conversations", "round_robin:chunk_size=64", eviction="lru", **options)
    recent = replay(
        "conversations", "round_robin:chunk_size=64", eviction=MostRecentFirst(), **options
    )
    assert native.token_hit_share != recent.token_hit_share
    with pytest.raises(ConfigError, match="eviction: no strategy 'mru'; did you mean lru"):
        replay("conversations", "fcfs", eviction="mru", **options)


class Interrupted(SchedulingPolicy):
    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        raise KeyboardInterrupt


def test_a_run_that_ends_early_leaves_the_lines_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "lines.csv"
    replay("bursts", "fcfs", num_requests=3, requests=path)
    before = path.read_bytes()
    assert before.count(b"\n") == 4
    with pytest.raises(KeyboardInterrupt):
        replay("bursts", Interrupted(), num_requests=3, requests=path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_where_no_lines_can_be_written_is_named_before_anything_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "folder.csv").mkdir()
    for path in (
        tmp_path / "folder.csv",
        tmp_path / "none" / "a.csv",
        tmp_path / ("a" * 300 + ".csv"),
    ):
        with pytest.raises(ConfigError, match=r"requests: .* can't be written: \w+"):
            replay("bursts", Interrupted(), num_requests=3, requests=path)


def test_a_call_that_does_not_fit_is_said_to_be_one_of_replay():
    with pytest.raises(TypeError, match=r"^replay\(\) takes 2 positional arguments but 3 were"):
        replay("bursts", "fcfs", 5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"^replay\(\) got an unexpected .* 'bogus'$"):
        replay("bursts", "fcfs", bogus=1)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("target", ["ttft", "tpot"])
def test_a_target_that_can_not_be_compared_is_named(target: str):
    odd: dict[str, Any] = {f"{target}_target_seconds": np.array([1, 2])}
    with pytest.raises(
        ConfigError, match=rf"^{target}_target_seconds must be more than 0, got array"
    ):
        replay("bursts", "fcfs", **odd)
