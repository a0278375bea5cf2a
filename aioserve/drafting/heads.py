"""Heads as drafters: they read hidden states of the model that is served."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.arguments import check, optional, text
from aioserve.drafting.loaded import MAX_PATH_CHARS, LoadedDrafter
from aioserve.errors import ConfigError

__all__ = ["Eagle3Drafter", "HeadDrafter", "MTPDrafter", "MedusaDrafter"]


class HeadDrafter(LoadedDrafter):
    """Guesses by a head that was trained for the model that is served: a directory with config.json
    and weights. The model keeps, for each token, the hidden states that the head reads, in pages
    beside those of its keys and values."""

    def __init__(self, *, path: str | None = None) -> None:
        """`path`: the directory of the head; None: the one that comes with the embedded model that
        is served. Raises `ConfigError` for a path that is none."""
        super().__init__()
        self.path: str | None = check(ConfigError, "path", path, optional(text(1, MAX_PATH_CHARS)))


class Eagle3Drafter(HeadDrafter):
    """One decoder layer, mostly, that reads hidden states of three of the model's layers beside the
    next token, and then its own output (Li et al., "EAGLE-3", 2025)."""

    kind = "eagle3"


class MTPDrafter(HeadDrafter):
    """One decoder layer that reads the model's last hidden state beside the next token, and then
    its own output (Cai et al., "FastMTP", 2025)."""

    kind = "mtp"


class MedusaDrafter(HeadDrafter):
    """Heads that each guess another of the next tokens from the model's last hidden state (Cai et
    al., "Medusa", 2024)."""

    kind = "medusa"

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        """What the first head guesses otherwise."""
        return self._guesses.branches(slot, limit)
