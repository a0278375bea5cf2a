"""The form of a claim of the books, and of what a benchmark found about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["CANT", "CORRECTED", "HOLDS", "IN_PART", "NANO", "NOT", "SCRATCH", "UNBUILT"]
__all__ += ["Claim", "Found", "row"]

NANO = "Nano-Serving"
SCRATCH = "LLM Serving from Scratch"

HOLDS, IN_PART, NOT = "holds", "holds in part", "does not hold"
CORRECTED = "corrected"
"""The verdict on figures that contradict the formula beside them."""
CANT = "can't be measured here"
UNBUILT = "not built yet"


@dataclass(frozen=True)
class Found:
    """The answer to one claim. No field is empty."""

    here: str
    """Our figures, with units."""
    verdict: str
    why: str


@dataclass(frozen=True)
class Claim:
    """One claim, with the way to measure it."""

    name: str
    """The word that `python benchmarks/books.py` takes."""
    text: str
    """The book that says it."""
    claim: str
    condition: str
    """The circumstances that the book names for it."""
    measure: Callable[[], Found]
    varies: bool = False
    """True if the figures differ by machine: a clock or the rounding of a processor decides."""


def row(claim: Claim, found: Found) -> str:
    """One line of the table, in Markdown."""
    cells = (
        f"`{claim.name}`",
        claim.text,
        claim.claim,
        claim.condition,
        found.here,
        found.verdict,
        found.why,
    )
    return f"| {' | '.join(cells)} |"
