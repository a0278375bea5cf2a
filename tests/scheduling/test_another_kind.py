"""A kind of group that the package doesn't know: memory and scheduler go by the contract."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from aioserve.kv.groups import making
from aioserve.paging.layout import ONE_GROUP
from aioserve.paging.pages import pages_for
from aioserve.simulation.decode_pass import decode_pass
from aioserve.testing.fake_device import expected_tokens
from tests.doubles.beside_group import BesideGroup, beside_specs
from tests.scheduling.bench import Bench


@pytest.fixture(autouse=True)
def _kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(making.KINDS, "beside", BesideGroup)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("num_host_pages", [0, 30])
def test_answers_are_right_whatever_is_shared_preempted_and_swapped(
    page_size: int, width: int, num_host_pages: int
) -> None:
    counted = Counter[str]()
    for seed in range(4):
        bench = Bench(
            num_pages=(1 + width) * pages_for(44, page_size),
            page_size=page_size,
            num_host_pages=num_host_pages,
            preemption="swap" if num_host_pages else "auto",
            prefix_caching=seed != 1,
            max_num_seqs=4,
            groups=beside_specs(width),
        )
        serve_random_requests(bench, random.Random(seed))
        usage = bench.memory.usage()
        assert usage.pages_free + usage.pages_cached == usage.pages_total
        counted["preempted"] += bench.scheduler.counters.preemptions
        counted["found"] += bench.scheduler.counters.tokens_cached
        counted["copied"] += usage.pages_copied_total
        counted["swapped"] += usage.pages_swapped_in_total
    assert counted["preempted"]
    assert counted["found"]
    assert bool(counted["copied"]) == (page_size > 1)
    assert bool(counted["swapped"]) == (num_host_pages > 0)


def serve_random_requests(bench: Bench, source: random.Random) -> None:
    """Serve random requests that begin alike and overlap; check that each gets the tokens that it
    has alone."""
    prefix = [source.randrange(50) for _ in range(20)]
    expected: dict[int, list[int]] = {}
    received: dict[int, list[int]] = {}
    while len(expected) < 16 or bench.sequences:
        if len(expected) < 16 and source.random() < 0.6:
            prompt = prefix[: source.randint(0, 20)] + [source.randrange(50) for _ in range(3)]
            count, samples = source.randint(1, 14), source.choice([1, 1, 2])
            for sample, one in enumerate(bench.submit_all(prompt, count, n=samples)):
                expected[one] = expected_tokens(prompt, count, sample)
        if bench.sequences:
            for entry in bench.step():
                assert entry.token_id is not None
                received.setdefault(entry.sequence_id, []).append(entry.token_id)
    assert received == expected


def test_a_prompt_has_its_pages_of_all_groups_from_the_beginning_on() -> None:
    bench = Bench(num_pages=64, groups=beside_specs(2), max_num_batched_tokens=8)
    bench.submit(range(30), 4)
    plan = bench.plan()
    (change,) = plan.pages
    lease = bench.running[0].lease
    assert lease.covered == lease.num_pages == 8
    assert np.array_equal(change.page_ids.reshape(8, 3)[:, 0], lease.page_ids)
    assert np.array_equal(change.page_ids.reshape(8, 3)[:, 1:].ravel(), lease.tables[1].held)
    bench.commit(plan)
    while bench.sequences:
        assert bench.running[0].lease.tables[1].first == 0
        bench.step()


def test_a_lease_needs_a_page_of_each_group_at_a_time() -> None:
    bench = Bench(num_pages=60, groups=beside_specs(2))
    assert bench.memory.capacity_tokens == 4 * 20
    assert bench.memory.keeps_all
    assert not bench.memory.grows_with_chunks


@pytest.mark.parametrize("width", [0, 1])
def test_the_simulator_passes_no_steps_with_pages_beside_those_of_group_0(width: int) -> None:
    bench = Bench(num_pages=40, groups=beside_specs(width) if width else ONE_GROUP)
    bench.submit(range(6), 12)
    bench.step()
    assert (decode_pass(bench.scheduler) is None) == (width > 0)
