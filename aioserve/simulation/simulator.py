"""Run of a trace through the real scheduler and KV memory on a virtual clock.

Nothing is computed: a cost model says how long a step takes. Planning, cache hits, evictions and
preemptions are those of the engine. With overlap, a step is planned while the one before it runs.
The same input gives the same result.

A completion ends where the trace says, with an end-of-sequence token. Neither policies nor the
memory's reserve know that before. `max_tokens` is what the caller asked for, as in the engine. A
trace has no text of completions. So a completion is made of its request's own token, and is never a
prefix of another prompt.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from types import MappingProxyType

from aioserve.arguments import EMPTY_MAPPING, counted
from aioserve.errors import ConfigError, InvariantError
from aioserve.hints import SchedulingHints
from aioserve.isolation import shown
from aioserve.kv.memory import KVMemory
from aioserve.paging.layout import group_specs
from aioserve.request import FinishReason, Request, SamplingParams
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.simulation.cost import NO_TIME, WAKE_AFTER_SECONDS, TableSteps, steps_of
from aioserve.simulation.fast_forward import MAX_CLOCK_SECONDS, Clock, pass_steps
from aioserve.simulation.gaps import ServiceGap, TokenGaps
from aioserve.simulation.options import (
    SimulationOptions,
    by_name,
    check_options,
    in_order,
    large_pool,
    pages_needed,
)
from aioserve.simulation.records import (
    Arrivals,
    Ending,
    RequestRecord,
    SimulationResult,
    recorded_length,
)
from aioserve.simulation.speculation import SimulatedDrafts
from aioserve.simulation.timeline import Timeline
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import ItemKind, StepPlan
from aioserve.traces.checks import named
from aioserve.traces.trace_request import END_TOKEN, TraceRequest

__all__ = ["simulate"]

END_IDS = frozenset({END_TOKEN})
GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS_AT_ONCE = 1 << 29
"""Most tokens in prompts of requests that wait or run: 2 GiB."""


@by_name(SimulationOptions)
def simulate(
    trace: Sequence[TraceRequest], policy: SchedulingPolicy, options: SimulationOptions
) -> SimulationResult:
    """Run `trace` to its end under a fresh `policy`.

    Options are those of `Engine`, except for these:

    - `eviction` is the name of a native strategy or an object.
    - `num_pages=None` is memory without a limit.
    - `max_tokens` is the callers' limit for completions if the trace has none, and `max_model_len`
      the most tokens of a prompt and its completion. None: as many as the KV memory holds.
    - With `noise_seed`, the steps of a cost table vary as those that it was measured from. The
      noise is drawn from that seed and the steps' numbers. None: each step takes its mean.
    - In a `closed_loop` a request that follows another comes when that one's completion has ended
      and its caller has thought.
    - `timeline`, an empty one, records every step.
    - `on_progress(done, total)` is told of requests that have ended, at most once a step.

    A table's `host` times come before a request's first step and after its tokens. Requests are
    taken in one after the other. A request that comes while steps run delays the next step that is
    launched. A step after an idle time takes `wake_seconds` more.

    The policy sees each request's tenant, its class as `metadata["class"]`, its session, its
    priority, its forecast and its targets. A request that hasn't ended at its deadline is ended
    there. A completion has at least one token, whatever the trace says.

    Raises `ConfigError` for options that make no sense or need too much memory, and `TraceError`
    for an invalid request.
    """
    check_options(policy, options)
    ordered, num_pages = in_order(trace), options.num_pages
    needed = None
    if num_pages is None:
        needed = pages_needed(ordered, options.page_size, options.num_window_groups)
    scheduler = Scheduler(
        KVMemory.of(
            (num_pages or large_pool(needed or 1), options.num_host_pages),
            options.page_size,
            groups=group_specs(options.num_window_groups, options.window),
            prefix_caching=options.prefix_caching,
            eviction=options.eviction,
            preemption=options.preemption,
        ),
        policy,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        output_reserve_tokens=options.output_reserve_tokens,
    )
    return _Run(ordered, scheduler, options).result(needed)


class _Run:
    """One trace on its way through one scheduler."""

    def __init__(
        self, ordered: list[TraceRequest], scheduler: Scheduler, options: SimulationOptions
    ) -> None:
        self.scheduler = scheduler
        self.options = options
        self.cost = steps_of(options.cost, options.noise_seed)
        self.host = self.cost.host if isinstance(self.cost, TableSteps) else NO_TIME
        self.arrivals = arrivals = Arrivals(
            ordered,
            closed_loop=options.closed_loop,
            intake_seconds=self.host.intake_seconds,
        )
        fits, most = scheduler.memory.capacity_tokens, options.max_model_len
        self.longest = fits if most is None else min(fits, most)
        """Most tokens of a prompt and its completion."""
        self.timeline = options.timeline
        self.now = arrivals.next_seconds or 0.0
        self.pipeline = StepPipeline(scheduler, self._launch, depth=2 if options.overlap else 1)
        """Steps in flight; their handles are the times at which they end."""
        self.last_end = -math.inf
        """End of the last step launched; minus infinity before the first."""
        self.step_seconds: deque[float] = deque()
        """Durations of the steps in flight."""
        self.delay_seconds = 0.0
        """Delay of the next step, for requests that came while steps ran."""
        self.ended = 0
        self.prompt_tokens = 0
        """Prompt tokens of the requests that wait or run."""
        self.active: dict[int, RequestRecord] = {}
        """Requests submitted and not yet ended, by sequence id."""
        self.submitted_at_tokens: dict[int, int] = {}
        """Tokens computed before a request arrived, plus its own since then. By sequence id, of
        requests without a first token.
        """
        self.own_tokens: dict[int, int] = {}
        """Token that the completion of each sequence is made of."""
        self.end_positions: dict[int, int] = {}
        """Position of the token that ends each sequence's completion."""
        self.tenants: dict[int, str] = {}
        """Tenant that sent each sequence."""
        self.not_started: set[int] = set()
        self.deadlines: list[tuple[float, int]] = []
        """Deadlines of requests, the next one first; the requests may have ended since."""
        self.drafts: SimulatedDrafts | None = None
        if options.speculation_max_tokens:
            self.drafts = SimulatedDrafts(options.acceptance, options.acceptance_seed)
            self.drafts.check(ordered)
        self.outcomes: deque[StepOutcome] = deque()
        """Outcomes of the steps in flight, if there are draft tokens."""
        self.token_gaps = TokenGaps()
        self.waiting = Counter[str]()
        """Requests of each tenant that haven't started; tenants without any are left out."""
        self.busy_seconds = 0.0
        self.page_seconds = 0.0
        self.pages_held_max = 0
        tenants = {record.request.tenant for record in arrivals.records}
        self.gap = ServiceGap() if len(tenants) > 1 else None

    def result(self, pages_needed: int | None = None) -> SimulationResult:
        """Run to the end. `pages_needed` is given for memory without a limit."""
        began = self.now - self.host.intake_seconds
        while True:
            self._submit_arrived()
            self._end_overdue(math.nextafter(self.now, math.inf))
            if self._pass_steps():
                continue
            plan = self.pipeline.advance(self.now)
            for update in self.scheduler.take_ended_unplanned():
                if update.cause is not None:
                    raise update.cause
                self._end(update.sequence_id, Ending.REFUSED)
            # Like the engine's loop, wait for a step if none may be launched beside it.
            if (end := self.pipeline.due) is not None:
                self._end_overdue(end)
                self._finish_step(end)
            elif plan is not None:
                continue
            elif (arrives := self.arrivals.next_seconds) is not None:
                # Never go back: a step may have ended, of a completion whose end was known before
                # it.
                self.now = max(self.now, arrives)
            elif not self.active:
                break
            else:
                raise InvariantError(f"{len(self.active)} requests wait, and nothing is planned")
            if self.options.on_progress is not None:
                self.options.on_progress(self.ended, len(self.arrivals.records))
        if self.timeline is not None:
            self.timeline.token_gaps = self.token_gaps.counted()
        counters, memory = self.scheduler.counters, self.scheduler.memory
        usage = memory.usage()
        return SimulationResult(
            self.arrivals.by_time(),
            memory.page_size,
            memory.pool.num_pages if pages_needed is None else pages_needed,
            self.now - began,
            self.busy_seconds,
            counters.steps,
            counters.tokens_processed,
            counters.tokens_prefilled,
            counters.tokens_cached,
            counters.preemptions,
            self.scheduler.policy_calls.faults_total,
            # Rounding may put the mean of equal values above them.
            min(self.page_seconds / (self.busy_seconds or 1), self.pages_held_max),
            self.pages_held_max,
            None if self.gap is None else self.gap.most,
            unbounded=pages_needed is not None,
            gap_seconds=self.token_gaps.spread(),
            steps_outside=self.cost.outside if isinstance(self.cost, TableSteps) else None,
            pages_swapped_out=usage.pages_swapped_out_total if memory.copies_evicted else None,
            pages_swapped_in=usage.pages_swapped_in_total if memory.copies_evicted else None,
            speculation=None if self.drafts is None else self.drafts.metrics(counters),
        )

    def _submit_arrived(self) -> None:
        scheduler = self.scheduler
        while (record := self.arrivals.take(self.now)) is not None:
            request = record.request
            if self.arrivals.taken_in_seconds < self.last_end:
                self.delay_seconds += self.host.step_delay_seconds
            if request.prompt_tokens >= self.longest:
                record.ending, record.end_seconds = Ending.TOO_LONG, request.arrival_seconds
                self.ended += 1
                self.arrivals.ended(record, request.arrival_seconds)
                continue
            self.prompt_tokens += request.prompt_tokens
            if self.prompt_tokens > MAX_TOKENS_AT_ONCE:
                num_there = len(self.active) + 1
                at_once = counted(num_there, "request waits or runs", "requests wait or run")
                raise ConfigError(
                    f"trace: {at_once} at {self.now:g} s, with "
                    f"{self.prompt_tokens} tokens in their prompts; they may have at most "
                    f"{MAX_TOKENS_AT_ONCE}: give a lower rate, fewer requests or shorter ones"
                )
            (sequence_id,) = scheduler.submit(
                Request(
                    request_id=str(request.number),
                    prompt_ids=request.prompt_ids(),
                    max_length=self._max_length(request),
                    params=GREEDY,
                    end_ids=END_IDS,
                    max_draft_tokens=self.options.speculation_max_tokens,
                    arrival_seconds=request.arrival_seconds,
                    namespace=request.session.encode(),
                    hints=SchedulingHints(
                        tenant=request.tenant or None,
                        priority=request.priority,
                        session_id=request.session or None,
                        predicted_output_tokens=request.predicted_output_tokens,
                        ttft_target_seconds=request.ttft_target_seconds,
                        tpot_target_seconds=request.tpot_target_seconds,
                        deadline_seconds=request.deadline_seconds,
                        metadata=MappingProxyType({"class": request.request_class})
                        if request.request_class
                        else EMPTY_MAPPING,
                    ),
                )
            )
            if request.deadline_seconds is not None:
                deadline = request.arrival_seconds + request.deadline_seconds
                heappush(self.deadlines, (deadline, sequence_id))
            if self.drafts is not None:
                self.drafts.submitted(sequence_id, request)
            self.active[sequence_id] = record
            self.submitted_at_tokens[sequence_id] = scheduler.counters.tokens_processed
            self.not_started.add(sequence_id)
            self.own_tokens[sequence_id] = request.own_token
            self.end_positions[sequence_id] = recorded_length(request) - 1
            self.tenants[sequence_id] = request.tenant
            self.waiting[request.tenant] += 1

    def _next_deadline(self) -> float | None:
        """Return the next deadline of a request that hasn't ended; None without one."""
        while self.deadlines and self.deadlines[0][1] not in self.active:
            heappop(self.deadlines)
        return self.deadlines[0][0] if self.deadlines else None

    def _end_overdue(self, before: float) -> None:
        """End requests whose deadlines are before that time.

        Tokens that a step in flight computes for them are dropped, as in the engine.
        """
        while (deadline := self._next_deadline()) is not None and deadline < before:
            _, sequence_id = heappop(self.deadlines)
            self.now = max(self.now, deadline)
            self.scheduler.finish(sequence_id)
            if sequence_id in self.submitted_at_tokens:
                record, in_flight = self.active[sequence_id], self.pipeline.in_flight
                record.wait_tokens = self._waited_tokens(sequence_id, in_flight)
            self._end(sequence_id, Ending.OVERDUE)

    def _launch(self, plan: StepPlan) -> float:
        """Start a step when the one before it ends; return when it will end itself."""
        started = max(self.now, self.last_end)
        if self.drafts is not None:
            plan, outcome = self.drafts.taken(plan, self.own_tokens, self.end_positions)
            self.outcomes.append(outcome)
        self.last_end = self._end_of(plan, started)
        self.step_seconds.append(self.last_end - started)
        held = self._count_pages(self.last_end - started)
        if self.timeline is not None:
            self._take_down(self.timeline, plan, started, held)
        not_answered = self.submitted_at_tokens
        for item in plan.items if not_answered else ():
            if item.sequence_id in not_answered:
                not_answered[item.sequence_id] += item.count
                if item.sequence_id in self.not_started:
                    record = self.active[item.sequence_id]
                    record.started_seconds = started
                    record.cached_tokens = item.start
                    self._no_longer_waits(item.sequence_id)
        if self.gap is not None:
            self._count_service([(i.sequence_id, i.count) for i in plan.items], self.gap)
        return self.last_end

    def _finish_step(self, end: float) -> None:
        self.now = end
        plan, active = self.pipeline.in_flight[0], self.active
        if self.drafts is None:
            outcome = self._outcome(plan)
            self.scheduler.state.times.record(plan, self.step_seconds.popleft())
        else:
            outcome = self.outcomes.popleft()
            # The scheduler learns how many draft tokens are worth their time.
            self.scheduler.charge(plan, self.step_seconds.popleft())
        updates = self.pipeline.finish(outcome, self.now)
        sequence_ids = list(dict.fromkeys([progress.sequence_id for progress in updates]))
        if self.drafts is not None:
            self.drafts.sequence_steps += len(sequence_ids)
        self.token_gaps.add(sequence_ids, (self.now,))
        for progress in updates:
            record = active[progress.sequence_id]
            record.output_tokens += 1
            if record.first_token_seconds is None:
                record.first_token_seconds = self.now + self.host.delivery_seconds
                in_flight = self.pipeline.in_flight
                record.wait_tokens = self._waited_tokens(progress.sequence_id, in_flight)
            if progress.finish_reason is not None:
                at_its_end = progress.finish_reason is FinishReason.STOP
                ending = Ending.FINISHED if at_its_end else Ending.CUT_SHORT
                self._end(progress.sequence_id, ending)

    def _outcome(self, plan: StepPlan) -> StepOutcome:
        own_tokens, ends = self.own_tokens, self.end_positions
        token_ids = [
            END_TOKEN
            if item.start + row.offset + 1 == ends[item.sequence_id]
            else own_tokens[item.sequence_id]
            for item in plan.items
            for row in item.rows
        ]
        return StepOutcome(step=plan.step, token_ids=tuple(token_ids))

    def _pass_steps(self) -> bool:
        """Pass steps at once, if possible. A timeline records each step by itself, so it prevents
        that.
        """
        in_flight = self.pipeline.num_in_flight
        if self.timeline is not None or self.delay_seconds:
            return False
        if in_flight != self.pipeline.depth - 1:
            return False
        processed = self.scheduler.counters.tokens_processed
        clock = Clock(
            self.now,
            self.last_end,
            tuple(self.step_seconds),
            self.arrivals.next_seconds,
            self._next_deadline(),
        )
        passed = pass_steps(self.scheduler, self.cost, clock, self.own_tokens, self.end_positions)
        if passed is None:
            return False
        for seconds, held in zip(passed.launched_seconds, passed.pages_held, strict=True):
            self.busy_seconds += seconds
            self.page_seconds += held * seconds
        self.pages_held_max = max(self.pages_held_max, *passed.pages_held)
        if self.gap is not None:
            served = [(sequence_id, 1) for sequence_id in passed.sequence_ids]
            self._count_service(served, self.gap, len(passed.ends))
        self.step_seconds = deque(passed.launched_seconds[-1:] if in_flight else ())
        self.now, self.last_end = passed.ends[-1], passed.last_end
        self.pipeline.steps.clear()
        if passed.in_flight is not None:
            self.pipeline.steps.append((passed.in_flight, passed.last_end))
        late, ends = passed.late, passed.ends
        if late:
            self.token_gaps.add([one for one in passed.sequence_ids if one not in late], ends[:1])
            ends = ends[1:]
        self.token_gaps.add(passed.sequence_ids, ends)
        for sequence_id in passed.sequence_ids:
            record = self.active[sequence_id]
            record.output_tokens += len(passed.ends) - (sequence_id in late)
            if record.first_token_seconds is None:
                record.first_token_seconds = passed.ends[0] + self.host.delivery_seconds
                record.wait_tokens = processed - self.submitted_at_tokens.pop(sequence_id)
        for sequence_id in passed.ended:
            self._end(sequence_id, Ending.FINISHED)
        return True

    def _max_length(self, request: TraceRequest) -> int:
        """Return the most tokens of prompt and completion, as the engine's intake would."""
        most = self.options.max_tokens if request.max_tokens is None else request.max_tokens
        return self.longest if most is None else min(self.longest, request.prompt_tokens + most)

    def _end_of(self, plan: StepPlan, started: float) -> float:
        with named("cost: step_seconds"):
            seconds = self.cost.step_seconds(plan)
            if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ConfigError(
                    "cost: a step must take a finite time of more than 0 seconds, got "
                    f"{shown(seconds)}"
                )
            seconds += self.delay_seconds
            self.delay_seconds = 0.0
            if started - self.last_end >= WAKE_AFTER_SECONDS:
                seconds += self.host.wake_seconds
            ended = float(started + seconds)
        if not started < ended <= MAX_CLOCK_SECONDS:
            raise ConfigError(
                f"cost: a step that begins at {started:g} s must end later on the clock, and by "
                f"{MAX_CLOCK_SECONDS:g} s, got one of {seconds:g} s"
            )
        return ended

    def _end(self, sequence_id: int, ending: Ending) -> None:
        record = self.active.pop(sequence_id)
        if self.drafts is not None:
            self.drafts.ended(sequence_id)
        self.prompt_tokens -= record.request.prompt_tokens
        if sequence_id in self.submitted_at_tokens:
            record.wait_tokens = self._waited_tokens(sequence_id, ())
        if sequence_id in self.not_started:
            self._no_longer_waits(sequence_id)
        record.max_gap_seconds = self.token_gaps.ended(sequence_id)
        record.ending, record.end_seconds = ending, self.now + self.host.delivery_seconds
        self.ended += 1
        self.arrivals.ended(record, record.end_seconds)

    def _waited_tokens(self, sequence_id: int, in_flight: Iterable[StepPlan]) -> int:
        """Return the tokens computed for others since it arrived, without steps in flight."""
        since = self.scheduler.counters.tokens_processed - self.submitted_at_tokens.pop(sequence_id)
        for plan in in_flight:
            own = sum(item.count for item in plan.items if item.sequence_id == sequence_id)
            since -= plan.num_tokens - own
        return since

    def _no_longer_waits(self, sequence_id: int) -> None:
        """Record that it starts, or never will."""
        tenant = self.tenants[sequence_id]
        self.waiting[tenant] -= 1
        if not self.waiting[tenant]:
            del self.waiting[tenant]
        self.not_started.remove(sequence_id)

    def _take_down(self, timeline: Timeline, plan: StepPlan, began: float, held: int) -> None:
        records = [self.active[item.sequence_id] for item in plan.items]
        timeline.add(
            plan,
            requests=[record.request.number for record in records],
            decodes=[item.kind is not ItemKind.PREFILL for item in plan.items],
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
        """Count and return the pages that requests hold during a step of `seconds`."""
        memory = self.scheduler.memory
        held = memory.pool.num_pages - memory.num_available
        self.busy_seconds += seconds
        self.page_seconds += held * seconds
        self.pages_held_max = max(self.pages_held_max, held)
        return held

    def _count_service(
        self, computed: Iterable[tuple[int, int]], gap: ServiceGap, steps: int = 1
    ) -> None:
        """Count the service of `steps` equal steps, each of which computes these tokens for
        sequences.
        """
        if len(self.waiting) < 2:
            gap.step((), ())
            return
        tenants = self.tenants
        gap.step([(tenants[one], count) for one, count in computed], self.waiting, steps)
