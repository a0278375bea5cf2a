"""Runs a trace through the real scheduler and KV memory on a virtual clock.

Nothing is computed: a cost model says how long a step takes. What is planned, found in the cache,
evicted and preempted is what the engine would do; with overlap, a step is planned while the one
before it runs. The same input gives the same result.

An answer ends where the trace says, with an end-of-sequence token, and nobody knows before: neither
policies nor the memory's reserve. `max_tokens` is what the caller asked for, as in the engine.

A trace has prompts without answers' text, so an answer is made of its request's own token and is
never a prefix of another prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import msgspec

from aioserve.config import MAX_BATCHED_TOKENS, MAX_COUNT, MAX_SEQS
from aioserve.errors import ConfigError, InvariantError, TraceError
from aioserve.execution.plan import StepOutcome, StepPlan
from aioserve.isolation import shown
from aioserve.kv.eviction import Eviction, EvictionStrategy, GuardedStrategy
from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import PagePool
from aioserve.kv.pages import capacity_tokens, pages_for
from aioserve.kv.prefix_tree import EVICTION_STRATEGIES
from aioserve.request import FinishReason, Request, SamplingParams
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.simulation.cost import CostModel
from aioserve.simulation.fairness import ServiceGap
from aioserve.simulation.timeline import Timeline
from aioserve.traces.checks import check_int, check_number, named
from aioserve.traces.request import END_TOKEN, MAX_REQUESTS, TraceRequest, check_request

__all__ = ["Ending", "RequestRecord", "SimulationResult", "simulate"]

END_IDS = frozenset({END_TOKEN})
GREEDY = SamplingParams(temperature=0.0)
LEAST_UNBOUNDED_PAGES = 1 << 16

MAX_PAGES = 1 << 25
"""Of which each takes 17 bytes, and 4 for each token of it that is cached."""
MAX_TOKENS_AT_ONCE = 1 << 29
"""In prompts of requests that wait or run: 2 GiB."""
MAX_TARGET_SECONDS = 1e9
MAX_CLOCK_SECONDS = 1e15
LIMITS = {
    "num_pages": (1, MAX_PAGES),
    "page_size": (1, 1 << 16),
    "max_num_seqs": (1, MAX_SEQS),
    "max_num_batched_tokens": (1, MAX_BATCHED_TOKENS),
    "output_reserve_tokens": (0, MAX_COUNT),
    "max_tokens": (1, MAX_COUNT),
}
MAY_BE_NONE = ("num_pages", "max_tokens")


class Ending(Enum):
    """How a simulated request ended."""

    FINISHED = "finished"
    """Its answer is as long as in the trace."""
    CUT_SHORT = "cut short"
    """Its answer was as long as `max_tokens` or the KV memory allows before it was at its end."""
    REFUSED = "refused"
    """The policy answered NEVER."""
    TOO_LONG = "too long"
    """The prompt and one more token don't fit the KV memory: the engine refuses such a request at
    once."""


class RequestRecord(msgspec.Struct, gc=False):
    """What became of one request; times in seconds on the trace's clock."""

    request: TraceRequest
    ending: Ending | None = None
    """None until it has ended."""
    output_tokens: int = 0
    started_seconds: float | None = None
    """When its first step began."""
    first_token_seconds: float | None = None
    end_seconds: float | None = None
    wait_tokens: int | None = None
    """Tokens that steps computed for others between its arrival and its first step, or until the
    policy refused it."""
    cached_tokens: int = 0
    """Leading tokens that were in the cache when its first step began."""


class SimulationResult(msgspec.Struct, frozen=True):
    """Every request's record, in order of arrival, and what was counted over the whole run."""

    requests: tuple[RequestRecord, ...]
    page_size: int
    num_pages: int
    """Where `unbounded`, as many as could ever be needed."""
    seconds: float
    """From the first arrival until the last request has ended and the last step is done."""
    busy_seconds: float
    """Of those, in steps."""
    steps: int
    tokens_computed: int
    """Included are those of preempted requests computed again, and the one that a step with overlap
    computes of an answer before its end is known."""
    tokens_prefilled: int
    tokens_cached: int
    """Prompt tokens found in the cache, those of preempted requests that began again included."""
    preemptions: int
    policy_faults: int
    """Steps that first come, first served decided, since the policy raised or answered nonsense."""
    pages_held_mean: float
    """Pages that requests hold, over the time of steps; what the cache alone holds is left out."""
    pages_held_max: int
    service_gap_tokens: int | None
    """Most by which the tokens computed for one client ran ahead of another's while both had
    requests waiting all the time (Sheng et al., "Fairness in Serving LLMs", OSDI 2024); None where
    the trace has fewer than two clients."""
    unbounded: bool = False
    """Memory had no limit."""


