"""Sequences that lose entries in the middle, under the real scheduler: preempted, swapped, forked.

The fake device's samples depend on the tokens, on their positions and on the indices of all entries
that are left.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from aioserve.kv.groups import making
from aioserve.testing.fake_device import entries_of, token_of, weights_of
from tests.doubles.dropped_entries import MOST_PAGES, DroppingGroup, positions_kept
from tests.scheduling.bench import Bench


@pytest.fixture(autouse=True)
def _entries_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(making.KINDS, "full", DroppingGroup)


def expected_tokens(prompt: list[int], count: int, seed: int, page_size: int) -> list[int]:
    """Tokens after a prompt that is too short to lose any entry."""
    ids, held = list(prompt), [*range(len(prompt))]
    while True:
        entries = entries_of(np.array(ids, np.int64), 0, 0)[held]
        ids.append(token_of(int(np.dot(entries, weights_of(len(held)))), seed))
        if len(ids) == len(prompt) + count:
            return ids[len(prompt) :]
        held = [*positions_kept(held, page_size), len(ids) - 1]


@pytest.mark.parametrize("page_size", [2, 4])
@pytest.mark.parametrize("swaps", [False, True])
def test_answers_are_those_of_the_entries_that_are_left(page_size: int, swaps: bool) -> None:
    counted = Counter[str]()
    for seed in range(4):
        source = random.Random(seed)
        bench = Bench(
            num_pages=(14 if swaps else 60) * 4 // page_size,
            page_size=page_size,
            num_host_pages=400 if swaps else 0,
            preemption="swap" if swaps else "recompute",
        )
        expected: dict[int, list[int]] = {}
        received: dict[int, list[int]] = {}
        while len(expected) < 16 or bench.sequences:
            if len(expected) < 16 and source.random() < 0.6:
                most = MOST_PAGES * page_size - 1
                prompt = [source.randrange(50) for _ in range(source.randint(1, most))]
                count, samples = source.randint(1, 40), source.choice([1, 1, 2])
                for sample, one in enumerate(bench.submit_all(prompt, count, n=samples)):
                    expected[one] = expected_tokens(prompt, count, sample, page_size)
            if bench.sequences:
                for entry in bench.step():
                    assert entry.token_id is not None
                    received.setdefault(entry.sequence_id, []).append(entry.token_id)
                for sequence in bench.running:
                    counted["lost"] += sequence.lease.computed - sequence.lease.entries
        assert received == expected
        assert bench.pool.num_free == bench.pool.num_pages
        counted["preempted"] += bench.scheduler.counters.preemptions
        counted["swapped"] += bench.memory.usage().pages_swapped_in_total
    assert counted["lost"]
    assert bool(counted["preempted"]) == bool(counted["swapped"]) == swaps
