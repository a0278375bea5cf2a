"""Steps passed at once equal the steps taken one by one. Records, counts, times and what a policy
sees are the same to the last digit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import (
    Refusal,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    StepBudget,
    TokenShare,
)
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ExpertsShape, ModelShape, read_model
from aioserve.kv.eviction import Eviction, EvictionStrategy, PageUse
from aioserve.plugins import PluginRegistry
from aioserve.simulation import fast_forward
from aioserve.simulation.cost import CostTable, HostTimes
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.simulation.timeline import Timeline
from aioserve.steps.plan import StepPlan
from aioserve.traces.trace_request import TraceRequest

ROOFLINE = RooflineCost(ModelShape.of(read_model("llama-3-8b")), hardware_preset("h100"))
EXPERTS = ExpertsShape(num_layers=30, num_experts=64, experts_per_token=6, expert_params=10**7)
MIXTURE = RooflineCost(
    msgspec.structs.replace(ROOFLINE.model, experts=(EXPERTS,)), ROOFLINE.hardware
)
WITH_WINDOWS = RooflineCost(
    msgspec.structs.replace(ROOFLINE.model, windows=(9,) * 31), ROOFLINE.hardware
)
TABLE = CostTable(
    [0, 64, 512],
    [0, 4, 16],
    [[0.01, 0.0123, 0.02], [0.03, 0.041, 0.043], [0.05, 0.06, 0.0777]],
    seconds_per_context_token=1.37e-6,
    seconds_per_attended_pair=1.1e-9,
    step_noise=[[[0.5, 0.9, 1.6]] * 3] * 3,
    max_context_tokens=400,
    noise_order=[0, 40, 255, 200, 90, 91, 3],
    host=HostTimes(0.0031, 0.0017, 0.0013, 0.0011),
)


class Told(SchedulingPolicy):
    """First come, first served, and notes everything that it can see when it is asked about
    prompts and victims, and told of ends. It isn't asked who starts."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        self._note(f"chunk {budget_tokens}", view)
        return budget_tokens

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        self._note(f"victim {need_pages}", view)
        return super().victim(running, need_pages, view)

    def finished(self, requests: Sequence[RequestView]) -> None:
        self.seen.append([self._shown(request) for request in requests])

    def _note(self, what: str, view: SchedulerView) -> None:
        self.seen.append(
            (
                what,
                [getattr(view, name) for name in view.__struct_fields__ if name != "_source"],
                view.last_steps,
                view.estimate(10, 3, 100),
                view.pages_reserved,
                [self._shown(request) for request in (*view.running, *view.waiting)],
            )
        )

    def _shown(self, request: RequestView) -> list[Any]:
        names = [name for name in vars(type(request)) if name[0] != "_"]
        return [getattr(request, name) for name in names if name != "prefix_key"]


class ToldOfAll(Told):
    """Policy that is told of arrivals too."""

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self.seen.append([self._shown(request) for request in requests])


class Watching(ToldOfAll):
    """Policy that is asked who starts, too."""

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        self._note("order", view)
        return waiting


class Preferring(Watching):
    """Requests of a higher priority go before others, and displace them."""

    def precedence(self, request: RequestView) -> int:
        return request.priority


