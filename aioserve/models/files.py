"""What a model is read from: its config, its tokenizer and chat template, its weights.

`ModelFiles` is one interface for all ways to keep a model on disk; `model_files` chooses the
implementation by the path, which `resolve` finds. No torch here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioserve.errors import ModelError, ModelNotFoundError
from aioserve.json_file import read_json_object
from aioserve.models.checkpoint import Checkpoint
from aioserve.models.config import MAX_CONFIG_BYTES, DecoderConfig
from aioserve.models.stored import StoredWeights
from aioserve.text.chat import ChatTemplate
from aioserve.text.tokenizer import Tokenizer, why_no_tokenizer

__all__ = ["ModelDirectory", "ModelFiles", "model_files"]


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

    @abstractmethod
    def weights(self, config: DecoderConfig) -> StoredWeights:
        """The weights that a model of this `config()` needs, to be closed. Raises `WeightsError`,
        for all that the files' headers can tell."""

    @abstractmethod
    def weight_file_bytes(self) -> list[int]:
        """Sizes of the files with weights."""


class ModelDirectory(ModelFiles):
    """A directory as Hugging Face has them: JSON files and .safetensors."""

    def config_values(self) -> tuple[Mapping[str, Any], str]:
        file = self.path / "config.json"
        if not os.path.lexists(file):
            raise ModelError(f"{self.path}: no config.json")
        return read_json_object(file, MAX_CONFIG_BYTES), str(file)

    def config(self) -> DecoderConfig:
        values, source = self.config_values()
        generation = self.path / "generation_config.json"
        there = os.path.lexists(generation)
        return DecoderConfig.from_dict(
            values,
            source=source,
            generation=read_json_object(generation, MAX_CONFIG_BYTES) if there else None,
            generation_source=str(generation),
        )

    def why_no_tokenizer(self) -> str | None:
        return why_no_tokenizer(self.path)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self.path)

    def chat_template(self, file: Path | str | None = None) -> ChatTemplate | None:
        return ChatTemplate.from_directory(self.path, file)

    def weights(self, config: DecoderConfig) -> Checkpoint:
        return Checkpoint(self.path, config, config.quantization)

    def weight_file_bytes(self) -> list[int]:
        return [file.stat().st_size for file in sorted(self.path.glob("*.safetensors"))]


def model_files(path: Path | str) -> ModelFiles:
    """The files of the model at `path`. Raises `ModelNotFoundError` where nothing is there."""
    path = Path(path)
    if not os.path.isdir(path):
        raise ModelNotFoundError(f"{path}: no such directory")
    return ModelDirectory(path)
