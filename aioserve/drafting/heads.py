"""Heads as drafters: they read hidden states of the served model."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.arguments import check, optional, text
from aioserve.drafting.loaded import MAX_PATH_CHARS, LoadedDrafter
from aioserve.errors import ConfigError

__all__ = ["Eagle3Drafter", "HeadDrafter", "MTPDrafter", "MedusaDrafter"]


class HeadDrafter(LoadedDrafter):
    """Drafts by a head that was trained for the served model: a directory with config.json and
    weights. For each token the model keeps the hidden states that the head reads, in pages beside
    its keys and values."""

    def __init__(self, *, path: str | None = None) -> None:
        """`path` is the directory of the head. None: the head that comes with the served embedded
        model. Raises `ConfigError` for an invalid path."""
        super().__init__()
        self.path: str | None = check(ConfigError, "path", path, optional(text(1, MAX_PATH_CHARS)))


class Eagle3Drafter(HeadDrafter):
    """Usually one decoder layer. It reads hidden states of three of the model's layers beside the
    next token, and then its own output (Li et al., "EAGLE-3", 2025)."""

    kind = "eagle3"


class MTPDrafter(HeadDrafter):
    """One decoder layer. It reads the model's last hidden state beside the next token, and then its
    own output (Cai et al., "FastMTP", 2025)."""

    kind = "mtp"


class MedusaDrafter(HeadDrafter):
    """Heads that each draft another of the next tokens from the model's last hidden state (Cai et
    al., "Medusa", 2024)."""

    kind = "medusa"

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        """Return alternatives of the first head."""
        return self._drafter.branches(slot, limit)
