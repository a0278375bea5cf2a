"""Draft tokens by a smaller model, which reads only token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioserve.execution.speculation.drafts.computed_drafter import DraftOptions
from aioserve.execution.speculation.drafts.paged_drafter import PagedDrafter
from aioserve.models.decoder import Decoder
from aioserve.ops import Drawn, HostBatch, KVCache, SampleRows

__all__ = ["DraftModel"]


class DraftModel(PagedDrafter[None]):
    """Draft tokens of a decoder."""

    def __init__(self, model: Decoder, cache: KVCache, options: DraftOptions) -> None:
        super().__init__(model.backend, cache, model.max_model_len, options)
        self._model = model

    @property
    def facts(self) -> Mapping[str, Any]:
        model = self._model
        return {
            "architecture": model.config.architecture,
            "dtype": str(model.dtype).removeprefix("torch."),
            "weight_bytes": model.weight_memory.by_format(),
            "kv_cache_bytes": self._cache.storage.nbytes,
        }

    def _compute(
        self, host: HostBatch, samples: SampleRows | None, passed: None
    ) -> tuple[Drawn | None, None]:
        batch = self._backend.prepare(host, self._cache, self._last_tokens)
        if samples is None:
            self._model.forward(batch, self._cache)
            return None, None
        if self._tells_of(samples):
            return self._draw(self._model.forward(batch, self._cache), samples), None
        return self._model.draw(batch, self._cache, samples, self._last_tokens), None
