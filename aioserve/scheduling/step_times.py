"""Summaries and durations of the last steps, and from them an estimate for other steps.

Nothing is counted until a policy asks. Until then a step is kept as its plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.steps.plan import ItemKind, StepPlan, WorkItem

__all__ = ["NUM_KEPT", "StepSummary", "StepTimes", "summary_of"]

NUM_KEPT = 32
"""Steps that are remembered one by one."""
WARM_UP_STEPS = 8
"""First steps of an engine, which take longer than later ones and aren't counted."""
LEAST_STEPS = 4
"""Counted steps before there is an estimate."""
DECAY = 0.98
"""Factor on the weight of a step for each further step."""


class StepSummary(msgspec.Struct, frozen=True, gc=False):
    """Summary of one step that is done."""

    step: int
    prefill_tokens: int
    """Tokens known when the step was planned: of prompts, and of what is computed anew."""
    decodes: int
    """Tokens that decoding sequences compute: the last one of each, and draft tokens after it."""
    context_tokens: int
    """Tokens that the step attended to. Each item counts all up to its last."""
    seconds: float


class StepTimes:
    """Remembers the last steps, and fits a line through those that were measured."""

    def __init__(self) -> None:
        self.kept: deque[StepSummary | tuple[StepPlan, float]] = deque(maxlen=NUM_KEPT)
        """The last steps. Each is a plan with its seconds until its summary is asked for."""
        self.num_steps: int = 0
        """Steps that are done, including those no longer kept."""
        self._num_fitted = 0
        """Steps included in the sums below, or missed by them."""
        self._num_counted = 0
        self._gram: npt.NDArray[np.float64] = np.zeros((4, 4))
        self._moment: npt.NDArray[np.float64] = np.zeros(4)
        self._weights: npt.NDArray[np.float64] | None = None

    def record(self, plan: StepPlan, seconds: float) -> None:
        """Record a step that took `seconds`."""
        self.kept.append((plan, seconds))
        self.num_steps += 1

    def failed(self, plan: StepPlan) -> None:
        """Remove the last step, since it failed: its duration says nothing about other steps."""
        last = self.kept[-1] if self.kept else None
        if isinstance(last, tuple) and last[0] is plan:
            self.kept.pop()
            self.num_steps -= 1

    @property
    def recent(self) -> tuple[StepSummary, ...]:
        """The last steps that are done, oldest first; at most 32."""
        for index, one in enumerate(self.kept):
            if isinstance(one, tuple):
                plan, seconds = one
                self.kept[index] = summary_of(plan.step, plan.items, seconds)
        return tuple([one for one in self.kept if isinstance(one, StepSummary)])

    def estimate(self, prefill_tokens: int, decodes: int, context_tokens: int) -> float | None:
        """Estimated seconds of a step; None until enough were measured.

        A least-squares fit with weights of at least 0 over a fixed time, prefill tokens, decodes
        and context tokens. Later steps count more.
        """
        self._fit()
        if self._weights is None:
            return None
        return float(self._weights @ (1.0, prefill_tokens, decodes, context_tokens))

    def _fit(self) -> None:
        new = min(self.num_steps - self._num_fitted, len(self.kept))
        if not new:
            return
        first_number = self.num_steps - new
        self._num_fitted = self.num_steps
        for number, one in enumerate(self.recent[-new:], first_number):
            if number < WARM_UP_STEPS:
                continue
            features = np.array(
                [1.0, one.prefill_tokens, one.decodes, one.context_tokens], np.float64
            )
            self._gram = DECAY * self._gram + np.outer(features, features)
            self._moment = DECAY * self._moment + features * one.seconds
            self._num_counted += 1
        if self._num_counted >= LEAST_STEPS:
            self._weights = _solved(self._gram, self._moment)


def summary_of(step: int, items: Iterable[WorkItem], seconds: float) -> StepSummary:
    """Summarize a step with these items."""
    prefill = decodes = context = 0
    for item in items:
        context += item.index + item.count
        if item.kind is not ItemKind.PREFILL:
            decodes += item.count
        else:
            prefill += item.count
    return StepSummary(step, prefill, decodes, context, seconds)


def _solved(
    gram: npt.NDArray[np.float64], moment: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Least-squares weights of at least 0 from these sums. Features that only ever came together
    share evenly in the time."""
    scale = np.sqrt(np.diag(gram))
    used = np.flatnonzero(scale > 0)
    weights = np.zeros(len(moment))
    while len(used):
        within = scale[used]
        scaled = gram[np.ix_(used, used)] / np.outer(within, within)
        found = np.linalg.lstsq(scaled, moment[used] / within, rcond=1e-9)[0]
        if found.min() >= 0:
            weights[used] = found / within
            break
        used = np.delete(used, int(found.argmin()))
    return weights
