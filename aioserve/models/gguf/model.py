"""GGUF file as `ModelFiles`. No torch here."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from aioserve.errors import WeightsError
from aioserve.models.config import UNSAID_OF_GGUF, DecoderConfig
from aioserve.models.fields import Fields
from aioserve.models.gguf.config import generation_of, read_config
from aioserve.models.gguf.file import Metadata, short_decimal
from aioserve.models.gguf.parts import open_parts
from aioserve.models.gguf.tokenizer import GGUFVocabulary
from aioserve.models.gguf.weights import GGUFWeights
from aioserve.models.model_files import ModelFiles
from aioserve.models.stored import StoredTensor
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.tokenizer import Tokenizer
from aioserve.text.tokenizer_file import parse_tokenizer

__all__ = ["GGUFModel"]

_MOST_VECTOR_VALUES = 1 << 12
"""Most numbers in a tensor that belongs to the config: one for each pair of a head's dimensions."""


class _Said(NamedTuple):
    """Contents of the files, read once."""

    metadata: Metadata
    config: dict[str, Any]
    vocabulary: GGUFVocabulary | None
    num_bytes: list[int]


class GGUFModel(ModelFiles):
    """GGUF model whose only file, or first part, is `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        self._said: _Said | None = None

    def config_values(self) -> tuple[Mapping[str, Any], str]:
        return self._read().config, str(self.path)

    def config(self) -> DecoderConfig:
        values, source = self.config_values()
        generation = generation_of(self._read().metadata, source)
        config = DecoderConfig.from_dict(
            values, source=source, generation=generation, generation_source=source
        )
        return config if generation else replace(config, generation=UNSAID_OF_GGUF)

    def why_no_tokenizer(self) -> str | None:
        if self._read().vocabulary is None:
            return f"{self.path} has no tokenizer: take a file that was converted with one"
        return None

    def tokenizer(self) -> Tokenizer:
        if (vocabulary := self._read().vocabulary) is None:
            raise WeightsError(str(self.why_no_tokenizer()))
        source = str(self.path)
        backend, size = parse_tokenizer(vocabulary.tokenizer_json(), source)
        return Tokenizer(backend, source=source, vocab_size=size)

    def chat_template(self, file: Path | str | None = None) -> ChatTemplate | None:
        vocabulary = self._read().vocabulary
        tokens = {} if vocabulary is None else vocabulary.special_tokens
        if file is not None:
            return ChatTemplate.from_file(file, special_tokens=tokens)
        if vocabulary is None:
            return None
        source, for_tools = vocabulary.chat_template, vocabulary.tool_use_template
        if source is None:
            source, for_tools = for_tools, None
        if source is None:
            return None
        origin = str(self.path)
        tool_use = for_tools and ChatTemplate(for_tools, special_tokens=tokens, origin=origin)
        return ChatTemplate(source, special_tokens=tokens, origin=origin, tool_use=tool_use or None)

    def weights(self, config: DecoderConfig) -> GGUFWeights:
        return GGUFWeights(self.path, config)

    def weight_file_bytes(self) -> list[int]:
        return self._read().num_bytes

    def _read(self) -> _Said:
        with self._lock:
            if self._said is None:
                self._said = self._opened()
            return self._said

    def _opened(self) -> _Said:
        source = str(self.path)
        with ExitStack() as stack:
            files = open_parts(self.path, stack)
            tensors = {name: t for file in files for name, t in file.tensors.items()}
            metadata, vocabulary = files[0].metadata, None
            config = read_config(
                metadata,
                {name: stored.shape for name, stored in tensors.items()},
                lambda name: _vector(tensors[name]),
                source,
            )
            kind = Fields(metadata, source).text("tokenizer.ggml.model", "none")
            if kind not in ("none", "no_vocab"):
                vocabulary = GGUFVocabulary(metadata, source)
                config["bos_token_id"] = vocabulary.bos_token_id
                config["eos_token_id"] = list(vocabulary.eos_token_ids)
            return _Said(metadata, config, vocabulary, [file.num_bytes for file in files])


def _vector(stored: StoredTensor) -> list[float]:
    if stored.dtype != "F32" or len(stored.shape) != 1 or stored.shape[0] > _MOST_VECTOR_VALUES:
        raise WeightsError(
            f"{stored.label} must be at most {_MOST_VECTOR_VALUES} numbers of F32, got "
            f"{list(stored.shape)} of {stored.dtype}"
        )
    return [short_decimal(number) for number in stored.read()]
