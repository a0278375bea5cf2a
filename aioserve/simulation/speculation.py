"""Draft tokens in a simulated run: no drafter runs, and draws decide which draft tokens are right.

A request has a draw for each place of its completion, made from a seed and its number. A draft
token for that place is right if the draw is below its chance. So a completion has the same luck
under every policy, in whatever steps it is computed. A draft token with a better chance is right
wherever one with a worse chance is.

The drafter makes as many draft tokens as the plan asks for. It is called in the order of the steps,
when each begins, like a runner: the outcome of the step before is drawn already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from aioserve.errors import ConfigError, TraceError
from aioserve.isolation import shown
from aioserve.scheduling.updates import SchedulerCounters
from aioserve.simulation.records import SpeculationMetrics
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import ItemKind, StepPlan, WorkItem
from aioserve.traces.trace_request import END_TOKEN, TraceRequest

__all__ = ["MAX_PLACES", "SimulatedDrafts", "acceptance_by_place"]

MAX_PLACES = 64
"""Most chances that differ by place."""


def acceptance_by_place(acceptance: float | str | None) -> tuple[float, ...] | None:
    """Return the chance that a draft token is right if all before it in its step are, by its place.

    The last one is that of all further places. Raises `ConfigError` for an invalid chance.
    """
    if acceptance is None:
        return None
    parts = acceptance.split(",") if isinstance(acceptance, str) else [acceptance]
    if len(parts) > MAX_PLACES:
        raise ConfigError(f"acceptance may have at most {MAX_PLACES} chances, got {len(parts)}")
    return tuple([_chance(part, acceptance) for part in parts])


def _chance(part: float | str, given: float | str) -> float:
    try:
        chance = float(part) if type(part) in (int, float, str) else math.nan
    except ValueError:
        chance = math.nan
    if not 0 <= chance <= 1:
        raise ConfigError(
            "acceptance must be a chance in [0, 1], or one for each place with commas between "
            f"them, got {shown(given)}"
        )
    return chance


class SimulatedDrafts:
    """Draft tokens for all requests of one run.

    `acceptance` is that of every request; None: each has its own, which the trace tells. Raises
    `ConfigError` for an invalid chance.
    """

    def __init__(self, acceptance: float | str | None, seed: int) -> None:
        self._chances = acceptance_by_place(acceptance)
        self._seed = seed
        self._reached: dict[int, int] = {}
        """Known tokens by slot, the one sampled last included."""
        self._requests: dict[int, tuple[int, npt.NDArray[np.float64], Sequence[float]]] = {}
        """Length of the prompt, draws, and chances, by sequence id."""

        self.sequence_steps: int = 0
        """Steps that brought tokens, counted once for each sequence that got some."""

    def check(self, requests: Iterable[TraceRequest]) -> None:
        """Raise `TraceError` for a request without a chance."""
        for request in requests if self._chances is None else ():
            if request.acceptance is None:
                raise TraceError(
                    f"request {request.number} has no acceptance of its own, so that nobody knows "
                    "how many draft tokens are right: give acceptance for all"
                )

    def submitted(self, sequence_id: int, request: TraceRequest) -> None:
        """Prepare a checked request that is submitted."""
        chances = self._chances or (request.acceptance or 0.0,)
        draws = np.random.default_rng((self._seed, request.number)).random(request.output_tokens)
        self._requests[sequence_id] = (request.prompt_tokens, draws, chances)

    def ended(self, sequence_id: int) -> None:
        """Forget a sequence that is in no further step."""
        self._requests.pop(sequence_id, None)

    def taken(
        self, plan: StepPlan, own_tokens: Mapping[int, int], end_positions: Mapping[int, int]
    ) -> tuple[StepPlan, StepOutcome]:
        """Return the plan with the final starts of its items, and its outcome.

        `own_tokens` is the token that each sequence's completion is made of, `end_positions` the
        position at which it ends.
        """
        for slot in plan.ended_slots:
            self._reached.pop(slot, None)
        for start in plan.started_slots:
            if start.drafting is not None:
                self._reached[start.slot] = len(start.drafting.known_ids)
        items = [self._from_reached(item) for item in plan.items]
        token_ids: list[int] = []
        token_counts: dict[int, int] = {}
        drafted: dict[int, int] = {}
        rows = [(item, row.slot) for item in items for row in item.rows]
        for index, (item, slot) in enumerate(rows):
            sequence_id, position = item.sequence_id, self._reached[slot]
            right = 0
            if item.kind is ItemKind.VERIFY and item.count > 1:
                drafted[index] = item.count - 1
                right = self._num_right(sequence_id, position, item.count - 1)
            own, end = own_tokens[sequence_id], end_positions[sequence_id]
            behind = position + right + 1
            token_ids += [END_TOKEN if at == end else own for at in range(position, behind)]
            if right:
                token_counts[index] = right + 1
            self._reached[slot] = behind
        outcome = StepOutcome(
            step=plan.step,
            token_ids=tuple(token_ids),
            token_counts=token_counts,
            drafted=drafted,
        )
        return replace(plan, items=tuple(items)), outcome

    def metrics(self, counters: SchedulerCounters) -> SpeculationMetrics:
        tokens = counters.tokens_generated
        drafted, accepted = counters.drafted, counters.accepted
        return SpeculationMetrics.of(drafted, accepted, tokens, self.sequence_steps)

    def _from_reached(self, item: WorkItem) -> WorkItem:
        if item.kind is not ItemKind.VERIFY:
            return item
        return replace(item, start=self._reached[item.slot] - 1)

    def _num_right(self, sequence_id: int, position: int, num_draft_tokens: int) -> int:
        """Return the number of draft tokens before the first wrong one; those after the end are
        wrong.
        """
        prompt_tokens, draws, chances = self._requests[sequence_id]
        first = position - prompt_tokens
        for place in range(num_draft_tokens):
            if first + place >= len(draws):
                return place
            if draws[first + place] >= chances[min(place, len(chances) - 1)]:
                return place
        return num_draft_tokens
