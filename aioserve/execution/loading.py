"""A model name and options become a `LoadedModel`: weights, KV storage, tokenizer, step thread."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import torch

from aioserve import _native
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.execution.cpu import CpuRunner
from aioserve.execution.process_memory import available_memory_bytes, total_memory_bytes
from aioserve.execution.runner import LoadedModel, ModelLimits
from aioserve.kv.pages import capacity_tokens, pages_for
from aioserve.models.decoder import Decoder
from aioserve.models.loader import ReportBytes, load_model
from aioserve.models.resolve import resolve
from aioserve.ops import KVCache, backend_named, bytes_per_page
from aioserve.text.chat import ChatTemplate
from aioserve.text.tokenizer import Tokenizer, why_no_tokenizer

__all__ = ["load"]

logger: logging.Logger = logging.getLogger(__name__)


async def load(
    model: str, config: EngineConfig, *, num_slots: int, progress: ReportBytes | None = None
) -> LoadedModel:
    """Load off the event loop. `progress` is called in the loading thread with bytes done and
    bytes in all.

    Raises `ModelError` for a model that can't be loaded and `ConfigError` for options that it, or
    this machine, can't meet.
    """
    return await _Loader(model, config, num_slots, progress).load()


class _Loader:
    def __init__(
        self, model: str, config: EngineConfig, num_slots: int, progress: ReportBytes | None
    ) -> None:
        self.model = model
        self.config = config
        self.num_slots = num_slots
        self.progress = progress
        self.why_no_tokenizer: str | None = None

    async def load(self) -> LoadedModel:
        decoder, tokenizer, template = await asyncio.to_thread(self._read)
        max_model_len, num_pages = self._size(decoder)
        cache = self._reserve(decoder, "num_pages", num_pages)
        host_cache = None
        if self.config.num_host_pages:
            host_cache = self._reserve(decoder, "num_host_pages", self.config.num_host_pages)
        runner = CpuRunner(
            decoder,
            cache,
            host_cache=host_cache,
            num_slots=self.num_slots,
            name=self.model.rsplit("/", 1)[-1],
        )
        return LoadedModel(
            name=self.model,
            runner=runner,
            limits=ModelLimits(
                vocab_size=decoder.config.vocab_size,
                max_model_len=max_model_len,
                num_pages=num_pages,
                eos_token_ids=frozenset(decoder.config.eos_token_ids),
            ),
            defaults=decoder.config.generation.sampling_params(),
            tokenizer=tokenizer,
            chat_template=template,
            description={
                "architecture": decoder.config.architecture,
                "backend": decoder.backend.name,
                "step_program": decoder.program is not None,
                "dtype": str(decoder.dtype).removeprefix("torch."),
                "kv_cache_bytes": cache.storage.nbytes,
                "host_kv_cache_bytes": 0 if host_cache is None else host_cache.storage.nbytes,
            },
            why_no_tokenizer=self.why_no_tokenizer or "",
        )

    def _read(self) -> tuple[Decoder, Tokenizer | None, ChatTemplate | None]:
        try:
            _native.cpu_info()  # reads AIOSERVE_ISA and AIOSERVE_NUM_THREADS
        except ValueError as error:
            raise ConfigError(str(error)) from error
        backend = backend_named(self.config.backend)
        path = resolve(self.model)
        tokenizer, template = self._read_text(path)
        dtype = "auto" if self.config.dtype == "auto" else getattr(torch, self.config.dtype)
        decoder = load_model(
            path,
            dtype=dtype,
            backend=backend,
            progress=self.progress,
            max_model_len=self.config.max_model_len,
            memory_bytes=total_memory_bytes(),
            use_program=self.config.step_program,
        )
        for setting in decoder.config.generation.unsupported:
            logger.warning(
                "%s: generation_config.json asks for %s, which aioserve can't apply: answers will "
                "differ from what the model's makers meant",
                path,
                setting,
            )
        return decoder, tokenizer, template

    def _read_text(self, path: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
        self.why_no_tokenizer = why_no_tokenizer(path)
        if self.why_no_tokenizer is None:
            return Tokenizer.from_directory(path), ChatTemplate.from_directory(path)
        logger.warning(
            "%s. Until then prompts must be token ids, and answers have no text",
            self.why_no_tokenizer,
        )
        return None, None

    def _reserve(self, decoder: Decoder, option: str, num_pages: int) -> KVCache:
        try:
            return decoder.new_cache(num_pages, self.config.page_size)
        except (MemoryError, OSError, OverflowError, RuntimeError) as error:
            raise ConfigError(
                f"{option}={num_pages} pages of KV cache can't be reserved: {error}"
            ) from error

    def _size(self, decoder: Decoder) -> tuple[int, int]:
        """`max_model_len` and the number of pages that go together."""
        config, model = self.config, decoder.config
        page_size = config.page_size
        wanted_len = config.max_model_len or model.max_position_embeddings
        if wanted_len > model.max_position_embeddings:
            raise ConfigError(
                f"max_model_len must be at most the model's {model.max_position_embeddings}, "
                f"got {wanted_len}"
            )
        num_pages = config.num_pages
        if num_pages is None:
            page_bytes = bytes_per_page(
                model.num_layers, page_size, model.num_kv_heads, model.head_dim, decoder.dtype
            )
            # Host pages are memory of this machine as well.
            budget = int(available_memory_bytes() * config.memory_utilization)
            budget -= config.num_host_pages * page_bytes
            usable = config.max_num_seqs * pages_for(wanted_len, page_size)
            num_pages = min(usable, budget // page_bytes)
            if num_pages < 1:
                raise ConfigError(
                    f"memory_utilization={config.memory_utilization} and "
                    f"num_host_pages={config.num_host_pages} leave {max(budget, 0)} bytes for "
                    f"the KV cache, and one page takes {page_bytes}"
                )
        holds = capacity_tokens(num_pages, page_size)
        if config.max_model_len is not None and holds < wanted_len:
            raise ConfigError(
                f"max_model_len={wanted_len} doesn't fit the KV cache: {num_pages} pages of "
                f"{page_size} tokens hold {holds}"
            )
        return min(wanted_len, holds), num_pages
