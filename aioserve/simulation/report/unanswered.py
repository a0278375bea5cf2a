"""Policies under which nobody got an answer: what happened instead, in words."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.simulation.report.runs import PolicyRun

__all__ = ["unanswered"]


def unanswered(runs: Sequence[PolicyRun]) -> list[str]:
    """A sentence for each policy of which no request has finished, and of which there is therefore
    little or nothing to draw."""
    return [_sentence(run) for run in runs if not run.metrics.finished]


def _sentence(run: PolicyRun) -> str:
    metrics, result = run.metrics, run.result
    causes: list[str] = []
    if metrics.too_long:
        memory = f"{result.num_pages:,} pages of {result.page_size} tokens"
        causes.append(f"{metrics.too_long:,} too long for the model or the memory of {memory}")
    if metrics.refused:
        causes.append(f"{metrics.refused:,} refused by the policy")
    steps = "" if metrics.steps else " No step ran, so nothing of it is drawn."
    return (
        f"Under {run.name} none of {metrics.requests:,} requests got its answer: "
        f"{', '.join(causes)}.{steps}"
    )
