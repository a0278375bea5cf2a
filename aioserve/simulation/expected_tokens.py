"""What a step that verifies guesses brings, as it is expected and as it was counted."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted_tokens", "expected_tokens"]


def expected_tokens(acceptance: float, guesses: int) -> float:
    """Expected tokens of a step that verifies so many guesses, each right in a share `acceptance`
    of the steps in which those before it are: 1 + a + .. + a^k, which is (1 - a^(k+1)) / (1 - a)
    (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
    section 3.1)."""
    return sum([acceptance**place for place in range(guesses + 1)])


def counted_tokens(drafted: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """Tokens that a step with 1, 2, .. guesses has brought, on average over the steps that had a
    guess at each place. `drafted` are guesses by place and `accepted` those that were right; ends
    before the first place without any."""
    tokens, counted = 1.0, list[float]()
    for place, verified in enumerate(drafted):
        if not verified:
            break
        tokens += (accepted[place] if place < len(accepted) else 0) / verified
        counted.append(tokens)
    return counted
