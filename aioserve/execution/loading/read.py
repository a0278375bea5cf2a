"""Reads a model's files: weights, draft, tokenizer and chat template.

It doesn't import torch: that happens while files are read, and takes as long.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aioserve import _native
from aioserve.arguments import shown
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.execution.process_memory import total_memory_bytes
from aioserve.execution.runner import Text
from aioserve.execution.speculation.drafts.read import DraftReader
from aioserve.formats.weights import ComputedFormats
from aioserve.models.files import ModelDirectory, ModelFiles, model_files
from aioserve.models.gguf.parts import holds_gguf
from aioserve.models.known import KnownKinds
from aioserve.models.reading import ReadWeights, ReportBytes, WeightReading
from aioserve.models.resolve import resolve
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.tokenizer import Tokenizer
from aioserve.text.turn_marks import unended_mark

__all__ = ["ModelReader", "check_kernels"]

logger: logging.Logger = logging.getLogger(__name__)


def check_kernels() -> None:
    """Warn about a build without the best kernels for this CPU.

    Raises `ConfigError` for environment variables that name no known kernels.
    """
    try:
        info = _native.cpu_info()  # reads AIOSERVE_ISA and AIOSERVE_NUM_THREADS
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if info["best_isa"] not in info["isas_supported"]:
        logger.warning(
            "This build has no kernels for %s, the best that this CPU has, and computes with "
            "%s: in a checkout, make build",
            info["best_isa"],
            info["isa"],
        )


class ModelReader:
    """Reads one model and its draft. Methods may be called on any thread.

    They raise `ModelError` for files that can't be read, and `ConfigError` for options that they
    can't meet.
    """

    def __init__(
        self, model: str, config: EngineConfig, formats: ComputedFormats, known: KnownKinds
    ) -> None:
        """`formats`: those that the backend computes. `known`: the kinds of models that can be
        read."""
        self._model = model
        self._config = config
        self._formats = formats
        self._readings: list[WeightReading] = []
        self._stopped = False
        self.drafts: DraftReader = DraftReader(
            model,
            config,
            lambda files, rounding: self._read(files, quantization=rounding),
            known,
        )
        """Reads the draft model or head."""
        self._files = files = model_files(resolve(model), config.architecture, known)
        if isinstance(files, ModelDirectory) and holds_gguf(files.path):
            logger.warning(
                "%s: holds .safetensors and GGUF; its .safetensors are read. Give the path of a "
                "GGUF file to read that",
                files.path,
            )

    def stop(self) -> None:
        """Let every reading of weights end soon, now and later."""
        self._stopped = True
        for reading in self._readings:
            reading.stop()

    def read_weights(self, progress: ReportBytes | None = None) -> ReadWeights:
        """Read the weights of the model. `progress` is called with bytes done and total bytes."""
        files = self._files
        weights = self._read(
            files,
            progress,
            quantization=self._config.quantization,
            max_model_len=self._config.max_model_len,
        )
        if weights.config.is_text_alone:
            logger.warning(
                "%s: %s takes images as well; aioserve serves its text alone",
                files.path,
                weights.config.architecture,
            )
        for setting in weights.config.generation.unsupported:
            logger.warning(
                "%s: generation_config.json asks for %s, which aioserve can't apply: answers will "
                "differ from what the model's makers meant",
                files.path,
                setting,
            )
        return weights

    def _read(
        self, files: ModelFiles, progress: ReportBytes | None = None, **options: Any
    ) -> ReadWeights:
        reading = WeightReading(
            files,
            dtype=self._config.dtype,
            formats=self._formats,
            memory_bytes=total_memory_bytes(),
            **options,
        )
        self._readings.append(reading)
        if self._stopped:
            reading.stop()
        with reading:
            return reading.read(progress)

    def read_text(self) -> Text:
        """Read the tokenizer and chat template of the model, if it has them."""
        files = self._files
        why_none = files.why_no_tokenizer()
        if why_none is None:
            file = self._config.chat_template
            if file is not None and not Path(file).exists():
                raise ConfigError(
                    f"chat_template must be a file, and there is no {shown(file)}",
                    argument="chat_template",
                    value=file,
                )
            template = files.chat_template(file)
            tokenizer = files.tokenizer()
            reranker = files.reranker(tokenizer, template, self._config.reranker)
            end_ids = files.ends(files.config(), tokenizer)
            self._check_turns(files, tokenizer, template, end_ids)
            return Text(tokenizer, template, "", files.retrieval(), reranker, end_ids)
        if self._config.chat_template is not None:
            raise ConfigError(
                f"chat_template={self._config.chat_template!r} has no effect with a model that has "
                f"no tokenizer: leave it out ({why_none})",
                argument="chat_template",
                value=self._config.chat_template,
            )
        logger.warning(
            "%s. Until then prompts must be token ids, and answers have no text", why_none
        )
        return Text(None, None, why_none, files.retrieval())

    def _check_turns(
        self,
        files: ModelFiles,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        end_ids: Sequence[int],
    ) -> None:
        """Warn if the template closes turns with a token that ends no answer."""
        mark = None if template is None else unended_mark(template, tokenizer, end_ids)
        if mark is not None:
            logger.warning(
                "%s: the chat template closes turns with %s, which ends no answer: answers may go "
                "on after it. Name its id in eos_token_id of generation_config.json, or in "
                "stop_token_ids of requests",
                files.path,
                shown(mark),
            )
