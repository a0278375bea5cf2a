"""How a router's scores choose experts. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from aioserve.errors import UnsupportedModelError

__all__ = ["ClampedSwiglu", "Routing"]


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """What GPT-OSS's experts make of gate and up: `(up + 1) * gate * sigmoid(gain * gate)`, where
    gate is at most `limit`, and up from -`limit` to `limit`."""

    gain: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Each token goes to the `top_k` experts of the highest scores, of equal ones to the lowest.

    A softmax over all experts scores them (Shazeer et al., "Outrageously large neural networks",
    2017), or a sigmoid each by itself. With groups, the experts of the `top_groups` best groups can
    be chosen (DeepSeek-AI, "DeepSeek-V2", 2024, and "DeepSeek-V3", 2024).
    """

    experts: int
    top_k: int
    sigmoid: bool = False
    normalized: bool = False
    """Whether the weights of the chosen are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights, behind that."""
    groups: int = 1
    """Groups of neighbouring experts, of the same size."""
    top_groups: int = 1
    group_best: int = 1
    """A group's score is the sum of so many of its best experts' scores."""

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
