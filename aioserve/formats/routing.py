"""Rules by which a router's scores choose experts. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from aioserve.errors import UnsupportedModelError

__all__ = ["ClampedSwiglu", "Routing"]


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """Activation of GPT-OSS's experts: `(up + 1) * gate * sigmoid(gain * gate)`.

    First, gate is clamped to at most `limit`, and up to the range from -`limit` to `limit`."""

    gain: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Choice of `top_k` experts for each token, by the highest scores. A tie goes to the first.

    Scores are a softmax over all experts (Shazeer et al., "Outrageously large neural networks",
    2017), or with `sigmoid`, a sigmoid of each expert's own logit. With groups, only experts of the
    `top_groups` best groups can be chosen (DeepSeek-AI, "DeepSeek-V2", 2024, and "DeepSeek-V3",
    2024).
    """

    experts: int
    top_k: int
    sigmoid: bool = False
    normalized: bool = False
    """True if the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights, applied after `normalized`."""
    groups: int = 1
    """Number of groups, of equally many neighbouring experts each."""
    top_groups: int = 1
    """Number of groups from which experts are chosen."""
    group_best: int = 1
    """Number of a group's best experts whose scores sum to the score of the group."""

    def __post_init__(self) -> None:
        if self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise UnsupportedModelError(
                f"{self.experts} experts must be in groups of the same size, and from 1 of them to "
                f"all be chosen, got {self.groups} groups and top_groups={self.top_groups}"
            )
        size = self.experts // self.groups
        if not 1 <= self.group_best <= size or not 1 <= self.top_k <= size * self.top_groups:
            raise UnsupportedModelError(
                f"top_k must be from 1 to the {size * self.top_groups} experts of the chosen "
                f"groups, and group_best from 1 to {size}, got {self.top_k} and {self.group_best}"
            )
