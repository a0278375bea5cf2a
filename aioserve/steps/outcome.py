"""What a runner makes of a `StepPlan`: tokens, and what was asked about them."""

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
    """An outcome that isn't one of the plan."""


class DryRun(NamedTuple):
    """What draft tokens came to that were made some steps before and that no step verified."""

    asked: int
    """Tokens that were drawn since then, but no more than draft tokens were asked for: so many of
    these have an answer."""
    drafted: int
    """Number of these that had a draft token, in a row from the first."""
    accepted: int
    """Number of these that were right, in a row from the first."""


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a step produced, row by row: the first item's rows, then the second's, and so on."""

    step: int
    """Number of the plan that it is the outcome of."""
    token_ids: tuple[int, ...]
    """The ids sampled, row by row."""
    token_counts: dict[int, int] = {}
    """Index of a row -> how many tokens it has, where that isn't one: several, where draft tokens
    were right, or none, where its mask came too late. A row with an error has one id, whatever it
    is."""
    drafted: dict[int, int] = {}
    """Index of a row of an item that verifies -> how many draft tokens were verified, or ids that
    the plan brought, if any were. As many were right as it has tokens but one. Where several paths
    of draft tokens were verified, the tokens of the longest count, each for all in its place."""
    branched: dict[int, int] = {}
    """Index of a row with several paths -> tokens that were computed for it beside its last one and
    those of `drafted`."""
    drafting_seconds: float = 0.0
    """Time of the drafter for these draft tokens, part of the step's; 0 where nobody
    measured."""
    dry_runs: dict[int, DryRun] = {}
    """Index of a row -> what became of draft tokens for its slot that no step verified, where the
    runner has come to know that."""
    row_errors: dict[int, str] = {}
    """Index of a row -> why its logits could not be sampled (for example NaN)."""
    row_failures: dict[int, str] = {}
    """Index of a row -> what went wrong with it, though nothing is wrong with its logits."""
    logprobs: dict[int, Logprobs] = {}
    """Index of a token in `token_ids` -> what its slot asked for."""
    scored: tuple[Logprobs, ...] = ()
    """Log-probabilities of the targets of all items' `scored`, one item after the other."""
    pooled: tuple[npt.NDArray[np.float32], ...] = ()
    """float32 `[hidden]`, for each item with `pooled`, in order: the sum that it asks for."""


def check_outcome(plan: StepPlan, outcome: StepOutcome) -> None:
    """Raise `UnfitOutcomeError` for the outcome of another step, one with other rows, scores or
    sums, and what is no outcome, as a whole or in its fields."""
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
    """Whether no row has a greater count than its tokens may be, less `beyond`."""
    most = dict(enumerate([item.most_tokens(row) for item in plan.items for row in item.rows]))
    return all(0 <= count <= most.get(row, -1) - beyond for row, count in counts.items())
