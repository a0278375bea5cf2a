"""Small random workloads to try a scheduling policy on."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

import msgspec

from aioserve.config import Preemption
from aioserve.hints import MAX_PRIORITY, MIN_PRIORITY, SchedulingHints

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "MAX_ANSWER_TOKENS",
    "MAX_PROMPT_TOKENS",
    "DrawnRequest",
    "Rush",
    "Workload",
    "workloads",
]

MAX_PROMPT_TOKENS = 64
MAX_ANSWER_TOKENS = 16
TENANTS = ("a", "b", "c")
SESSIONS = ("s", "t")
METADATA_KEYS = ("tier", "kind")
METADATA_VALUES = ("", "gold", "7", "not a number")


class DrawnRequest(msgspec.Struct, frozen=True):
    """One request of a workload."""

    gap_steps: int
    """Steps between the request before and this one."""
    family: int
    """Key of the first tokens: requests of a family begin alike."""
    shared_tokens: int
    own_tokens: int
    max_tokens: int
    num_samples: int
    hints: SchedulingHints = SchedulingHints()
    leaves_after_steps: int | None = None
    """Steps from its arrival after which it is cancelled, unless it has ended; None: never."""
    pauses_after_steps: int | None = None
    """Steps from its arrival after which its reader falls behind, for `PAUSE_STEPS` steps; None:
    never.
    """
    max_draft_tokens: int = 0
    """Most draft tokens of a step for each of its answers."""

    def prompt_ids(self, index: int) -> list[int]:
        shared = [(7 * i + self.family) % 251 for i in range(self.shared_tokens)]
        return [*shared, *[(3 * i + 5 * index) % 256 for i in range(self.own_tokens)]]


class Rush(msgspec.Struct, frozen=True):
    """Requests that keep coming, to see if they hold up those before them for ever."""

    requests: list[DrawnRequest]
    """Requests that arrive in turn, again and again."""
    backlog: int
    """Number of these requests that wait at any time."""


class Workload(msgspec.Struct, frozen=True):
    """Requests, and the scheduler that serves them."""

    requests: list[DrawnRequest]
    page_size: int
    spare_pages: int
    """Pages beyond those that the longest request needs."""
    max_num_seqs: int
    max_num_batched_tokens: int
    output_reserve_tokens: int
    prefix_caching: bool
    overlap: bool
    num_host_pages: int = 0
    preemption: Preemption = "auto"
    failing_steps: frozenset[int] = frozenset()
    """Launched steps, counted from 0, that fail as a whole."""
    rush: Rush | None = None
    """Rush that goes on until one of `requests` has waited for longer than its starvation bound."""


def workloads(*, rush: bool) -> SearchStrategy[Workload]:
    """Return workloads with a rush, or with mishaps: cancelled requests, paused readers, failing
    steps.
    """
    from hypothesis import strategies as st

    steps = st.sampled_from([None, None, None, None, 0, 1, 3, 9])
    targets = st.sampled_from([None, None, 0.01, 0.1, 1.0])

    hints = st.builds(
        SchedulingHints,
        tenant=st.sampled_from([None, *TENANTS]),
        priority=st.sampled_from([0, 0, 1, -1, MAX_PRIORITY, MIN_PRIORITY]),
        ttft_target_seconds=targets,
        tpot_target_seconds=targets,
        session_id=st.sampled_from([None, *SESSIONS]),
        predicted_output_tokens=st.none() | st.integers(1, 2 * MAX_ANSWER_TOKENS),
        metadata=st.dictionaries(
            st.sampled_from(METADATA_KEYS), st.sampled_from(METADATA_VALUES)
        ).map(MappingProxyType),
    )

    def requests(after_steps: SearchStrategy[int | None]) -> SearchStrategy[DrawnRequest]:
        return st.builds(
            DrawnRequest,
            gap_steps=st.sampled_from([0, 0, 0, 1, 2, 8]),
            family=st.integers(0, 2),
            shared_tokens=st.integers(0, MAX_PROMPT_TOKENS // 2),
            own_tokens=st.integers(1, MAX_PROMPT_TOKENS // 2),
            max_tokens=st.integers(1, MAX_ANSWER_TOKENS),
            num_samples=st.sampled_from([1, 1, 1, 2]),
            hints=hints,
            leaves_after_steps=after_steps,
            pauses_after_steps=after_steps,
            max_draft_tokens=st.sampled_from([0, 0, 0, 1, 5]),
        )

    some = requests(st.none() if rush else steps)
    few = st.lists(some, min_size=1, max_size=4 if rush else 12)
    return st.builds(
        Workload,
        requests=few if rush else few | st.lists(some, min_size=12, max_size=40),
        page_size=st.sampled_from([1, 4, 16]),
        spare_pages=st.sampled_from([0, 0, 2, 8, 24]),
        max_num_seqs=st.integers(2, 5),
        max_num_batched_tokens=st.sampled_from([32, 64] if rush else [1, 8, 32, 64]),
        output_reserve_tokens=st.sampled_from([0, 8]),
        prefix_caching=st.booleans(),
        overlap=st.booleans(),
        num_host_pages=st.sampled_from([0, 0, 4, 64]),
        preemption=st.sampled_from(get_args(Preemption)),
        failing_steps=st.just(frozenset[int]())
        if rush
        else st.frozensets(st.integers(0, 40), max_size=2),
        rush=st.builds(Rush, st.lists(some, min_size=1, max_size=3), st.sampled_from([2, 8, 80]))
        if rush
        else st.none(),
    )
