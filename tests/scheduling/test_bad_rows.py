"""Sequences with a token whose logits are not numbers, among others that share pages with them."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import PENDING_IDS, StepPlan
from aioserve.testing.fake_device import expected_tokens
from tests.scheduling.bench import Bench

BAD = 9999  # never drawn
MAX_STEPS = 400
MAX_TOKENS = 5


class Device:
    """Reports rows that are not numbers: rows of sequences with a bad token of their own. With
    `spoilt`, also rows that read a page which was written together with a bad token."""

    def __init__(self, bench: Bench, *, spoilt: bool) -> None:
        self.bench, self._spoils = bench, spoilt
        self._spoilt_pages: set[int] = set()

    def run(self, plan: StepPlan) -> StepOutcome:
        outcome = self.bench.device.execute(plan)
        size, errors, index = self.bench.pool.page_size, {}, 0
        for copy in plan.copies:
            self._spoilt_pages.discard(copy.target)
            if copy.source in self._spoilt_pages:
                self._spoilt_pages.add(copy.target)
        for item, pages in zip(plan.items, self.bench.pages, strict=True):
            own = item.token_ids if item.token_ids is not PENDING_IDS else np.empty(0, np.int32)
            known = self.bench.sequences[item.sequence_id].ids(0, item.start)
            breaks = BAD in own or BAD in known
            if self._spoils:
                first, end = item.start // size, -(-(item.start + item.count) // size)
                if item.start % size == 0:
                    self._spoilt_pages.discard(pages[first])
                self._spoilt_pages.difference_update(pages[first + 1 : end])
                breaks = BAD in own or not self._spoilt_pages.isdisjoint(pages[:end])
                if breaks:
                    self._spoilt_pages.update(pages[first:end])
            for _ in item.rows:
                if breaks:
                    errors[index] = "NaN"
                index += 1
        return StepOutcome(step=plan.step, token_ids=outcome.token_ids, row_errors=errors)


def run_all(bench: Bench, device: Device) -> tuple[dict[int, list[int] | str], dict[int, int]]:
    """Run all sequences with two steps in flight. Return the result of each, and the number of
    times that each began again."""
    begun: dict[int, int] = {}
    got: dict[int, list[int] | str] = {one: [] for one in bench.sequences}
    in_flight: deque[tuple[StepPlan, StepOutcome]] = deque()
    for _ in range(MAX_STEPS):
        plan = bench.scheduler.plan(0.0)
        bench.scheduler.sanity_check()
        if plan is not None:
            bench.page_tables.take(plan)
            bench.pages = [bench.page_tables.page_ids(item.slot).tolist() for item in plan.items]
            begun |= {one.sequence_id: one.epoch for one in bench.sequences.values()}
            in_flight.append((plan, device.run(plan)))
        if not in_flight:
            break
        if len(in_flight) == 2 or plan is None:
            for update in bench.scheduler.commit(*in_flight.popleft(), 0.0):
                tokens = got[update.sequence_id]
                if update.error is not None:
                    got[update.sequence_id] = update.error
                elif update.token_id is not None:
                    assert isinstance(tokens, list)
                    tokens.append(update.token_id)
            bench.scheduler.sanity_check()
    return got, begun


tails = st.tuples(st.integers(0, 30), st.integers(1, 40)).map(
    lambda drawn: [*range(drawn[0], sum(drawn))]
)


@given(
    shared=st.integers(16, 90),
    good=st.lists(tails, min_size=1, max_size=4),
    bad=st.lists(st.tuples(tails, st.integers(0, 40)), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    spoilt=st.booleans(),
    page_size=st.sampled_from([1, 4, 16]),
    samples=st.sampled_from([1, 1, 3]),
    windows=st.sampled_from([{}, {}, {"num_window_groups": 1, "window": 20}]),
)
def test_those_whose_own_tokens_are_no_numbers_end_and_all_others_have_their_tokens(
    shared, good, bad, order, spoilt, page_size, samples, windows
):
    """Holds for any sharing of pages, and whether or not a bad token spoils the rest of its
    page."""
    bench = Bench(
        num_pages=2000 // page_size,
        page_size=page_size,
        prefix_caching=True,
        max_num_batched_tokens=64,
        **windows,
    )
    common = [100 + i for i in range(shared)]
    prompts = [[*common, *tail] for tail in good]
    prompts += [[*common, *tail[:at], BAD, *tail[at:]] for tail, at in bad]
    order.shuffle(prompts)
    wanted: dict[int, list[int] | str] = {}
    for prompt in prompts:
        ids = bench.submit_all(prompt, MAX_TOKENS, n=samples)
        for one in ids:
            seed = bench.sequences[one].seed
            healthy = expected_tokens(prompt, MAX_TOKENS, seed)
            wanted[one] = "NaN" if BAD in prompt else healthy

    got, begun = run_all(bench, Device(bench, spoilt=spoilt))

    assert got == wanted
    assert not bench.sequences, "some wait for ever"
    assert max(begun.values()) <= 1
    assert bench.pool.num_free + bench.memory.num_cached == bench.pool.num_pages
