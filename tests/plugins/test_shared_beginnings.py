"""Policy `round_robin`: which prompts wait for pages that another computes, and that no hits are
lost."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import RequestView, SchedulingPolicy
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.simulation.metrics import metrics_of
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.traces.formats import read_trace
from aioserve.traces.trace_request import TraceRequest, at_rate
from aioserve_plugins._shared_beginnings import COMPARISONS, SharedBeginnings
from aioserve_plugins.round_robin import RoundRobin
from tests import made_up_traces

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
PAGE = 2


class Prompt:
    """The part of a request that comparisons need. It finds what others have computed."""

    def __init__(self, ids: list[int], computed: int = 0) -> None:
        self.ids, self.computed_tokens = ids, computed
        self.prompt_tokens, self.generated_tokens = len(ids), 0
        self.preemptions = 0
        self.computing: list[Prompt] = []
        self.num_keys = 0
        self.num_looks = 0

    @property
    def computed_tokens(self) -> int:
        self.num_looks += 1
        return self._computed

    @computed_tokens.setter
    def computed_tokens(self, count: int) -> None:
        self._computed = count

    @property
    def cached_tokens(self) -> int:
        return max((self.common_pages(other) for other in self.computing), default=0)

    def common_pages(self, other: Prompt) -> int:
        """Pages that this one would find if the other one was computed."""
        pairs = zip(self.ids[:-1], other.ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) // PAGE

    def prefix_key(self, num_tokens: int) -> bytes:
        self.num_keys += 1
        return bytes(self.ids[:num_tokens])


ids = st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, 1]), min_size=1, max_size=24)


@given(
    st.lists(st.tuples(ids, st.integers(0, 24)), min_size=1, max_size=4),
    st.lists(ids, min_size=1, max_size=6),
)
def test_a_prompt_waits_exactly_while_its_next_page_is_to_be_computed_for_another(
    computing: list[tuple[list[int], int]], waiting: list[list[int]]
) -> None:
    others = [Prompt(prompt, min(done, len(prompt))) for prompt, done in computing]
    beginnings = SharedBeginnings()
    mine = [Prompt(prompt) for prompt in waiting]
    for one in mine:
        one.computing = others
    for _ in range(3):
        beginnings.begin(cast("Any", others), PAGE)
        for one in mine:
            expected = any(o.computed_tokens // PAGE < one.common_pages(o) for o in others)
            assert beginnings.has_next_of(cast("RequestView", one)) == expected
        for other in others:
            other.computed_tokens = min(len(other.ids), other.computed_tokens + 3)


EVENTS = "starts", "begins again", "stops", "ends"


@given(
    st.lists(ids, min_size=1, max_size=5),
    st.lists(ids, min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 4)), max_size=9),
)
def test_who_waits_is_known_while_others_start_are_preempted_and_end(
    others: list[list[int]], waiting: list[list[int]], happens: list[tuple[str, int]]
) -> None:
    """Changes happen between two steps. In the middle of a step, the beginnings hear only of
    starts."""
    prompts, mine = [Prompt(prompt) for prompt in others], [Prompt(prompt) for prompt in waiting]
    computing: list[Prompt] = []
    beginnings = SharedBeginnings()
    for one in mine:
        one.computing = computing
    for what, number in happens:
        other = prompts[number % len(prompts)]
        beginnings.begin(cast("Any", computing), PAGE)
        if what == "starts" and other not in computing:
            computing.append(other)
            beginnings.add(cast("RequestView", other))
        for one in mine:
            expected = any(o.computed_tokens // PAGE < one.common_pages(o) for o in computing)
            assert beginnings.has_next_of(cast("RequestView", one)) == expected
        for one in computing:
            one.computed_tokens = min(len(one.ids), one.computed_tokens + 3)
        if what != "starts" and other in computing:
            other.preemptions += 1
            other.computed_tokens = 0
            if what != "begins again":
                computing.remove(other)
        if what == "ends":
            beginnings.forget(cast("RequestView", other))
    for one in [*prompts, *mine]:
        beginnings.forget(cast("RequestView", one))
    assert not beginnings._alike


def test_each_pair_gets_its_turn_once() -> None:
    num_common, num_own = 5 * PAGE, 60
    others = [Prompt([7] * num_common + [number] * num_own, num_common) for number in range(30)]
    waiting = [Prompt([7] * num_common + [100 + number] * num_own) for number in range(40)]
    beginnings = SharedBeginnings()
    for one in waiting:
        one.computing = others
    looks: list[int] = []
    for _ in range(300):
        before = sum(other.num_looks for other in others)
        beginnings.begin(cast("Any", others), PAGE)
        waits = [beginnings.has_next_of(cast("RequestView", one)) for one in waiting]
        looks.append(sum(other.num_looks for other in others) - before)
    assert not any(waits)
    assert looks[-1] == 0
    assert sum(looks) < 2 * len(waiting) * (len(others) + len(looks))


def test_a_step_has_its_number_of_comparisons_and_who_is_not_compared_yet_waits() -> None:
    other = Prompt([7] * 400, computed=2)
    waiting = [Prompt([7] * (20 + number) + [8] * 380) for number in range(40)]
    for one in waiting:
        one.computing = [other]
    beginnings = SharedBeginnings()
    for _ in range(20):
        before = sum(one.num_keys for one in waiting)
        beginnings.begin(cast("Any", [other]), PAGE)
        assert all(beginnings.has_next_of(cast("RequestView", one)) for one in waiting)
        assert sum(one.num_keys for one in waiting) - before <= COMPARISONS + len(waiting)
    other.computed_tokens = 40
    for _ in range(10):
        beginnings.begin(cast("Any", [other]), PAGE)
        waits = [beginnings.has_next_of(cast("RequestView", one)) for one in waiting]
    assert waits == [one.common_pages(other) > 20 for one in waiting]


def test_nothing_of_a_request_is_kept_when_it_has_ended() -> None:
    other, mine = Prompt([1, 2, 3, 4], computed=2), Prompt([1, 2, 3, 4, 5])
    mine.computing = [other]
    beginnings = SharedBeginnings()
    beginnings.begin(cast("Any", [other]), PAGE)
    assert beginnings.has_next_of(cast("RequestView", mine))
    for one in (mine, other):
        beginnings.forget(cast("RequestView", one))
    assert not beginnings._first_pages
    assert not beginnings._computing
    assert not beginnings._alike
    assert not beginnings._watches


def share_found(requests: list[TraceRequest], policy: SchedulingPolicy, **options: Any) -> float:
    shape = ModelShape.of(read_model("llama-3-8b"))
    cost = RooflineCost(shape, hardware_preset("h100").times(4))
    share = metrics_of(simulate(requests, policy, cost=cost, **options)).block_hit_share
    assert share is not None
    return share


def check_that_no_hits_are_lost(requests: list[TraceRequest], **options: Any) -> None:
    plain = share_found(requests, SchedulingPolicy(), **options)
    assert share_found(requests, RoundRobin(), **options) >= 0.98 * plain
    assert share_found(requests, RoundRobin(patience=0), **options) < 0.8 * plain


def test_round_robin_finds_what_fcfs_finds_of_made_up_agents(tmp_path: Path) -> None:
    requests = at_rate(read_trace(made_up_traces.agentic(tmp_path)), 1e5)
    check_that_no_hits_are_lost(requests, num_pages=20_000)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")
def test_round_robin_finds_what_fcfs_finds_of_recorded_agents() -> None:
    requests = read_trace(TRACES / "agentic_coding.jsonl.gz")
    sessions = sorted({request.session for request in requests})
    mine = [request for request in requests if request.session in sessions[:7]]
    check_that_no_hits_are_lost(at_rate(mine, 8.0), num_pages=150_000)