class Hearing(Watching):
    """Hears of each step, and looks at the requests meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[RequestView, None] = {}

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self.live.update(dict.fromkeys(requests))

    def finished(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            del self.live[request]

    def step_finished(self, step: int, tokens: int) -> None:
        self.seen.append((step, tokens, [self._shown(request) for request in self.live]))


class Wishing(Watching):
    """Preempts somebody in every eleventh step."""

    def preempt(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return running[:1] if view.step % 11 == 0 else ()


class Choosing(Watching):
    """One after the other sits a step out."""

    def decode(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        out = view.step % (len(running) + 2)
        return [request for place, request in enumerate(running) if place != out]


class Sharing(Watching):
    """Keeps a token for those of even numbers, and leaves one for all others."""

    def begin_step(self, view: SchedulerView) -> StepBudget:
        self._note("begin_step", view)
        even = [r for r in (*view.running, *view.waiting) if r.arrival_index % 2 == 0]
        return StepBudget([TokenShare(even, view.max_num_batched_tokens - 1)])


class HearingThroughAnAttribute(Watching):
    def __init__(self) -> None:
        super().__init__()
        self.step_finished = lambda step, tokens: self.seen.append((step, tokens))


class Dropping(Watching):
    """Ends answers that get long."""

    def drop(self, request: RequestView, view: SchedulerView) -> Refusal | None:
        return Refusal("long") if request.generated_tokens > 30 else None


class Keeping(Watching):
    """Pins what has ended and reserves a page for each that runs."""

    def pin(self, request: RequestView) -> int:
        return request.computed_tokens

    def reserve(self, request: RequestView, view: SchedulerView) -> int:
        return min(view.num_running, view.pages_total)


class Reserving(Watching):
    """Asked when a request could start, and no more."""

    def reserve(self, request: RequestView, view: SchedulerView) -> int:
        self._note("reserve", view)
        return min(view.num_running, view.pages_total)


class OrderingThroughAnAttribute(Told):
    """The last come first."""

    def __init__(self) -> None:
        super().__init__()
        vars(self)["order"] = lambda waiting, view: waiting[::-1]


POLICIES = [
    SchedulingPolicy,
    Told,
    ToldOfAll,
    OrderingThroughAnAttribute,
    Watching,
    Preferring,
    Sharing,
    Hearing,
    HearingThroughAnAttribute,
    Wishing,
    Choosing,
    Dropping,
    Keeping,
    Reserving,
]


class LongestInUse:
    """Counts the ticks from the first to the last."""

    def key(self, use: PageUse) -> float:
        return use.created_tick - use.last_used_tick


class EveryThirdTick:
    """One tick more or less changes whose pages go first."""

    def key(self, use: PageUse) -> float:
        return use.last_used_tick % 3


@pytest.mark.parametrize("strategy", [LongestInUse(), EveryThirdTick()])
def test_under_a_strategy_that_counts_ticks_no_digit_differs(strategy: EvictionStrategy) -> None:
    trace = [
        TraceRequest(number, number * 0.2, 20 + 7 * number % 30, 60, (number % 3,), 4)
        for number in range(30)
    ]
    options = {"cost": TABLE, "num_pages": 60, "page_size": 4, "max_num_seqs": 4}
    fast, slow = both(trace, make=SchedulingPolicy, eviction=strategy, **options)
    assert repr(fast) == repr(slow)
    assert fast.tokens_cached


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    for number in range(draw(st.integers(1, 10))):
        blocks = draw(st.integers(0, 4))
        first = draw(st.integers(0, 1)) * 10
        follows = draw(st.none() | st.integers(0, number - 1)) if number else None
        arrival = draw(st.sampled_from([0.0, 0.013, 0.05, 0.3, 1.0]) | st.floats(0, 2))
        if follows is not None:
            arrival = max(arrival, requests[follows].arrival_seconds)
        requests.append(
            TraceRequest(
                number,
                arrival,
                blocks * 4 + draw(st.integers(1, 9)),
                draw(st.integers(0, 90)),
                tuple(range(first, first + blocks)),
                4,
                tenant=draw(st.sampled_from(["", "a", "b"])),
                session=draw(st.sampled_from(["", "s"])),
                priority=draw(st.integers(0, 2)),
                max_tokens=draw(st.sampled_from([None, None, 1, 30])),
                follows=follows,
                think_seconds=draw(st.sampled_from([0.0, 0.1])),
                deadline_seconds=draw(st.none() | st.floats(0.001, 2)),
            )
        )
    return requests


def both(trace: list[TraceRequest], **options: Any) -> tuple[SimulationResult, SimulationResult]:
    """Simulate with steps passed at once, and one by one. Both policies must have seen the same."""
    make = options.pop("make", Watching)
    policies = make(), make()
    fast = simulate(trace, policies[0], **options)
    with mock.patch.object(fast_forward, "LEAST_STEPS", math.inf):
        slow = simulate(trace, policies[1], **options)
    seen = [getattr(policy, "seen", None) for policy in policies]
    assert repr(seen[0]) == repr(seen[1])
    return fast, slow


OPTIONS = st.fixed_dictionaries(
    {
        "make": st.sampled_from(POLICIES),
        "cost": st.sampled_from([ROOFLINE, TABLE, MIXTURE, WITH_WINDOWS]),
        "page_size": st.sampled_from([1, 2, 4, 16]),
        "num_pages": st.none() | st.integers(8, 60),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([3, 16, 512]),
        "output_reserve_tokens": st.sampled_from([0, 2, 64]),
        "prefix_caching": st.booleans(),
        "overlap": st.booleans(),
        "closed_loop": st.booleans(),
        "max_tokens": st.none() | st.integers(1, 40),
    }
)


@settings(deadline=None)
@given(
    trace=traces(),
    options=OPTIONS,
    seed=st.none() | st.integers(0, 9),
    host_pages=st.integers(0, 20),
    eviction=st.sampled_from(["lru", "lfu", "fifo", "slru", LongestInUse(), EveryThirdTick()]),
)
def test_whatever_the_run_no_digit_differs_from_steps_taken_one_by_one(
    trace: list[TraceRequest],
    options: dict[str, Any],
    seed: int | None,
    host_pages: int,
    eviction: Eviction,
) -> None:
    if options["cost"] is TABLE:
        options["noise_seed"] = seed
    if options["num_pages"] is not None and options["prefix_caching"]:
        options["num_host_pages"] = host_pages
        options["eviction"] = eviction
    fast, slow = both(trace, **options)
    assert repr(fast) == repr(slow)
    assert msgspec.json.encode(fast) == msgspec.json.encode(slow)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(8, 50), st.integers(1, 120), st.booleans()), min_size=3),
    st.integers(12, 40),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0, 6, 64]),
    st.none() | st.integers(1, 60),
    st.sampled_from([SchedulingPolicy, Told]),
    st.booleans(),
)
def test_steps_in_which_the_next_one_finds_no_pages_are_passed_without_a_difference(
    lengths: list[tuple[int, int, bool]],
    num_pages: int,
    page_size: int,
    output_reserve_tokens: int,
    max_tokens: int | None,
    make: type[SchedulingPolicy],
    prefix_caching: bool,
) -> None:
    trace = [
        TraceRequest(number, 0.001 * number, prompt, output, (0, 1) if shares else (), 4)
        for number, (prompt, output, shares) in enumerate(lengths)
    ]
    fast, slow = both(
        trace,
        make=make,
        cost=ROOFLINE,
        num_pages=num_pages * max(1, 4 // page_size),
        page_size=page_size,
        output_reserve_tokens=output_reserve_tokens,
        max_tokens=max_tokens,
        prefix_caching=prefix_caching,
    )
    assert repr(fast) == repr(slow)


@pytest.mark.parametrize("name", sorted(PluginRegistry().policies))
@pytest.mark.parametrize("num_pages", [None, 90])
def test_under_every_installed_policy_no_digit_differs(name: str, num_pages: int | None) -> None:
    trace = [
        TraceRequest(
            number,
            number * 0.031 + number % 7 / 3,
            5 + number * 7 % 60,
            1 + number * 13 % 90,
            tuple(range(number % 3)),
            4,
            tenant="abc"[number % 3],
            priority=number % 2,
            ttft_target_seconds=1.0,
            tpot_target_seconds=0.1,
            deadline_seconds=3.0 if number % 5 == 4 else None,
        )
        for number in range(40)
    ]
    fast, slow = both(
        trace,
        make=lambda: PluginRegistry().policy(name),
        cost=TABLE,
        noise_seed=1,
        page_size=4,
        num_pages=num_pages,
        max_num_seqs=9,
    )
    assert repr(fast) == repr(slow)


@pytest.mark.parametrize("make", POLICIES)
def test_under_no_kind_of_policy_a_digit_differs(make: type[Watching]) -> None:
    trace = [
        TraceRequest(number, number // 3 * 0.4, 20, 60, (number % 2,), 4, priority=number % 2)
        for number in range(9)
    ]
    options = {"cost": TABLE, "num_pages": 50, "page_size": 4, "max_num_seqs": 4}
    fast, slow = both(trace, make=make, **options)
    assert repr(fast) == repr(slow)


def test_pages_that_come_back_in_the_course_of_it_are_held_until_then() -> None:
    trace = [
        TraceRequest(number, 0.001 * number, 8, output, (), 4)
        for number, output in enumerate([1, 5, 8])
    ]
    fast, slow = both(
        trace,
        make=SchedulingPolicy,
        cost=ROOFLINE,
        num_pages=48,
        page_size=1,
        output_reserve_tokens=0,
        prefix_caching=False,
    )
    assert fast.pages_held_max == slow.pages_held_max == 27


@pytest.mark.parametrize(
    ("lengths", "num_pages", "page_size"),
    [([(2, 3), (3, 2)], 5, 2), ([(5, 2), (2, 6)], 5, 2), ([(11, 3), (3, 2)], 5, 4)],
)
def test_a_step_has_no_page_that_is_evicted_while_the_one_in_flight_may_touch_it(
    lengths: list[tuple[int, int]], num_pages: int, page_size: int
) -> None:
    trace = [
        TraceRequest(number, 0.001 * number, prompt, output, (), 4)
        for number, (prompt, output) in enumerate(lengths)
    ]
    fast, slow = both(
        trace,
        make=SchedulingPolicy,
        cost=ROOFLINE,
        num_pages=num_pages,
        page_size=page_size,
        output_reserve_tokens=0,
    )
    assert repr(fast) == repr(slow)


@pytest.mark.parametrize(
    ("lengths", "num_pages", "page_size"),
    [([(2, 7), (9, 11), (10, 5)], 13, 2), ([(6, 12), (6, 3), (13, 13)], 8, 4)],
)
def test_the_first_step_evicts_although_pages_come_back_behind_it(
    lengths: list[tuple[int, int]], num_pages: int, page_size: int
) -> None:
    trace = [
        TraceRequest(number, 0.001 * number, prompt, output, (), 4)
        for number, (prompt, output) in enumerate(lengths)
    ]
    fast, slow = both(
        trace,
        make=Told,
        cost=ROOFLINE,
        num_pages=num_pages,
        page_size=page_size,
        output_reserve_tokens=0,
    )
    assert repr(fast) == repr(slow)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_evict_to_the_host_take_the_time_of_their_copies(overlap: bool) -> None:
    # What the first one leaves goes to the host while the second one decodes, alone.
    trace = [TraceRequest(0, 0.0, 20, 10, (), 4), TraceRequest(1, 1.0, 20, 60, (), 4)]
    fast, slow = both(
        trace,
        make=SchedulingPolicy,
        cost=ROOFLINE,
        num_pages=24,
        page_size=4,
        num_host_pages=20,
        overlap=overlap,
    )
    assert repr(fast) == repr(slow)
    assert fast.pages_swapped_out


def test_steps_are_passed_that_evict_what_no_step_in_flight_touches() -> None:
    trace = [TraceRequest(number, 0.0, 32, 20 + 10 * number, (), 16) for number in range(8)]
    cost = RooflineCost(ROOFLINE.model, ROOFLINE.hardware)
    with mock.patch.object(cost, "step_seconds", wraps=cost.step_seconds) as asked:
        simulate(trace, SchedulingPolicy(), cost=cost, num_pages=300, page_size=1, max_num_seqs=3)
    assert asked.call_count < 10


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("toward", [0.0, math.nan, math.inf])
def test_one_that_comes_when_a_step_ends_is_there_for_the_next(
    overlap: bool, toward: float
) -> None:
    first = TraceRequest(0, 0.0, 20, 50, (), 16)
    options: dict[str, Any] = {"cost": ROOFLINE, "num_pages": None, "overlap": overlap}
    timeline = Timeline()
    simulate([first], SchedulingPolicy(), timeline=timeline, **options)
    end = timeline.steps[20].ended_seconds
    arrival = end if math.isnan(toward) else math.nextafter(end, toward)
    fast, slow = both([first, TraceRequest(1, arrival, 20, 50, (), 16)], **options)
    assert repr(fast) == repr(slow)


class Counting(RooflineCost):
    """Cost whose own `step_seconds` must be asked."""

    asked = 0

    def step_seconds(self, plan: StepPlan) -> float:
        self.asked += 1
        return 2 * super().step_seconds(plan)


def test_steps_are_passed_at_once_where_nothing_else_happens() -> None:
    trace = [TraceRequest(number, 0.0, 20, 500, (), 16) for number in range(4)]
    with mock.patch.object(fast_forward, "decode_pass", wraps=fast_forward.decode_pass) as asked:
        result = simulate(trace, SchedulingPolicy(), cost=ROOFLINE, num_pages=None)
    assert result.steps > 500
    assert asked.call_count < 20


def test_steps_are_passed_at_once_while_the_next_one_waits_for_pages() -> None:
    trace = [TraceRequest(number, 0.0, 20, 300, (), 16) for number in range(3)]
    with mock.patch.object(fast_forward, "decode_pass", wraps=fast_forward.decode_pass) as asked:
        result = simulate(
            trace,
            SchedulingPolicy(),
            cost=ROOFLINE,
            num_pages=45,
            output_reserve_tokens=320,
        )
    assert result.steps > 500
    assert asked.call_count < 30


@pytest.mark.parametrize("output", [1, 2, 60])
def test_an_answer_begins_and_ends_in_steps_that_are_passed(output: int) -> None:
    trace = [TraceRequest(0, 0.0, 20, output, (), 16)]
    cost = RooflineCost(ROOFLINE.model, ROOFLINE.hardware)
    with mock.patch.object(cost, "step_seconds", wraps=cost.step_seconds) as asked:
        result = simulate(trace, SchedulingPolicy(), cost=cost, num_pages=None)
    assert result.steps == output + 1
    assert asked.call_count == 1


def test_a_cost_model_of_ones_own_is_asked_about_each_step() -> None:
    cost = Counting(ROOFLINE.model, ROOFLINE.hardware)
    trace = [TraceRequest(number, 0.0, 20, 50, (), 16) for number in range(4)]
    result = simulate(trace, SchedulingPolicy(), cost=cost, num_pages=None)
    assert cost.asked == result.steps


def test_a_timeline_has_each_step() -> None:
    trace = [TraceRequest(number, 0.0, 20, 50, (), 16) for number in range(4)]
    timeline = Timeline()
    result = simulate(trace, SchedulingPolicy(), cost=ROOFLINE, num_pages=None, timeline=timeline)
    assert len(timeline) == result.steps
    assert repr(simulate(trace, SchedulingPolicy(), cost=ROOFLINE, num_pages=None)) == repr(result)
