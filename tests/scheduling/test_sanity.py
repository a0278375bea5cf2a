"""Recount of a scheduler's state: it finds everything that is off, even if the sums are right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.kv.page_pool import NO_STEP
from aioserve.scheduling.sequence import NO_SLOT
from tests.scheduling.bench import Bench


def busy_bench() -> Bench:
    """Two sequences that run and share pages, and two that wait."""
    bench = Bench(max_num_seqs=2, prefix_caching=True, num_host_pages=4)
    bench.submit(12)
    bench.submit(14)
    bench.step()
    for _ in range(2):
        bench.submit(5)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 2)
    bench.scheduler.sanity_check()
    return bench


def swap_references(bench: Bench) -> None:
    first, second = (s.lease.page_ids for s in bench.running)
    bench.pool.retain(first[-1:])
    bench.pool.release(second[:1], NO_STEP)


def keep_a_page(bench: Bench) -> None:
    bench.pool.acquire(1)


def keep_a_host_page(bench: Bench) -> None:
    bench.host.acquire(1)


def keep_a_receipt(bench: Bench) -> None:
    bench.tree.match(b"", np.arange(4, dtype=np.int32))


def lose_a_receipt(bench: Bench) -> None:
    bench.running[0].lease.receipt = bench.running[1].lease.receipt


def overtake(bench: Bench) -> None:
    bench.waiting.reverse()


def wait_twice(bench: Bench) -> None:
    bench.waiting.append(bench.waiting[-1])


def drop_out(bench: Bench) -> None:
    bench.waiting.pop()


def hold_unheard(bench: Bench) -> None:
    bench.waiting[0].paused = True


def run_without_a_slot(bench: Bench) -> None:
    bench.running[0].slot = NO_SLOT


def compute_past_the_pages(bench: Bench) -> None:
    bench.running[0].lease.computed += 8
    bench.running[0].lease.entries += 8


def write_more_than_is_computed(bench: Bench) -> None:
    bench.running[0].lease.computed -= 1


def publish_past_what_is_computed(bench: Bench) -> None:
    bench.running[0].lease.published += 8


def commit_twice(bench: Bench) -> None:
    bench.running[0].pending -= 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap_references, r"device page \d+ has \d references in the pool, and \d in page tables"),
        (keep_a_page, r"device page \d+ has 1 references in the pool, and 0 in page tables"),
        (keep_a_host_page, r"host page 0 has 1 references in the pool, and 0 in page tables"),
        (keep_a_receipt, r"sequences and pins have receipts \[.+\], the prefix tree gave out 3"),
        (lose_a_receipt, r"sequences and pins have receipts \[(\d+), \1\]"),
        (overtake, r"the waiting queue is"),
        (wait_twice, r"queues hold sequences \[1, 2, 3, 4, 4\], live are \[1, 2, 3, 4\]"),
        (drop_out, r"queues hold sequences \[1, 2, 3\], live are \[1, 2, 3, 4\]"),
        (hold_unheard, "can go on, and others are shown"),
        (run_without_a_slot, r"running sequence 1 \(running\) has slots \[-1\]"),
        (compute_past_the_pages, r"sequence 1 \(running\) has computed"),
        (publish_past_what_is_computed, r"sequence 1 \(running\) has computed"),
        (write_more_than_is_computed, r"has computed 12 tokens, of which it holds 13,"),
        (commit_twice, r"sequence 1 \(running\) has computed .* samples -1"),
    ],
)
def test_what_is_off_is_found_and_named(damage: Callable[[Bench], None], message: str) -> None:
    bench = busy_bench()
    damage(bench)
    with pytest.raises(InvariantError, match=message):
        bench.scheduler.sanity_check()
