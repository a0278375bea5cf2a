"""Outcome of a `StepPlan` from a runner: tokens, and what was asked about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import shown
from aioserve.errors import InvariantError
from aioserve.request import Logprobs
from aioserve.steps.plan import StepPlan

__all__ = ["DryRun", "StepOutcome", "UnfitOutcomeError", "check_outcome"]


class UnfitOutcomeError(InvariantError):
    """An outcome that doesn't fit its plan."""


class DryRun(NamedTuple):
    """Acceptance that draft tokens would have had which were made some steps before and that no
    step verified."""

    asked: int
    """Draft tokens asked for whose positions have been drawn since."""
    drafted: int
    """Leading positions of these that had a draft token."""
    accepted: int
    """Leading draft tokens that were right."""


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Results of a step, row by row: the first item's rows, then the second's, and so on."""

    step: int
    """Number of the step that was planned."""
    token_ids: tuple[int, ...]
    """Sampled ids, row by row."""
    token_counts: dict[int, int] = {}
    """Maps the index of a row to its number of tokens, if that isn't 1. It is more if draft tokens
    were right, and 0 if the row's mask came too late. A row with an error has one id of any
    value."""
    drafted: dict[int, int] = {}
    """Maps the index of a verifying row to the number of verified draft tokens, or ids that the
    plan brought, if any. The right ones are one fewer than the row's tokens. With several paths the
    longest one counts, and its tokens stand for all in their places."""
    branched: dict[int, int] = {}
    """Maps the index of a row with several paths to the tokens computed for it beside its last one
    and those of `drafted`."""
    drafting_seconds: float = 0.0
    """Seconds that the drafter took for these draft tokens, part of the step's; 0 if not
    measured."""
    dry_runs: dict[int, DryRun] = {}
    """Maps the index of a row to the fate of earlier draft tokens for its slot that no step
    verified, once the runner knows it."""
    row_errors: dict[int, str] = {}
    """Maps the index of a row to the reason why its logits could not be sampled (for example
    NaN)."""
    row_failures: dict[int, str] = {}
    """Maps the index of a row to a failure that has nothing to do with its logits."""
    logprobs: dict[int, Logprobs] = {}
    """Maps the index of a token in `token_ids` to the log-probabilities that its slot asked for."""
    scored: tuple[Logprobs, ...] = ()
    """Log-probabilities of the targets of all items' `scored`, one item after the other."""
    pooled: tuple[npt.NDArray[np.float32], ...] = ()
    """Sums of hidden states, float32 `[hidden]`, for each item with `pooled`, in order."""


def check_outcome(plan: StepPlan, outcome: StepOutcome) -> None:
    """Raise `UnfitOutcomeError` unless this is an outcome of the plan, with its rows, scores and
    sums. Checks the type as a whole and its fields."""
    if not isinstance(outcome, StepOutcome):  # runners may come from elsewhere
        raise UnfitOutcomeError(f"step {plan.step} got {shown(outcome)}, which is no outcome")
    try:
        if outcome.step != plan.step:
            raise UnfitOutcomeError(f"step {plan.step} got the outcome of step {outcome.step}")
        rows, counts, num_ids = plan.num_rows, outcome.token_counts, len(outcome.token_ids)
        named = {*outcome.row_errors, *outcome.row_failures, *outcome.dry_runs}
        if (
            num_ids != rows - len(counts) + sum(counts.values())
            or (named and not named.issubset(range(rows)))
            or (outcome.logprobs and not {*outcome.logprobs}.issubset(range(num_ids)))
            or (counts and not _may_have(plan, counts))
            or (outcome.drafted and not _may_have(plan, outcome.drafted, beyond=1))
            or (outcome.branched and not _may_have(plan, outcome.branched, beyond=1))
        ):
            raise UnfitOutcomeError(
                f"step {plan.step} has {rows} rows, its outcome {num_ids} tokens, of rows {counts},"
                f" and something to say of the rows {sorted(named)} and tokens "
                f"{sorted(outcome.logprobs)}"
            )
        for found in outcome.dry_runs.values():
            if not 0 <= found.accepted <= found.drafted <= found.asked:
                raise UnfitOutcomeError(f"step {plan.step} has {found}")
        if len(outcome.scored) != plan.num_scored:
            raise UnfitOutcomeError(
                f"step {plan.step} scores {plan.num_scored} tokens, its outcome "
                f"{len(outcome.scored)}"
            )
        if len(outcome.pooled) != plan.num_pooled:
            raise UnfitOutcomeError(
                f"step {plan.step} pools {plan.num_pooled} items, its outcome {len(outcome.pooled)}"
            )
    except UnfitOutcomeError:
        raise
    except Exception as error:
        raise UnfitOutcomeError(f"step {plan.step} got an outcome with {error!r}") from error


def _may_have(plan: StepPlan, counts: Mapping[int, int], beyond: int = 0) -> bool:
    """True if no row has a greater count than its tokens may be, less `beyond`."""
    most = dict(enumerate([item.most_tokens(row) for item in plan.items for row in item.rows]))
    return all(0 <= count <= most.get(row, -1) - beyond for row, count in counts.items())
