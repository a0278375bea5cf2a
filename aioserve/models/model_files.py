"""The interface of all ways to keep a model on disk; `files` chooses among them. No torch here."""

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
from aioserve.text.chat import ChatTemplate
from aioserve.text.ends import end_ids
from aioserve.text.tokenizer import Tokenizer

__all__ = ["ModelFiles"]


class ModelFiles(ABC):
    """One model on disk. Each method reads when it is called, in any thread."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        """The directory or file that names the model."""

    @abstractmethod
    def config_values(self) -> tuple[Mapping[str, Any], str]:
        """What config.json says, or would say, and its name in messages. Raises `ModelError`."""

    @abstractmethod
    def config(self) -> DecoderConfig:
        """Raises `UnsupportedModelError` and `ModelError`."""

    @abstractmethod
    def why_no_tokenizer(self) -> str | None:
        """Reason why there is no tokenizer, and what to do; None if there is one."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Raises `ModelError`."""

    @abstractmethod
    def chat_template(self, file: Path | str | None = None) -> ChatTemplate | None:
        """The model's template, or the one in `file` with the model's special tokens. None if there
        is none. Raises `ModelError`."""

    def special_names(self, role: str) -> list[str]:
        """Names that the files give a token of that role, "eos_token" or "bos_token", beside the
        ids in `config`. Raises `ModelError`."""
        return []

    def ends(self, config: DecoderConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Ids of the tokens that end an answer, by all that the files say and by known names, those
        of `config` first. Raises `ModelError`."""
        said, begins = (
            [tokenizer.id_of(name) for name in self.special_names(role)]
            for role in ("eos_token", "bos_token")
        )
        return end_ids(
            (*config.eos_token_ids, *said), tokenizer.id_of, (config.bos_token_id, *begins)
        )

    def retrieval(self) -> Retrieval:
        """What the files say of embeddings. Raises `ModelError`."""
        return Retrieval()

    def reranker(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, wanted: str
    ) -> Reranker | None:
        """The reranker that the model is, as `read_reranker` says; None where it is none. Raises
        `ModelError`."""
        if wanted in ("auto", "none"):
            return None
        raise ConfigError(
            f"reranker must be auto or none for a GGUF file, got {wanted!r}",
            argument="reranker",
            value=wanted,
        )

    @abstractmethod
    def weights(self, config: DecoderConfig) -> StoredWeights:
        """The weights that a model of this `config()` needs, to be closed. Raises `WeightsError`,
        for all that the files' headers can tell."""

    @abstractmethod
    def weight_file_bytes(self) -> list[int]:
        """Sizes of the files with weights."""
