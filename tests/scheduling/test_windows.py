"""Groups of window layers: pages that leave with the window, and hits without them."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve.errors import InvariantError
from aioserve.paging.pages import pages_of_sequence
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.view import RequestView
from aioserve.testing.fake_device import expected_tokens
from tests.scheduling.bench import Bench

WINDOWS: dict[str, Any] = {"num_window_groups": 2, "window": 10}


def serve(bench: Bench, prompt: list[int], max_tokens: int = 6) -> list[int]:
    """Serve a prompt; return its completion, which must be the one that the prompt determines."""
    sequence_id = bench.submit(prompt, max_tokens)
    tokens = bench.run()[sequence_id]
    assert tokens == expected_tokens(prompt, max_tokens)
    return tokens


def cached_tokens_of_a_replay(**options: Any) -> int:
    """Cached tokens of four conversations of four turns, in turn, after one system prompt of 39
    tokens."""
    bench = Bench(**{"page_size": 4, "prefix_caching": True, **options})
    system = [(3 * i) % 101 for i in range(39)]
    histories = [[*system] for _ in range(4)]
    for turn in range(4):
        for user, history in enumerate(histories):
            history += [(user + 1) * (turn + 2) + i for i in range(5 + user)]
            history += serve(bench, history)
    return bench.scheduler.counters.tokens_cached


def test_a_replay_finds_as_much_as_without_windows() -> None:
    assert cached_tokens_of_a_replay(num_pages=400) == 857
    for groups, window in ((1, 1), (1, 4), (2, 10), (3, 33), (1, 200)):
        found = cached_tokens_of_a_replay(num_pages=900, num_window_groups=groups, window=window)
        assert found == 857, f"{groups} groups with a window of {window}"


@pytest.mark.parametrize(
    ("num_pages", "host", "found"), [(60, 0, 404), (80, 0, 469), (120, 0, 857), (60, 200, 857)]
)
def test_what_a_replay_finds_in_scarce_memory(num_pages: int, host: int, found: int) -> None:
    options = {"num_pages": num_pages, "num_host_pages": host, **WINDOWS}
    assert cached_tokens_of_a_replay(**options) == found


def test_a_long_prompt_holds_all_pages_of_the_first_group_and_the_last_window_of_the_others() -> (
    None
):
    bench = Bench(num_pages=600, page_size=4, max_num_batched_tokens=64, **WINDOWS)
    sequence_id = bench.submit(1000, 200)
    most = 0
    for _ in range(40):
        bench.step()
        most = max(
            most, bench.view(sequence_id).pages - bench.sequences[sequence_id].lease.num_pages
        )
    lease = bench.sequences[sequence_id].lease
    assert lease.num_pages == -(-lease.computed // 4)
    # The last known token may be computed again, and sees 10 with itself.
    first = (lease.computed - 1 - 9) // 4
    assert first - 1 <= lease.tables[1].first <= first
    assert most <= 2 * (64 // 4 + 4), "a chunk, and a window before it"


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 16, 30])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_sequence_that_was_accepted_gets_on_alone(
    page_size: int, window: int, prefix_caching: bool
) -> None:
    num_pages = pages_of_sequence(70, page_size, 2, window)
    bench = Bench(
        num_pages=num_pages,
        page_size=page_size,
        prefix_caching=prefix_caching,
        num_window_groups=2,
        window=window,
    )
    fits = bench.memory.capacity_tokens
    assert 70 <= fits < 70 + page_size
    for start in (0, 0, 50):
        serve(bench, list(range(start, start + 60)), fits - 60)
    with pytest.raises(InvariantError, match=f"max_length <= {fits} tokens"):
        bench.submit(60, fits - 59)


def test_a_prompt_is_computed_in_chunks_as_long_as_window_pages_last() -> None:
    bench = Bench(num_pages=4 * 4 + 2 * 5, num_window_groups=2, window=8)
    sequence_id = bench.submit(40, 4)
    counts = []
    while bench.sequences:
        plan = bench.plan()
        counts.append(plan.num_tokens)
        bench.commit(plan)
    assert counts[:1] == [16], "the budget is less than the pages"
    assert sum(counts[:-3]) == 40
    assert sequence_id


def test_plans_name_the_pages_of_all_groups_position_by_position() -> None:
    bench = Bench(num_pages=30, **WINDOWS)
    bench.submit(9, 20)
    plan = bench.plan()
    (change,) = plan.pages
    lease = bench.running[0].lease
    rows = change.page_ids.reshape(-1, 3).tolist()
    assert [row[0] for row in rows] == lease.page_ids.tolist()
    assert [page for row in rows for page in row[1:]] == lease.tables[1].held.tolist()
    assert sorted(page for row in rows for page in row) == list(range(9))
    bench.commit(plan)
    for _ in range(16):
        plan = bench.plan()
        assert [(change.first, len(change.page_ids)) for change in plan.pages] in (
            [],
            [(lease.num_pages - 1, 3)],
        )
        bench.commit(plan)


def test_the_oldest_prefill_takes_its_window_pages_from_the_younger() -> None:
    """Two prompts in progress can't both go on: the younger one begins again."""
    bench = Bench(num_pages=2 * 10 + 3, num_window_groups=1, window=16, max_num_batched_tokens=8)
    first, second = bench.submit(36, 4), bench.submit(list(range(100, 136)), 4)
    tokens = bench.run()
    assert tokens[first] == expected_tokens(list(range(36)), 4)
    assert tokens[second] == expected_tokens(list(range(100, 136)), 4)


