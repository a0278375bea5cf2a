"""A draft model as it was read, and whether it goes with the model that it drafts for.

Knows no torch: it is read while that is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from aioserve.drafting.model import ModelDrafter
from aioserve.errors import ConfigError
from aioserve.models.config import DecoderConfig
from aioserve.models.reading import ReadWeights
from aioserve.text.tokenizer import Tokenizer

__all__ = ["ReadDraft"]


class ReadDraft(NamedTuple):
    """A draft model that was read for a drafter."""

    drafter: ModelDrafter
    path: Path
    weights: ReadWeights
    tokenizer: Tokenizer | None
    """None: it has none, and what its ids mean isn't known."""

    def check(self, target: DecoderConfig, tokenizer: Tokenizer | None) -> None:
        """Raise `ConfigError` unless its token ids are those of a model with this tokenizer, if
        any."""
        config = self.weights.config
        if not config.has_head:
            raise self._unfit("has no head, so it makes no tokens")
        if config.vocab_size != target.vocab_size:
            raise self._unfit(
                f"has a vocabulary of {config.vocab_size} tokens, and the model that it is to "
                f"guess for one of {target.vocab_size}"
            )
        if self.tokenizer is None or tokenizer is None:
            return
        if (unlike := tokenizer.unlike(self.tokenizer)) is not None:
            token, there, here = unlike
            raise self._unfit(
                f"has other tokens than the model that it is to guess for: {token!r} is "
                f"{_told(here)} there, and {_told(there)} here"
            )

    def _unfit(self, why: str) -> ConfigError:
        return ConfigError(
            f"drafter 'model': {self.path} {why}",
            argument="speculation",
            value=str(self.path),
        )


def _told(token_id: int | None) -> str:
    return "none" if token_id is None else f"id {token_id}"
