"""What a model is read from: its config, its tokenizer and chat template, its weights.

`ModelFiles` is one interface for all ways to keep a model on disk; `model_files` chooses the
implementation by the path, which `resolve` finds: a directory in Hugging Face's layout, or a GGUF
file. No torch here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioserve.errors import ModelError, ModelNotFoundError
from aioserve.json_file import read_json_object
from aioserve.models.checkpoint import Checkpoint
from aioserve.models.config import MAX_CONFIG_BYTES, DecoderConfig
from aioserve.models.gguf.model import GGUFModel
from aioserve.models.gguf.parts import is_gguf, meant_file
from aioserve.models.model_files import ModelFiles
from aioserve.models.quantization import config as quantization
from aioserve.text.chat import ChatTemplate
from aioserve.text.tokenizer import Tokenizer, why_no_tokenizer

__all__ = ["ModelDirectory", "ModelFiles", "model_files"]


class ModelDirectory(ModelFiles):
    """A directory as Hugging Face has them: JSON files and .safetensors."""

    def config_values(self) -> tuple[Mapping[str, Any], str]:
        file = self.path / "config.json"
        if not os.path.lexists(file):
            raise ModelError(f"{self.path}: no config.json")
        values, source = read_json_object(file, MAX_CONFIG_BYTES), str(file)
        if values.get(quantization.SAID) is None:
            for name, method in quantization.FILES.items():
                if os.path.lexists(other := self.path / name):
                    said = {"quant_method": method} | read_json_object(other, MAX_CONFIG_BYTES)
                    return values | {quantization.SAID: said}, f"{source} and {name}"
        return values, source

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
    """The files of the model at `path`: a directory, or a GGUF file, which may be the one that is
    meant in a directory. Raises `ModelNotFoundError` where nothing is there."""
    path = Path(path)
    if is_gguf(path):
        return GGUFModel(path)
    if not os.path.isdir(path):
        raise ModelNotFoundError(f"{path}: no such directory")
    file = None if any(path.glob("*.safetensors*")) else meant_file(path)
    return ModelDirectory(path) if file is None else GGUFModel(file)
