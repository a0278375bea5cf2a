"""Expected and counted tokens of a step that verifies draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted_tokens", "expected_tokens"]


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Return the expected tokens of a step that verifies `num_draft_tokens` draft tokens.

    Each draft token is right in a share `acceptance` of the steps in which those before it are. The
    sum is 1 + a + .. + a^k, which is (1 - a^(k+1)) / (1 - a). See Leviathan et al., "Fast Inference
    from Transformers via Speculative Decoding", ICML 2023, section 3.1.
    """
    return sum([acceptance**place for place in range(num_draft_tokens + 1)])


def counted_tokens(drafted: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """Return the mean tokens that a step with 1, 2, .. draft tokens has brought.

    At each place, the mean is over the steps with a draft token there. `drafted` are draft tokens
    by place, and `accepted` the right ones. The list ends before the first place without draft
    tokens.
    """
    tokens, counted = 1.0, list[float]()
    for place, verified in enumerate(drafted):
        if not verified:
            break
        tokens += (accepted[place] if place < len(accepted) else 0) / verified
        counted.append(tokens)
    return counted
