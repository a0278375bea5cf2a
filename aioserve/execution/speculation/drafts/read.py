"""Reads a draft model or head, and checks that it fits the model that it drafts for.

Imports no torch, because it runs while torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from aioserve import assets
from aioserve.arguments import shown
from aioserve.config import EngineConfig, Quantization
from aioserve.drafting.heads import HeadDrafter
from aioserve.drafting.loaded import LoadedDrafter
from aioserve.drafting.model import ModelDrafter
from aioserve.errors import ConfigError, InvariantError, ModelError
from aioserve.models.config import DecoderConfig
from aioserve.models.files import ModelFiles, model_files
from aioserve.models.heads.read import ReadHead
from aioserve.models.known import KnownKinds
from aioserve.models.reading import ReadWeights
from aioserve.models.resolve import resolve
from aioserve.text.tokenizer import Tokenizer

__all__ = ["AnyReadDraft", "DraftReader", "ReadDraft", "ReadDraftHead", "naming"]


class ReadDraft(NamedTuple):
    """A draft model that was read for a drafter."""

    drafter: LoadedDrafter
    path: Path
    weights: ReadWeights
    tokenizer: Tokenizer | None
    """Tokenizer of the draft model. If there is none, the meaning of its ids is unknown."""

    def kept_layers(self, target: DecoderConfig) -> tuple[int, ...]:
        """Return the target's layers that it reads: see `kept_layers` of `Decoder`."""
        return ()

    def check(self, target: DecoderConfig, tokenizer: Tokenizer | None) -> None:
        """Raise `ConfigError` unless it has the token ids of the target, and of `tokenizer` if
        given."""
        config = self.weights.config
        if not config.has_head:
            raise self._unfit("has no head, so it makes no tokens")
        if config.vocab_size != target.vocab_size:
            raise self._unfit(
                f"has a vocabulary of {config.vocab_size} tokens, and the model that it is to "
                f"draft for one of {target.vocab_size}"
            )
        if self.tokenizer is None or tokenizer is None:
            return
        if (unlike := tokenizer.unlike(self.tokenizer)) is not None:
            token, there, here = unlike
            raise self._unfit(
                f"has other tokens than the model that it is to draft for: {token!r} is "
                f"{_id_text(here)} there, and {_id_text(there)} here"
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
        """Return the target's layers that it reads: see `kept_layers` of `Decoder`.

        Raises `ModelError` for a layer that the target lacks.
        """
        with naming(self.drafter):
            return self.head.layers_read(target)

    def check(self, target: DecoderConfig, tokenizer: Tokenizer | None) -> None:
        """Raise `ConfigError` for a kind that isn't the drafter's, and `ModelError` for another
        target.

        A head has no tokenizer: its tokens are its target's.
        """
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


class DraftReader:
    """Reads the draft of one model. Methods may be called on any thread."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        read_weights: Callable[[ModelFiles, Quantization | None], ReadWeights],
        known: KnownKinds,
    ) -> None:
        """`model`: the name of the one that is served. `known`: the kinds of models that can be
        read."""
        self._known = known
        self._model = model
        self._config = config
        self._read_weights = read_weights

    def read(self, drafter: LoadedDrafter) -> AnyReadDraft:
        """Read a draft model or head, with its weights rounded as its drafter says.

        `quantization` of the engine has no effect on it. Raises `ModelError` for unreadable files,
        and `ConfigError` for options that they can't meet.
        """
        with naming(drafter):
            if isinstance(drafter, HeadDrafter):
                return ReadDraftHead(drafter, ReadHead.of(self._path(drafter)))
            if not isinstance(drafter, ModelDrafter):
                raise InvariantError(f"nobody knows how drafter {drafter.kind!r} is loaded")
            path = self._path(drafter)
            files = model_files(path, known=self._known)
            tokenizer = None if files.why_no_tokenizer() is not None else files.tokenizer()
            return ReadDraft(drafter, path, self._read_rounded(files, drafter), tokenizer)

    def check_path(self, drafter: LoadedDrafter) -> None:
        """Raise unless the location of the draft is known. Reads nothing large."""
        with naming(drafter):
            self._path(drafter)

    def _read_rounded(self, files: ModelFiles, drafter: ModelDrafter) -> ReadWeights:
        try:
            return self._read_weights(files, drafter.quantization)
        except ConfigError as error:
            raise ConfigError(
                f"drafter 'model': {error}", argument="speculation", value=self._config.speculation
            ) from error

    def _path(self, drafter: LoadedDrafter) -> Path:
        if drafter.path is not None:
            return resolve(drafter.path)
        if isinstance(drafter, ModelDrafter) and drafter.quantization is not None:
            return resolve(self._model)
        is_model = isinstance(drafter, ModelDrafter)
        kind = "model" if is_model else drafter.kind
        if (path := assets.draft_path(self._model, kind)) is not None:
            return path
        none = "no draft model" if is_model else "no such head"
        raise ConfigError(
            f"drafter {drafter.kind!r} needs the option path: {none} comes with "
            f"{shown(self._model)}",
            argument="speculation",
            value=self._config.speculation,
        )


def _id_text(token_id: int | None) -> str:
    return "none" if token_id is None else f"id {token_id}"
