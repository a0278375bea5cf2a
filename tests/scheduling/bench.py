"""A scheduler and a device, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aioserve.config import Preemption
from aioserve.drafting.drafter import Drafter
from aioserve.hints import SchedulingHints
from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import PagePool
from aioserve.kv.prefix_tree import PrefixTree
from aioserve.paging.layout import GroupSpec, group_specs
from aioserve.request import Request, SamplingParams
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.updates import SequenceUpdate
from aioserve.scheduling.view import RequestView
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.plan import StepPlan
from aioserve.testing.fake_device import FakeDevice

GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """Plans and commits steps. The state is checked after every plan and commit."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        num_host_pages: int = 0,
        page_size: int = 4,
        policy: SchedulingPolicy | None = None,
        prefix_caching: bool = False,
        partial_page_reuse: bool = True,
        eviction: str = "lru",
        preemption: Preemption = "auto",
        num_window_groups: int = 0,
        window: int = 0,
        groups: Sequence[GroupSpec] | None = None,
        drafter: Drafter | None = None,
        **options: Any,
    ) -> None:
        if groups is None:
            groups = group_specs(num_window_groups, window)
        num_groups = sum([group.width for group in groups])
        self.memory = KVMemory.of(
            (num_pages, num_host_pages),
            page_size,
            groups=groups,
            prefix_caching=prefix_caching,
            partial_page_reuse=partial_page_reuse,
            eviction=eviction,
            preemption=preemption,
        )
        self.pool = self.memory.pool
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "output_reserve_tokens": 0}
        self.scheduler = Scheduler(
            self.memory, policy or SchedulingPolicy(), **{**limits, **options}
        )
        self.device = FakeDevice(
            num_pages,
            page_size,
            self.scheduler.num_slots,
            num_host_pages,
            num_window_groups=num_groups - 1,
            window=window,
            drafter=drafter,
        )
        self.page_tables = SlotPageTables(self.scheduler.num_slots, num_groups)
        self.pages: list[list[int]] = []
        """Pages of the slot of each item in the last plan."""

    @property
    def sequences(self) -> dict[int, SequenceState]:
        return self.scheduler.state.sequences

    @property
    def running(self) -> list[SequenceState]:
        return self.scheduler.state.running

    @property
    def waiting(self) -> list[SequenceState]:
        return self.scheduler.state.waiting

    def view(self, sequence_id: int) -> RequestView:
        return self.sequences[sequence_id].view

    @property
    def host(self) -> PagePool:
        assert len(self.memory.tiers) == 2
        return self.memory.tiers[1].pool

    @property
    def tree(self) -> PrefixTree:
        assert self.memory.tree is not None
        return self.memory.tree

    def submit_all(
        self,
        prompt: int | Sequence[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        namespace: bytes = b"",
        end_ids: frozenset[int] = frozenset(),
        now_seconds: float = 0.0,
        **more: Any,
    ) -> tuple[int, ...]:
        """Submit a prompt of these ids, or of 0, 1, 2, ...; return the ids of its samples. Hints,
        for example a tenant, and other fields of the request are in `more`."""
        names = more.keys() & set(SchedulingHints.__struct_fields__)
        hints = SchedulingHints(**{name: more.pop(name) for name in names})
        ids = np.arange(prompt) if isinstance(prompt, int) else np.array(prompt)
        return self.scheduler.submit(
            Request(
                request_id="r",
                prompt_ids=ids.astype(np.int32),
                params=GREEDY if n == 1 else SamplingParams(temperature=0.0, n=n),
                end_ids=end_ids,
                max_length=len(ids) + max_tokens,
                arrival_seconds=now_seconds,
                namespace=namespace,
                hints=hints,
                **more,
            )
        )

    def submit(self, prompt: int | Sequence[int], max_tokens: int = 8, **options) -> int:
        (sequence_id,) = self.submit_all(prompt, max_tokens, **options)
        return sequence_id

    def plan(self, now_seconds: float = 0.0) -> StepPlan:
        plan = self.scheduler.plan(now_seconds)
        self.scheduler.sanity_check()
        assert plan is not None
        self.page_tables.take(plan)
        self.pages = [self.page_tables.page_ids(item.slot).tolist() for item in plan.items]
        return plan

    def commit(self, plan: StepPlan, now_seconds: float = 0.0) -> list[SequenceUpdate]:
        progress = self.scheduler.commit(plan, self.device.execute(plan), now_seconds)
        self.scheduler.sanity_check()
        return progress

    def fail(self, plan: StepPlan) -> list[SequenceUpdate]:
        self.device.execute_in_part(plan, 0)
        progress = self.scheduler.fail(plan, "planted")
        self.scheduler.sanity_check()
        return progress

    def step(self) -> list[SequenceUpdate]:
        return self.commit(self.plan())

    def run(self) -> dict[int, list[int]]:
        """Step until nothing is left; return the tokens of every sequence."""
        tokens: dict[int, list[int]] = {}
        while self.sequences:
            for entry in self.step():
                assert entry.token_id is not None
                tokens.setdefault(entry.sequence_id, []).append(entry.token_id)
        return tokens


def work(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Sequence, start and count of each item."""
    return [(item.sequence_id, item.start, item.count) for item in plan.items]
