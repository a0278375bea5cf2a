"""Definitions that the draws of all backends share. Knows numbers alone."""

from __future__ import annotations

import math

__all__ = ["LINES", "NOTHING_LEFT", "row_error"]

LINES = 32
"""Lines of the matrix that a row is taken as where nothing is left out. Its columns are walked one
after the other."""


NOTHING_LEFT = "all logits are -inf"


def row_error(largest: float) -> str | None:
    """Reason why nothing can be drawn from a row with this largest logit (NaN if it has one)."""
    if math.isfinite(largest):
        return None
    if math.isnan(largest):
        return "the logits have a NaN"
    return "the logits have an infinity" if largest > 0 else NOTHING_LEFT