def simulate(
    trace: Sequence[TraceRequest],
    policy: SchedulingPolicy,
    *,
    cost: CostModel,
    num_pages: int | None,
    page_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    output_reserve_tokens: int = 64,
    max_tokens: int | None = None,
    prefix_caching: bool = True,
    eviction: Eviction = "lru",
    overlap: bool = True,
    ttft_target_seconds: float | None = None,
    tpot_target_seconds: float | None = None,
    timeline: Timeline | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Run `trace` to its end under a fresh `policy`.

    Options are those of `Engine`, but `eviction` is the name of a native strategy or an object;
    `num_pages=None` is memory without a limit. `max_tokens` is the callers' limit for answers where
    the trace has none; None: as many as the KV memory holds. Each request has its client as its
    tenant, its priority, and the targets as its own, for the policy to see. An answer has at least
    one token, whatever the trace says. `timeline`, an empty one, takes down every step.
    `on_progress(done, total)` is told of requests that have ended, at most once a step. Raises
    `ConfigError` for options that make no sense or need more memory than is reasonable, and
    `TraceError` for a request that is none.
    """
    _check_counts(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        output_reserve_tokens=output_reserve_tokens,
        max_tokens=max_tokens,
    )
    targets = (ttft_target_seconds, tpot_target_seconds)
    _check_targets(*targets)
    _check_objects(policy, cost, timeline, on_progress)
    _check_eviction(eviction, prefix_caching, num_pages)
    if type(overlap) is not bool:
        raise ConfigError(f"overlap must be a bool, got {shown(overlap)}")
    ordered = _ordered(trace)
    needed = None if num_pages is not None else _pages_needed(ordered, page_size)
    pool = PagePool(num_pages or _large(needed or 1), page_size)
    scheduler = Scheduler(
        KVMemory(pool, prefix_caching=prefix_caching, eviction=eviction),
        policy,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        output_reserve_tokens=output_reserve_tokens,
    )
    run = _Run(ordered, scheduler, cost, overlap, max_tokens, targets, timeline, on_progress)
    return run.result(needed)


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None or name not in MAY_BE_NONE:
            check_int(name, value, *LIMITS[name])


def _check_targets(ttft_target_seconds: float | None, tpot_target_seconds: float | None) -> None:
    if ttft_target_seconds is not None:
        check_number("ttft_target_seconds", ttft_target_seconds, MAX_TARGET_SECONDS)
    if tpot_target_seconds is not None:
        check_number("tpot_target_seconds", tpot_target_seconds, MAX_TARGET_SECONDS)


def _check_objects(policy: Any, cost: Any, timeline: Any, on_progress: Any) -> None:
    with named("simulate"):
        if not isinstance(policy, SchedulingPolicy):
            raise ConfigError(f"policy must be a SchedulingPolicy, got {shown(policy)}")
        if isinstance(cost, type) or not callable(getattr(cost, "step_seconds", None)):
            raise ConfigError(f"cost must have a method step_seconds, got {shown(cost)}")
        if timeline is not None and (not isinstance(timeline, Timeline) or len(timeline)):
            raise ConfigError(f"timeline must be an empty Timeline, got {shown(timeline)}")
        if on_progress is not None and not callable(on_progress):
            raise ConfigError(f"on_progress must be callable, got {shown(on_progress)}")


def _check_eviction(eviction: Any, prefix_caching: Any, num_pages: int | None) -> None:
    """Raise for what is none, and for one that has nothing to decide."""
    if type(prefix_caching) is not bool:
        raise ConfigError(f"prefix_caching must be a bool, got {shown(prefix_caching)}")
    with named("eviction"):
        if type(eviction) is str:
            if eviction not in EVICTION_STRATEGIES:
                known = ", ".join(EVICTION_STRATEGIES)
                raise ConfigError(f"eviction must be one of {known}, got {shown(eviction)}")
        elif isinstance(eviction, type | str) or not isinstance(
            eviction, GuardedStrategy | EvictionStrategy
        ):
            raise ConfigError(
                f"eviction must be a name or have a method key, got {shown(eviction)}"
            )
    if eviction == "lru":
        return
    idle = "without a limit of pages: none is ever evicted" if num_pages is None else None
    if not prefix_caching:
        idle = "with prefix_caching=False: no page is cached"
    if idle is not None:
        name = eviction.label if isinstance(eviction, GuardedStrategy) else shown(eviction)
        raise ConfigError(f"eviction={name} has no effect {idle}, so leave one of them out")


def _ordered(trace: Iterable[TraceRequest]) -> list[TraceRequest]:
    """By arrival. Raises `TraceError` for what is no trace."""
    numbers: set[int] = set()
    ordered: list[TraceRequest] = []
    with named("trace", TraceError):
        for request in trace:
            place = f"trace[{len(ordered)}]"
            if len(ordered) == MAX_REQUESTS:
                raise TraceError(f"a trace may have at most {MAX_REQUESTS:,} requests")
            check_request(place, request)
            # What is of a request alone is made of its number.
            if request.number in numbers:
                raise TraceError(f"{place}: another request has the number {request.number}")
            numbers.add(request.number)
            ordered.append(request)
    return sorted(ordered, key=attrgetter("arrival_seconds"))


def _pages_needed(trace: list[TraceRequest], page_size: int) -> int:
    """As many as could ever be needed."""
    needed = 1 + sum(pages_for(_recorded_length(request), page_size) for request in trace)
    if needed > MAX_PAGES:
        raise ConfigError(
            f"num_pages=None: without a limit the trace could need {needed} pages of {page_size} "
            f"tokens, and at most {MAX_PAGES} can be simulated: give a limit, or larger pages"
        )
    return needed


def _large(needed: int) -> int:
    """Pages of a pool that is large enough. Policies see how large the pool is, so it is of a round
    number of pages, which tells no more of the answers than their order of magnitude."""
    return max(LEAST_UNBOUNDED_PAGES, 1 << (needed - 1).bit_length())


class _Run:
    """One trace on its way through one scheduler."""

    def __init__(
        self,
        ordered: list[TraceRequest],
        scheduler: Scheduler,
        cost: CostModel,
        overlap: bool,
        max_tokens: int | None,
        targets: tuple[float | None, float | None],
        timeline: Timeline | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.max_tokens = max_tokens
        self.ttft_target_seconds, self.tpot_target_seconds = targets
        self.timeline = timeline
        self.on_progress = on_progress
        self.records = [RequestRecord(request) for request in ordered]
        self.now = ordered[0].arrival_seconds if ordered else 0.0
        self.pipeline = StepPipeline(scheduler, self._launch, depth=2 if overlap else 1)
        """Its handles are the times at which steps end."""
        self.last_end = self.now
        """Of the steps launched."""
        self.tokens_before = 0
        """Tokens computed by the steps before the one that is being planned."""
        self.arrived = 0
        self.ended = 0
        self.prompt_tokens = 0
        """Of the requests that wait and run."""
        self.active: dict[int, RequestRecord] = {}
        """Those submitted and not yet ended, by sequence id."""
        self.submitted_at_tokens: dict[int, int] = {}
        """Of those that haven't started: tokens computed before they arrived."""
        self.own_tokens: dict[int, int] = {}
        """What the answer of each sequence is made of."""
        self.end_positions: dict[int, int] = {}
        """Of the token that ends each sequence's answer."""
        self.clients: dict[int, str] = {}
        """Who sent each sequence."""
        self.waiting = Counter[str]()
        """Requests of each client that haven't started; those without any are left out."""
        self.busy_seconds = 0.0
        self.page_seconds = 0.0
        self.pages_held_max = 0
        clients = {request.client for request in ordered}
        self.gap = ServiceGap() if len(clients) > 1 else None

    def result(self, pages_needed: int | None = None) -> SimulationResult:
        """Run to the end. `pages_needed` is that of memory without a limit."""
        began = self.now
        while True:
            self._submit_arrived()
            self.tokens_before = self.scheduler.counters.tokens_processed
            plan = self.pipeline.advance(self.now)
            for update in self.scheduler.take_ended_unplanned():
                if update.cause is not None:
                    raise update.cause
                self._end(update.sequence_id, Ending.REFUSED)
            # As in the engine's loop: it waits for a step when none may be launched beside it.
            if (end := self.pipeline.due) is not None:
                self._finish_step(end)
            elif plan is not None:
                continue
            elif self.arrived < len(self.records):
                self.now = self.records[self.arrived].request.arrival_seconds
            elif not self.active:
                break
            else:
                raise InvariantError(f"{len(self.active)} requests wait, and nothing is planned")
            if self.on_progress is not None:
                self.on_progress(self.ended, len(self.records))
        counters, memory = self.scheduler.counters, self.scheduler.memory
        return SimulationResult(
            tuple(self.records),
            memory.page_size,
            memory.pool.num_pages if pages_needed is None else pages_needed,
            self.now - began,
            self.busy_seconds,
            counters.steps,
            counters.tokens_processed,
            counters.tokens_prefilled,
            counters.tokens_cached,
            counters.preemptions,
            self.scheduler.guard.faults_total,
            # Rounded, the mean of what was always the same may be above it.
            min(self.page_seconds / (self.busy_seconds or 1), self.pages_held_max),
            self.pages_held_max,
            None if self.gap is None else self.gap.most,
            unbounded=pages_needed is not None,
        )

    def _submit_arrived(self) -> None:
        scheduler = self.scheduler
        fits = capacity_tokens(scheduler.memory.pool.num_pages, scheduler.memory.page_size)
        while self.arrived < len(self.records):
            record = self.records[self.arrived]
            request = record.request
            if request.arrival_seconds > self.now:
                return
            self.arrived += 1
            if request.prompt_tokens >= fits:
                record.ending, record.end_seconds = Ending.TOO_LONG, request.arrival_seconds
                self.ended += 1
                continue
            self.prompt_tokens += request.prompt_tokens
            if self.prompt_tokens > MAX_TOKENS_AT_ONCE:
                raise ConfigError(
                    f"trace: {len(self.active) + 1} requests wait or run at {self.now:g} s, with "
                    f"{self.prompt_tokens} tokens in their prompts; they may have at most "
                    f"{MAX_TOKENS_AT_ONCE}: give a lower rate, fewer requests or shorter ones"
                )
            (sequence_id,) = scheduler.submit(
                Request(
                    request_id=str(request.number),
                    prompt_ids=request.prompt_ids(),
                    max_length=self._max_length(request, fits),
                    params=GREEDY,
                    end_ids=END_IDS,
                    arrival_seconds=request.arrival_seconds,
                    namespace=request.session.encode(),
                    tenant=request.client or None,
                    priority=request.priority,
                    ttft_target_seconds=self.ttft_target_seconds,
                    tpot_target_seconds=self.tpot_target_seconds,
                )
            )
            self.active[sequence_id] = record
            self.submitted_at_tokens[sequence_id] = scheduler.counters.tokens_processed
            self.own_tokens[sequence_id] = request.own_token
            self.end_positions[sequence_id] = _recorded_length(request) - 1
            self.clients[sequence_id] = request.client
            self.waiting[request.client] += 1

    def _launch(self, plan: StepPlan) -> float:
        """Start a step when the one before it ends; when it will end itself."""
        started = max(self.now, self.last_end)
        self.last_end = self._end_of(plan, started)
        held = self._count_pages(self.last_end - started)
        if self.timeline is not None:
            self._take_down(self.timeline, plan, started, held)
        not_started = self.submitted_at_tokens
        for item in plan.items if not_started else ():
            if item.sequence_id in not_started:
                record = self.active[item.sequence_id]
                record.started_seconds = started
                record.wait_tokens = self.tokens_before - self._no_longer_waits(item.sequence_id)
                record.cached_tokens = item.start
        if self.gap is not None:
            self._count_service(plan, self.gap)
        return self.last_end

    def _finish_step(self, end: float) -> None:
        self.now = end
        plan, active = self.pipeline.in_flight[0], self.active
        own_tokens, ends = self.own_tokens, self.end_positions
        token_ids = [
            END_TOKEN
            if item.start + row.offset + 1 == ends[item.sequence_id]
            else own_tokens[item.sequence_id]
            for item in plan.items
            for row in item.rows
        ]
        outcome = StepOutcome(step=plan.step, token_ids=tuple(token_ids))
        for progress in self.pipeline.finish(outcome, self.now):
            record = active[progress.sequence_id]
            record.output_tokens += 1
            if record.first_token_seconds is None:
                record.first_token_seconds = self.now
            if progress.finish_reason is not None:
                at_its_end = progress.finish_reason is FinishReason.STOP
                ending = Ending.FINISHED if at_its_end else Ending.CUT_SHORT
                self._end(progress.sequence_id, ending)

    def _max_length(self, request: TraceRequest, fits: int) -> int:
        """Most tokens of prompt and answer, as the engine's intake would say."""
        most = self.max_tokens if request.max_tokens is None else request.max_tokens
        return fits if most is None else min(fits, request.prompt_tokens + most)

    def _end_of(self, plan: StepPlan, started: float) -> float:
        with named("cost: step_seconds"):
            seconds = self.cost.step_seconds(plan)
            if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ConfigError(
                    "cost: a step must take a finite time of more than 0 seconds, got "
                    f"{shown(seconds)}"
                )
            ended = float(started + seconds)
        if not started < ended <= MAX_CLOCK_SECONDS:
            raise ConfigError(
                f"cost: a step that begins at {started:g} s must end later on the clock, and by "
                f"{MAX_CLOCK_SECONDS:g} s, got one of {seconds:g} s"
            )
        return ended

    def _end(self, sequence_id: int, ending: Ending) -> None:
        record = self.active.pop(sequence_id)
        self.prompt_tokens -= record.request.prompt_tokens
        if sequence_id in self.submitted_at_tokens:
            processed = self.scheduler.counters.tokens_processed
            record.wait_tokens = processed - self._no_longer_waits(sequence_id)
        record.ending, record.end_seconds = ending, self.now
        self.ended += 1

    def _no_longer_waits(self, sequence_id: int) -> int:
        """Tokens computed before it arrived."""
        client = self.clients[sequence_id]
        self.waiting[client] -= 1
        if not self.waiting[client]:
            del self.waiting[client]
        return self.submitted_at_tokens.pop(sequence_id)

    def _take_down(self, timeline: Timeline, plan: StepPlan, began: float, held: int) -> None:
        records = [self.active[item.sequence_id] for item in plan.items]
        timeline.add(
            plan,
            requests=[record.request.number for record in records],
            decodes=[
                item.count == 1 and item.start >= record.request.prompt_tokens
                for item, record in zip(plan.items, records, strict=True)
            ],
            preempted=[
                self.active[victim].request.number
                for victim in plan.preempted
                if victim in self.active  # and not refused since
            ],
            began_seconds=began,
            ended_seconds=self.last_end,
            waiting=self.scheduler.num_waiting,
            running=self.scheduler.num_running,
            pages_held=held,
            pages_cached=self.scheduler.memory.num_cached,
        )

    def _count_pages(self, seconds: float) -> int:
        """Count, for a step of so many seconds, the pages that requests hold; how many."""
        memory = self.scheduler.memory
        held = memory.pool.num_pages - memory.num_available
        self.busy_seconds += seconds
        self.page_seconds += held * seconds
        self.pages_held_max = max(self.pages_held_max, held)
        return held

    def _count_service(self, plan: StepPlan, gap: ServiceGap) -> None:
        if len(self.waiting) < 2:
            gap.step((), ())
            return
        clients = self.clients
        tokens = Counter([clients[item.sequence_id] for item in plan.items])
        for item in plan.items:
            if item.count != 1:
                tokens[clients[item.sequence_id]] += item.count - 1
        gap.step(tokens.items(), self.waiting)


def _recorded_length(request: TraceRequest) -> int:
    """Tokens of prompt and answer."""
    return request.prompt_tokens + max(1, request.output_tokens)
