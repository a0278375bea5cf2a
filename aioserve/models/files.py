"""Files of a model: its config, its tokenizer and chat template, its weights.

`model_files` chooses the implementation of `ModelFiles` for a path that `resolve` found: a
directory in Hugging Face's layout, or a GGUF file. No torch here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from aioserve.errors import ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError
from aioserve.json_file import read_json_object
from aioserve.models.checkpoint import Checkpoint, tensor_names
from aioserve.models.config import MAX_CONFIG_BYTES, DecoderConfig
from aioserve.models.families import is_described
from aioserve.models.fields import Fields
from aioserve.models.gguf.model import GGUFModel
from aioserve.models.gguf.parts import is_gguf, meant_file
from aioserve.models.known import BUNDLED_KINDS, KnownKinds
from aioserve.models.model_files import ModelFiles
from aioserve.models.quantization import config as quantization
from aioserve.models.reranking import Reranker, read_reranker
from aioserve.models.retrieval import MODULES_FILE, Retrieval, read_retrieval
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.ends import names_in
from aioserve.text.tokenizer import Tokenizer, why_no_tokenizer

__all__ = ["ModelDirectory", "ModelFiles", "model_files"]


class ModelDirectory(ModelFiles):
    """Directory in Hugging Face's layout: JSON files and .safetensors.

    `architecture`: "llama" reads an unsupported architecture as Llama; None: the one in
    config.json.
    `known`: the families and formats of weights that it may name.
    """

    def __init__(
        self, path: Path, architecture: str | None = None, known: KnownKinds = BUNDLED_KINDS
    ) -> None:
        super().__init__(path)
        self._known = known
        self._architecture = architecture

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
        read = partial(
            DecoderConfig.from_dict,
            values,
            source=source,
            generation=read_json_object(generation, MAX_CONFIG_BYTES) if there else None,
            generation_source=str(generation),
            known=self._known,
        )
        try:
            config = read(read_as=self._architecture)
            return config.without_head() if self._lacks_head(config) else config
        except UnsupportedModelError as error:
            is_known = is_described(Fields(values, source), self._known.families)
            if is_known or not self._has_tensors_of(read, "llama"):
                raise
            raise UnsupportedModelError(
                f"{error}. Its tensors are named as Llama's and have their shapes: "
                'Engine(architecture="llama"), or --architecture llama where it is run, computes '
                "it as Llama, which is right where it differs from Llama in nothing else"
            ) from error

    def _has_tensors_of(self, read: Callable[..., DecoderConfig], architecture: str) -> bool:
        """True if the files have all tensors of a model of that architecture, and no others."""
        try:
            self.weights(read(read_as=architecture)).close()
        except ModelError:
            return False
        return True

    def _lacks_head(self, config: DecoderConfig) -> bool:
        """True if the checkpoint is for embeddings and was saved without the head."""
        if config.tie_word_embeddings or not os.path.lexists(self.path / MODULES_FILE):
            return False
        names = tensor_names(self.path)
        return config.head.name not in map(config.canonical, names)

    def retrieval(self) -> Retrieval:
        return read_retrieval(self.path)

    def reranker(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, wanted: str
    ) -> Reranker | None:
        values, _ = self.config_values()
        return read_reranker(self.path, self.config(), values, tokenizer, template, wanted)

    def why_no_tokenizer(self) -> str | None:
        return why_no_tokenizer(self.path)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self.path)

    def chat_template(self, file: Path | str | None = None) -> ChatTemplate | None:
        return ChatTemplate.from_directory(self.path, file)

    def special_names(self, role: str) -> list[str]:
        return names_in(self.path, role)

    def weights(self, config: DecoderConfig) -> Checkpoint:
        return Checkpoint(self.path, config, config.quantization)

    def weight_file_bytes(self) -> list[int]:
        return [file.stat().st_size for file in sorted(self.path.glob("*.safetensors"))]


def model_files(
    path: Path | str, architecture: str | None = None, known: KnownKinds = BUNDLED_KINDS
) -> ModelFiles:
    """Return the files of the model at `path`: a directory, or a GGUF file.

    `architecture` and `known`: as `ModelDirectory` takes them. A GGUF file names bundled families
    alone. Raises `ModelNotFoundError` where nothing is there, and `ConfigError` for the
    architecture of a GGUF file.
    """
    path = Path(path)
    file = _gguf_file(path)
    if file is None:
        return ModelDirectory(path, architecture, known)
    if architecture is not None:
        raise ConfigError(
            f"architecture must be None for a GGUF file, which has names of its own for tensors, "
            f"got {architecture!r}",
            argument="architecture",
            value=architecture,
        )
    return GGUFModel(file)


def _gguf_file(path: Path) -> Path | None:
    if is_gguf(path):
        return path
    if not os.path.isdir(path):
        raise ModelNotFoundError(f"{path}: no such directory")
    return None if any(path.glob("*.safetensors*")) else meant_file(path)
