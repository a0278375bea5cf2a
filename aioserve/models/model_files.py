"""Interface of the formats that keep a model on disk; `files` chooses one. No torch here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioserve.errors import ConfigError
from aioserve.models.config import DecoderConfig
from aioserve.models.reranking import Reranker
from aioserve.models.retrieval import Retrieval
from aioserve.models.stored import StoredWeights
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.ends import end_ids
from aioserve.text.tokenizer import Tokenizer

__all__ = ["ModelFiles"]


class ModelFiles(ABC):
    """One model on disk. Methods read the files on each call, and may be called in any thread."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        """Directory or file of the model."""

    @abstractmethod
    def config_values(self) -> tuple[Mapping[str, Any], str]:
        """Return the values of config.json, or their equivalent, and its name for messages.

        Raises `ModelError`."""

    @abstractmethod
    def config(self) -> DecoderConfig:
        """Read the decoder's configuration. Raises `UnsupportedModelError` and `ModelError`."""

    @abstractmethod
    def why_no_tokenizer(self) -> str | None:
        """Reason why there is no tokenizer, and what to do about it; None if there is one."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Read the tokenizer. Raises `ModelError`."""

    @abstractmethod
    def chat_template(self, file: Path | str | None = None) -> ChatTemplate | None:
        """Return the model's template, or the one in `file` with the model's special tokens.

        None if the model has no template. Raises `ModelError`."""

    def special_names(self, role: str) -> list[str]:
        """Return the names that the files give tokens of a role: "eos_token" or "bos_token".

        The ids in `config` come on top of these. Raises `ModelError`."""
        return []

    def ends(self, config: DecoderConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of the tokens that end a completion, those of `config` first.

        They come from the files and from a list of known names. Raises `ModelError`."""
        said, begins = (
            [tokenizer.id_of(name) for name in self.special_names(role)]
            for role in ("eos_token", "bos_token")
        )
        return end_ids(
            (*config.eos_token_ids, *said), tokenizer.id_of, (config.bos_token_id, *begins)
        )

    def retrieval(self) -> Retrieval:
        """Read the settings for embeddings. Raises `ModelError`."""
        return Retrieval()

    def reranker(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, wanted: str
    ) -> Reranker | None:
        """Return the settings of a reranker, found as by `read_reranker`; None for other models.

        `wanted` is the `reranker` option. Raises `ModelError`."""
        if wanted in ("auto", "none"):
            return None
        raise ConfigError(
            f"reranker must be auto or none for a GGUF file, got {wanted!r}",
            argument="reranker",
            value=wanted,
        )

    @abstractmethod
    def weights(self, config: DecoderConfig) -> StoredWeights:
        """Open the weights that a model of this `config()` needs; the caller closes them.

        Raises `WeightsError` for every fault that the files' headers show."""

    @abstractmethod
    def weight_file_bytes(self) -> list[int]:
        """Return the size of each file with weights, in bytes."""
