"""Made-up workloads have the trait that they are named for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from aioserve.errors import ConfigError
from aioserve.traces.synthetic import WORKLOADS, synthetic_trace


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_is_a_trace(name: str) -> None:
    trace = synthetic_trace(name, 60, seed=3)
    assert trace == synthetic_trace(name, 60, seed=3)
    assert trace != synthetic_trace(name, 60, seed=4)
    assert [request.number for request in trace] == list(range(60))
    arrivals = [request.arrival_seconds for request in trace]
    assert arrivals == sorted(arrivals)
    for request in trace:
        assert len(request.prompt_ids()) == request.prompt_tokens


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - {"conversations", "agents"}))
def test_the_rate_is_about_what_was_asked_for(name: str) -> None:
    trace = synthetic_trace(name, 2000, rate=8.0)
    assert 5.0 < len(trace) / trace[-1].arrival_seconds < 12.0


def test_trees_share_prefixes_and_turns_go_on() -> None:
    for name in ("prefix-trees", "conversations", "chatbot", "documents", "agents"):
        trace = synthetic_trace(name, 100)
        blocks = [block for request in trace for block in request.block_ids]
        assert len(set(blocks)) < len(blocks) / 2
        behind: dict[int, int] = {}
        for request in trace:
            for before, block in zip((-1, *request.block_ids), request.block_ids, strict=False):
                assert behind.setdefault(block, before) == before


def test_bursts_come_in_bursts() -> None:
    gaps = np.diff([request.arrival_seconds for request in synthetic_trace("bursts", 2000)])
    assert gaps.std() / gaps.mean() > 2.5


def test_tenants_are_unequal() -> None:
    counts = Counter(request.tenant for request in synthetic_trace("tenants", 600))
    assert len(counts) == 8
    assert max(counts.values()) > 5 * min(counts.values())


def test_tails_are_heavy() -> None:
    lengths = sorted(r.prompt_tokens for r in synthetic_trace("heavy-tails", 1000))
    assert sum(lengths[-100:]) > sum(lengths) / 3


def test_prompts_of_agents_grow_and_unique_ones_share_nothing() -> None:
    by_number = {request.number: request for request in synthetic_trace("agents", 100)}
    steps = [request for request in by_number.values() if request.follows is not None]
    assert len(steps) > 50
    for step in steps:
        before = by_number[step.follows or 0]
        assert step.block_ids[: len(before.block_ids)] == before.block_ids
        assert len(step.block_ids) > len(before.block_ids)
    firsts = [request.prompt_ids()[:64] for request in synthetic_trace("unique-prompts", 100)]
    assert len({tuple(first) for first in firsts}) == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "calm"}, "no synthetic workload 'calm'; there are: prefix-trees"),
        ({"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ({"rate": 0.0}, "rate must be more than 0, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_what_makes_no_sense_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic_trace(**({"name": "bursts"} | arguments))  # pyright: ignore[reportArgumentType]
