"""What every backend's draws have in common. Knows numbers alone."""

from __future__ import annotations

import math

__all__ = ["LINES", "NOTHING_LEFT", "row_error"]

LINES = 32
"""Where nothing is left out, a row is taken as a matrix of this many lines, whose columns are
walked through one after the other."""


NOTHING_LEFT = "all logits are -inf"


def row_error(largest: float) -> str | None:
    """Why nothing can be drawn from a row whose largest logit is this (NaN if there is one)."""
    if math.isfinite(largest):
        return None
    if math.isnan(largest):
        return "the logits have a NaN"
    return "the logits have an infinity" if largest > 0 else NOTHING_LEFT
