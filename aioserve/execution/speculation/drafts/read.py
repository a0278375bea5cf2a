"""A draft model or a head as it was read, and whether it goes with the model that it drafts for.

Knows no torch: it is read while that is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from aioserve.drafting.loaded import LoadedDrafter
from aioserve.errors import ConfigError, ModelError
from aioserve.models.config import DecoderConfig
from aioserve.models.heads.read import ReadHead
from aioserve.models.reading import ReadWeights
from aioserve.text.tokenizer import Tokenizer

__all__ = ["AnyReadDraft", "ReadDraft", "ReadDraftHead", "naming"]


class ReadDraft(NamedTuple):
    """A draft model that was read for a drafter."""

    drafter: LoadedDrafter
    path: Path
    weights: ReadWeights
    tokenizer: Tokenizer | None
    """None: it has none, and what its ids mean isn't known."""

    def kept_layers(self, target: DecoderConfig) -> tuple[int, ...]:
        """What it reads of its target, as `kept_layers` of `Decoder` has it."""
        return ()

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


class ReadDraftHead(NamedTuple):
    """A head that was read for a drafter."""

    drafter: LoadedDrafter
    head: ReadHead

    def kept_layers(self, target: DecoderConfig) -> tuple[int, ...]:
        """What it reads of its target, as `kept_layers` of `Decoder` has it. Raises `ModelError`
        for a layer that the target lacks."""
        with naming(self.drafter):
            return self.head.layers_read(target)

    def check(self, target: DecoderConfig, tokenizer: Tokenizer | None) -> None:
        """Raise `ConfigError` for a head of another kind than the drafter's and `ModelError` for
        one of another target. A head has no tokenizer: its tokens are its target's."""
        named, kind = self.drafter.kind, self.head.config.kind
        if named != kind:
            raise ConfigError(
                f"drafter {named!r}: {self.head.path} has a head of kind {kind}, which the drafter "
                f"{kind!r} takes",
                argument="speculation",
                value=str(self.head.path),
            )
        with naming(self.drafter):
            self.head.check(target)


@contextmanager
def naming(drafter: LoadedDrafter) -> Iterator[None]:
    """Let a `ModelError` name the drafter."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"drafter {drafter.kind!r} can't be loaded: {error}") from error


AnyReadDraft = ReadDraft | ReadDraftHead


def _told(token_id: int | None) -> str:
    return "none" if token_id is None else f"id {token_id}"