def test_idle_window_pages_go_before_a_leaf_that_was_used_since_and_with_one_of_their_age() -> None:
    bench = Bench(num_pages=100, prefix_caching=True, num_window_groups=1, window=4)
    serve(bench, list(range(23)), 2)  # six pages; last window pages as old as the leaf
    tree, pool = bench.tree, bench.pool
    assert tree.num_pages == pool.num_held == 12
    since = [since for _, since in pool.idle_owners()]
    assert since == sorted(since)
    assert len(since) == 6
    (leaf,) = [node for node in tree.walk() if node.page_ids]
    before = [owner for owner, at in pool.idle_owners() if at < leaf.last_used]
    assert before, "some left the window while the sequence ran"
    for count in range(1, len(before) + 1):
        assert tree.frees_at_once(count)
    bench.memory.make_free(pool.num_free + len(before), bench.scheduler.state.launched + 1)
    (leaf,) = [node for node in tree.walk() if node.page_ids]
    assert len(leaf.page_ids) == 6
    lacking = [p for p, own in zip(leaf.page_ids, leaf.group_page_ids, strict=True) if not own]
    assert lacking == sorted(before)
    bench.memory.make_free(pool.num_free + 1, bench.scheduler.state.launched + 1)
    (leaf,) = [node for node in tree.walk() if node.page_ids]
    assert len(leaf.page_ids) == 5, "the last page went, and its window page with it"
    assert tree.num_pages == 12 - len(before) - 2


def test_nothing_is_found_where_the_last_window_is_missing() -> None:
    bench = Bench(num_pages=200, prefix_caching=True, **WINDOWS)
    prompt = list(range(40))
    serve(bench, prompt)
    while bench.pool.num_idle:
        bench.memory.make_free(bench.pool.num_free + 2, bench.scheduler.state.launched + 1)
    held = bench.memory.num_cached
    assert held > 0, "pages of the first group are cached"
    before = bench.scheduler.counters.tokens_cached
    serve(bench, prompt)
    assert bench.scheduler.counters.tokens_cached == before
    serve(bench, prompt)
    assert bench.scheduler.counters.tokens_cached == before + 39, (
        "its window pages joined the others"
    )


class PinsAll(SchedulingPolicy):
    def pin(self, request: RequestView) -> int:
        return request.prompt_tokens


def test_pins_count_the_window_pages_that_they_hold() -> None:
    options: dict[str, Any] = {**WINDOWS, "window": 32, "policy": PinsAll()}
    bench = Bench(num_pages=240, page_size=4, prefix_caching=True, **options)
    pins = bench.scheduler.state.pins
    for number in range(12):
        bench.submit([1000 + number, *range(50 * number, 50 * number + 12)], 3)
        bench.run()
        assert pins.num_pages == bench.memory.usage().pages_held_by_requests <= pins.max_pages
    assert pins.num_pages > pins.max_pages // 2
