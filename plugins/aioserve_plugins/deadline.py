"""Earliest deadline first, with early rejection."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from aioserve import (
    ConfigError,
    PolicySpec,
    Refusal,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    Verdict,
    hookimpl,
)

__all__ = ["Deadline"]

WARM_UP_STEPS = 8
"""Number of first steps of an engine, which take longer and aren't counted."""
DECAY = 0.95
"""Factor on the weight of a measured step for each further one."""
TPOT_SHARE = 0.95
"""Share of a target for decoding that steps may take. Longer ones count in the mean, too."""
MIN_PROMPT_TOKENS = 64
"""Fewest tokens of a step for all prompts together, even if decoding then misses its targets."""


class Deadline(SchedulingPolicy):
    """Brings as many requests as possible to their first token in time, and decodes in time.

    A deadline is `ttft_target_seconds` after the arrival, `default_ttft_seconds` for a request
    without a target. Requests start earliest deadline first. If not all can make it, the longest
    are put off until the others can. See Moore, "An n Job, One Machine Sequencing Algorithm for
    Minimizing the Number of Late Jobs", Management Science 1968. With `reject`, a request that
    can't meet its target any more is refused with the estimate; one without a target never is.

    The least `tpot_target_seconds` of decoding requests limits the tokens of prompts in a step,
    unless decoding alone takes longer than that.

    The duration of steps is measured, from the ninth on. Before that nothing is put off, and only a
    request past its deadline is refused.

    Once a request has waited for `patience` times its length in tokens processed, it goes before
    all that arrived later. Only the `window` oldest are compared.

    Raises `ConfigError` for a `default_ttft_seconds` or `patience` that isn't positive and finite,
    a `reject` that isn't a bool, or a `window` below 1.
    """

    def __init__(
        self,
        *,
        default_ttft_seconds: float = 10.0,
        reject: bool = True,
        patience: float = 1024.0,
        window: int = 256,
    ) -> None:
        for name, value in (("default_ttft_seconds", default_ttft_seconds), ("patience", patience)):
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, got {value!r}")
        if not isinstance(reject, bool):
            raise ConfigError(f"reject must be True or False, got {reject!r}")
        if not isinstance(window, int) or window < 1:
            raise ConfigError(f"window must be an int of at least 1, got {window!r}")
        self.default_ttft_seconds = default_ttft_seconds
        self.reject = reject
        self.patience = patience
        self.window = window
        self._live: dict[RequestView, None] = {}
        self._refusals: dict[RequestView, Refusal] = {}
        self._times = StepTimes()
        self._begun = (0, -math.inf)
        self._prompt_tokens = 0
        """Tokens of this step that are left for prompts."""
        self._seconds_per_token = 0.0
        """Seconds per token of prompts, in steps like this one; 0 until something was measured."""

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return math.ceil(self.patience * (request.prompt_tokens + request.generated_tokens))

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        self._begin(view)
        work = {request: request.uncached_tokens for request in waiting[: self.window]}
        started = [r.uncached_tokens for r in view.running]
        ahead = self._times.tokens_in_flight(view) + sum(n for n in started if n > 1)
        self._refuse(work, ahead, view)
        yield from self._refusals
        candidates = [request for request in work if request not in self._refusals]
        first = [request for request in candidates if self._goes_first(request, view)]
        ahead += sum(work[request] for request in first)
        others = sorted(set(candidates).difference(first), key=self._by_deadline)
        on_time = self._on_time(others, work, ahead, view)
        put_off = sorted(set(others).difference(on_time), key=lambda r: (work[r], r.arrival_index))
        for group in (first, on_time, put_off, islice(waiting, self.window, None)):
            for request in group:
                if self._prompt_tokens <= 0:
                    return
                yield request

    def admit(self, request: RequestView, view: SchedulerView) -> Verdict | Refusal:
        return self._refusals.get(request, Verdict.NOW)

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        self._begin(view)
        tokens = min(budget_tokens, self._prompt_tokens)
        self._prompt_tokens -= tokens
        return tokens

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self._live.update(dict.fromkeys(requests))

    def finished(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            self._live.pop(request, None)

    def step_finished(self, step: int, tokens: int) -> None:
        self._times.step_finished(tokens, idle=not self._live)

    def _begin(self, view: SchedulerView) -> None:
        """Update from the clock and the decoding requests, once a step."""
        if (view.step, view.now_seconds) == self._begun:
            return
        self._begun = (view.step, view.now_seconds)
        self._times.look(view)
        decoding = [r for r in view.running if r.uncached_tokens <= 1]
        most = max(0, view.max_num_batched_tokens - len(decoding))
        targets = [r.tpot_target_seconds for r in decoding if r.tpot_target_seconds is not None]
        if targets:
            within = self._times.tokens_within(TPOT_SHARE * min(targets)) - len(decoding)
            if within > 0:
                most = int(min(most, max(within, MIN_PROMPT_TOKENS)))
        self._prompt_tokens = most
        seconds = self._times.seconds(len(decoding) + most)
        self._seconds_per_token = seconds / most if most > 0 else 0.0

    def _deadline(self, request: RequestView) -> float:
        target = request.ttft_target_seconds
        return request.arrival_seconds + (self.default_ttft_seconds if target is None else target)

    def _by_deadline(self, request: RequestView) -> tuple[float, int]:
        return self._deadline(request), request.arrival_index

    def _goes_first(self, request: RequestView, view: SchedulerView) -> bool:
        """True if a request has waited for its patience, or was preempted while its reader
        reads."""
        waited = view.processed_tokens - request.arrival_processed_tokens
        return request.generated_tokens > 0 or waited >= self.starvation_bound_tokens(request)

    def _refuse(self, work: dict[RequestView, int], ahead: int, view: SchedulerView) -> None:
        """Refuse requests that would be late even if they were the next."""
        self._refusals = {}
        if not self.reject:
            return
        for request, tokens in work.items():
            target = request.ttft_target_seconds
            if target is None or request.generated_tokens:
                continue
            seconds = view.now_seconds - request.arrival_seconds
            seconds += (ahead + tokens) * self._seconds_per_token
            if seconds > target:
                self._refusals[request] = Refusal(
                    f"its first token would come {seconds:.3g} s after its arrival at the "
                    f"earliest, and ttft_target_seconds is {target:g}"
                )

    def _on_time(
        self,
        by_deadline: list[RequestView],
        work: dict[RequestView, int],
        ahead: int,
        view: SchedulerView,
    ) -> list[RequestView]:
        """Requests to serve in time, as many as possible, in order of their deadlines. Whenever one
        would be late, the longest so far is left out."""
        longest: list[tuple[int, int, RequestView]] = []
        left_out: set[RequestView] = set()
        for request in by_deadline:
            ahead += work[request]
            heapq.heappush(longest, (-work[request], -request.arrival_index, request))
            if view.now_seconds + ahead * self._seconds_per_token > self._deadline(request):
                minus_tokens, _, late = heapq.heappop(longest)
                ahead += minus_tokens
                left_out.add(late)
        return [request for request in by_deadline if request not in left_out]


class StepTimes:
    """Times of steps: a line through those measured. Later steps count more."""

    def __init__(self) -> None:
        self._steps_done = 0
        self._seen_step = -1
        self._seen_seconds = 0.0
        self._tokens_done = 0
        self._finished: list[int] = []
        """Tokens of each step that has finished since the last look."""
        self._sums = (0.0,) * 5
        """Sums of weights, tokens, seconds, tokens squared, and tokens times seconds."""

    def step_finished(self, tokens: int, *, idle: bool) -> None:
        self._steps_done += 1
        self._tokens_done += tokens
        self._finished.append(tokens)
        if idle:  # the next step may begin at any time
            self._seen_step = -1

    def look(self, view: SchedulerView) -> None:
        """Measure a step that finished between two plans in a row: it takes the time between
        them."""
        seconds = view.now_seconds - self._seen_seconds
        in_a_row = view.step == self._seen_step + 1 and len(self._finished) == 1
        if in_a_row and seconds > 0 and self._steps_done > WARM_UP_STEPS:
            self._count(self._finished[0], seconds)
        self._seen_step, self._seen_seconds, self._finished = view.step, view.now_seconds, []

    def _count(self, tokens: int, seconds: float) -> None:
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(DECAY * old + n for old, n in zip(self._sums, new, strict=True))

    def tokens_in_flight(self, view: SchedulerView) -> int:
        return view.processed_tokens - self._tokens_done

    def seconds(self, tokens: int) -> float:
        """Seconds of a step of `tokens` tokens; 0 until steps of that order were measured. An
        estimate from small steps might refuse all requests, for ever."""
        n, _, _, xx, _ = self._sums
        if xx < n * (tokens / 8) ** 2:
            return 0.0
        fixed, each = self._line()
        return fixed + each * tokens

    def tokens_within(self, seconds: float) -> float:
        """Tokens of a step that takes `seconds`."""
        fixed, each = self._line()
        return (seconds - fixed) / each if each > 0 else math.inf

    def _line(self) -> tuple[float, float]:
        n, x, y, xx, xy = self._sums
        if xx == 0:
            return 0.0, 0.0
        spread = n * xx - x * x
        if spread > 1e-3 * x * x:
            each = (n * xy - x * y) / spread
            fixed = (y - each * x) / n
            if each > 0 and fixed > 0:
                return fixed, each
        return 0.0, xy / xx


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("deadline", Deadline, "earliest deadline first, with early rejection")]
