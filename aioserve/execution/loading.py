"""A model name and options become a `LoadedModel`: weights, KV storage, tokenizer, step thread.

Files are read, and weights packed, while torch is imported, which takes as long; so no torch here.
`assembling` makes the model of what was read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioserve import _native, assets
from aioserve.arguments import shown
from aioserve.config import EngineConfig, Speculation, used_backend
from aioserve.drafting.heads import HeadDrafter
from aioserve.drafting.loaded import LoadedDrafter
from aioserve.drafting.model import ModelDrafter
from aioserve.errors import ConfigError, InvariantError
from aioserve.execution.devices import chosen_device
from aioserve.execution.drafts.read import AnyReadDraft, ReadDraft, ReadDraftHead, naming
from aioserve.execution.imports import import_without_collecting, map_torch
from aioserve.execution.process_memory import total_memory_bytes
from aioserve.execution.runner import LoadedModel, Text
from aioserve.formats.weights import CUDA, NATIVE, PLAIN_FLOATS, ComputedFormats
from aioserve.models.files import ModelDirectory, ModelFiles, model_files
from aioserve.models.gguf.parts import holds_gguf
from aioserve.models.heads.read import ReadHead
from aioserve.models.reading import ReadWeights, ReportBytes, WeightReading
from aioserve.models.resolve import resolve
from aioserve.text.chat import ChatTemplate
from aioserve.text.tokenizer import Tokenizer
from aioserve.text.turn_marks import unended_mark

__all__ = ["load"]

T = TypeVar("T")
ReportGraphs = Callable[[int, int], None]

logger: logging.Logger = logging.getLogger(__name__)


async def load(
    model: str,
    config: EngineConfig,
    *,
    num_slots: int,
    progress: ReportBytes | None = None,
    capture_progress: ReportGraphs | None = None,
    drafter: LoadedDrafter | None = None,
) -> LoadedModel:
    """Load off the event loop. `progress` is called in a loading thread with bytes done and bytes
    in all; `capture_progress` on the loop with CUDA graphs captured and graphs in all, from 0 on.
    What they raise ends the loading. `drafter`: its model is loaded beside the other.

    Raises `ModelError` for a model that can't be loaded and `ConfigError` for options that it, or
    this machine, can't meet.
    """
    return await _Loader(model, config, progress, capture_progress, drafter).load(num_slots)


@dataclass
class _Loader:
    model: str
    config: EngineConfig
    progress: ReportBytes | None
    capture_progress: ReportGraphs | None
    drafter: LoadedDrafter | None
    device: str = "cpu"
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """What each part took, by the clock; parts run at the same time."""
    _readings: list[WeightReading] = field(default_factory=list[WeightReading])
    _left: bool = False

    async def load(self, num_slots: int) -> LoadedModel:
        files = await asyncio.to_thread(self._find)
        speculation = self.config.speculation
        if speculation is not None and self.drafter is not None:
            self._check_acceptance(speculation)
        if self.drafter is not None:  # before anything large is read
            await asyncio.to_thread(self._named_draft_path, self.drafter)
        await self._begin("imports", map_torch)  # alone: whatever starts threads waits for it
        weights = self._begin("weights", lambda: self._read_weights(files))
        draft = self._begin_draft()
        try:
            return await self._load(files, weights, draft, num_slots)
        finally:
            await self._leave([weights] if draft is None else [weights, draft])

    def _check_acceptance(self, speculation: Speculation) -> None:
        if speculation.acceptance == "rejection" and self.device != "cpu":
            raise ConfigError(
                f'acceptance must be "match" where a draft model or head guesses on {self.device}, '
                'got "rejection": on a GPU no guesses are verified by rejection sampling',
                argument="speculation",
                value=speculation,
            )

    def _begin_draft(self) -> asyncio.Future[AnyReadDraft] | None:
        drafter = self.drafter
        if drafter is None:
            return None
        return self._begin("draft_weights", lambda: self._read_draft(drafter))

    async def _leave(self, all_weights: Sequence[asyncio.Future[Any]]) -> None:
        """End the reading of weights, which are no longer waited for."""
        self._left = True
        for reading in self._readings:
            reading.stop()
        await asyncio.wait(all_weights)
        for weights in all_weights:
            if not weights.cancelled():
                weights.exception()  # is told to whoever awaited it, or to nobody

    async def _load(
        self,
        files: ModelFiles,
        weights: asyncio.Future[ReadWeights],
        draft: asyncio.Future[AnyReadDraft] | None,
        num_slots: int,
    ) -> LoadedModel:
        text = self._begin("tokenizer", lambda: self._read_text(files))
        importing = self._begin("imports", self._import)
        # All end before an error is raised: nothing of a loading that failed runs on.
        parts: list[asyncio.Future[Any]] = [text, asyncio.shield(weights), importing]
        if draft is not None:
            parts.append(asyncio.shield(draft))
        await asyncio.gather(*parts, return_exceptions=True)
        described, read, assembling = text.result(), weights.result(), importing.result()
        if described.end_ids is not None:
            read.config = replace(read.config, eos_token_ids=described.end_ids)
        options: dict[str, Any] = {}
        of = assembling.decoder_of
        if draft is None:
            decoder = await self._begin("decoder", lambda: of(read, self.config))
        else:
            found = draft.result()
            found.check(read.config, described.tokenizer)
            kept = found.kept_layers(read.config)
            decoder = await self._begin("decoder", lambda: of(read, self.config, kept))
            options["draft"] = await self._begin(
                "draft_decoder", lambda: assembling.draft_of(found, decoder, self.config)
            )
        if self.device != "cpu":
            options["captured"] = self.capture_progress
        return await assembling.loaded_model(
            self.model,
            decoder,
            described,
            self.config,
            num_slots=num_slots,
            seconds=self.seconds,
            **options,
        )

    @property
    def _formats(self) -> ComputedFormats:
        """What the backend computes, which isn't imported yet."""
        in_floats = self.config.activation_quantization == "none"
        if self.device == "cpu" and used_backend(self.config.backend) != "native":
            return PLAIN_FLOATS
        formats = NATIVE if self.device == "cpu" else CUDA
        return msgspec.structs.replace(formats, integer_activations=not in_floats)

    def _import(self) -> Any:
        """What makes the model of what was read."""
        if self.device == "cpu":
            return import_without_collecting("aioserve.execution.assembling")
        gpu = import_without_collecting("aioserve.execution.gpu.assembling")
        return gpu.GpuAssembling.open(self.device)

    def _begin(self, part: str, work: Callable[[], T]) -> asyncio.Future[T]:
        """`work` in a thread, timed."""

        def timed() -> T:
            began = time.perf_counter()
            result = work()
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began
            return result

        return asyncio.ensure_future(asyncio.to_thread(timed))

    def _find(self) -> ModelFiles:
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
        self.device = chosen_device(self.config)
        if self.device == "cpu":
            used_backend(self.config.backend)
        files = model_files(resolve(self.model), self.config.architecture)
        if isinstance(files, ModelDirectory) and holds_gguf(files.path):
            logger.warning(
                "%s: holds .safetensors and GGUF; its .safetensors are read. Give the path of a "
                "GGUF file to read that",
                files.path,
            )
        return files

    def _read_weights(self, files: ModelFiles) -> ReadWeights:
        weights = self._read(
            files,
            self.progress,
            quantization=self.config.quantization,
            max_model_len=self.config.max_model_len,
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
            dtype=self.config.dtype,
            formats=self._formats,
            memory_bytes=total_memory_bytes(),
            **options,
        )
        self._readings.append(reading)
        if self._left:
            reading.stop()
        with reading:
            return reading.read(progress)

    def _read_draft(self, drafter: LoadedDrafter) -> AnyReadDraft:
        """Rounded as its drafter says, whatever `quantization` says of the other model."""
        with naming(drafter):
            if isinstance(drafter, HeadDrafter):
                return ReadDraftHead(drafter, ReadHead.of(self._draft_path(drafter)))
            if not isinstance(drafter, ModelDrafter):
                raise InvariantError(f"nobody knows how drafter {drafter.kind!r} is loaded")
            path = self._draft_path(drafter)
            files = model_files(path)
            tokenizer = None if files.why_no_tokenizer() is not None else files.tokenizer()
            return ReadDraft(drafter, path, self._read_rounded(files, drafter), tokenizer)

    def _read_rounded(self, files: ModelFiles, drafter: ModelDrafter) -> ReadWeights:
        try:
            return self._read(files, quantization=drafter.quantization)
        except ConfigError as error:
            raise ConfigError(
                f"drafter 'model': {error}", argument="speculation", value=self.config.speculation
            ) from error

    def _named_draft_path(self, drafter: LoadedDrafter) -> Path:
        with naming(drafter):
            return self._draft_path(drafter)

    def _draft_path(self, drafter: LoadedDrafter) -> Path:
        if drafter.path is not None:
            return resolve(drafter.path)
        if isinstance(drafter, ModelDrafter) and drafter.quantization is not None:
            return resolve(self.model)
        is_model = isinstance(drafter, ModelDrafter)
        kind = "model" if is_model else drafter.kind
        if (path := assets.draft_path(self.model, kind)) is not None:
            return path
        none = "no draft model" if is_model else "no such head"
        raise ConfigError(
            f"drafter {drafter.kind!r} needs the option path: {none} comes with "
            f"{shown(self.model)}",
            argument="speculation",
            value=self.config.speculation,
        )

    def _read_text(self, files: ModelFiles) -> Text:
        why_none = files.why_no_tokenizer()
        if why_none is None:
            file = self.config.chat_template
            if file is not None and not Path(file).exists():
                raise ConfigError(
                    f"chat_template must be a file, and there is no {shown(file)}",
                    argument="chat_template",
                    value=file,
                )
            template = files.chat_template(file)
            tokenizer = files.tokenizer()
            reranker = files.reranker(tokenizer, template, self.config.reranker)
            end_ids = files.ends(files.config(), tokenizer)
            self._check_turns(files, tokenizer, template, end_ids)
            return Text(tokenizer, template, "", files.retrieval(), reranker, end_ids)
        if self.config.chat_template is not None:
            raise ConfigError(
                f"chat_template={self.config.chat_template!r} has no effect with a model that has "
                f"no tokenizer: leave it out ({why_none})",
                argument="chat_template",
                value=self.config.chat_template,
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
        """Warn where the template closes turns with what ends no answer."""
        mark = None if template is None else unended_mark(template, tokenizer, end_ids)
        if mark is not None:
            logger.warning(
                "%s: the chat template closes turns with %s, which ends no answer: answers may go "
                "on after it. Name its id in eos_token_id of generation_config.json, or in "
                "stop_token_ids of requests",
                files.path,
                shown(mark),
            )
