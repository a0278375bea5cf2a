"""What a runner makes of a `StepPlan`: tokens, and what was asked about them."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.request import Logprobs
from aioserve.steps.plan import StepPlan

__all__ = ["StepOutcome", "check_outcome"]


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a step produced, row by row: the first item's rows, then the second's, and so on."""

    step: int
    """Number of the plan that it is the outcome of."""
    token_ids: tuple[int, ...]
    """The id sampled from each row."""
    row_errors: dict[int, str] = {}
    """Index of a row -> why its logits could not be sampled (for example NaN)."""
    row_failures: dict[int, str] = {}
    """Index of a row -> what went wrong with it, though nothing is wrong with its logits."""
    logprobs: dict[int, Logprobs] = {}
    """Index of a row -> what its slot asked for."""
    scored: tuple[Logprobs, ...] = ()
    """Of the targets of all items' `scored`, one item after the other."""
    pooled: tuple[npt.NDArray[np.float32], ...] = ()
    """float32 `[hidden]`, for each item with `pooled`, in order: the sum that it asks for."""


def check_outcome(plan: StepPlan, outcome: StepOutcome) -> None:
    """Raise `InvariantError` for the outcome of another step, or one with other rows, scores or
    sums."""
    if outcome.step != plan.step:
        raise InvariantError(f"step {plan.step} got the outcome of step {outcome.step}")
    rows = plan.num_rows
    named = {*outcome.row_errors, *outcome.row_failures, *outcome.logprobs}
    if len(outcome.token_ids) != rows or not all(0 <= row < rows for row in named):
        raise InvariantError(
            f"step {plan.step} has {rows} rows, its outcome {len(outcome.token_ids)} tokens and "
            f"something to say of the rows {sorted(named)}"
        )
    if len(outcome.scored) != plan.num_scored:
        raise InvariantError(
            f"step {plan.step} scores {plan.num_scored} tokens, its outcome {len(outcome.scored)}"
        )
    if len(outcome.pooled) != plan.num_pooled:
        raise InvariantError(
            f"step {plan.step} pools {plan.num_pooled} items, its outcome {len(outcome.pooled)}"
        )
