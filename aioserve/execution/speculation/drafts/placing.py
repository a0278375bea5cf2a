"""Places a draft model or head beside the model served."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import torch

from aioserve.config import EngineConfig
from aioserve.drafting.drafter import Drafter
from aioserve.drafting.loaded import LoadedDrafter
from aioserve.execution.process_memory import total_memory_bytes
from aioserve.execution.reserve import reserve
from aioserve.execution.speculation.drafts.computed_drafter import ComputedDrafter, DraftOptions
from aioserve.execution.speculation.drafts.draft_head import DraftHead
from aioserve.execution.speculation.drafts.draft_medusa import DraftMedusa
from aioserve.execution.speculation.drafts.draft_model import DraftModel
from aioserve.execution.speculation.drafts.read import AnyReadDraft, ReadDraftHead, naming
from aioserve.execution.speculation.drafts.state_pages import StatePages
from aioserve.models.decoder import Decoder
from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.models.heads.loader import make_head
from aioserve.models.heads.medusa import MedusaHeads
from aioserve.models.loader import make_decoder
from aioserve.ops import Backend

__all__ = ["Draft", "draft_of", "rejects"]


def rejects(config: EngineConfig) -> bool:
    """True if draft tokens that were drawn are verified by rejection sampling."""
    return config.speculation is not None and config.speculation.acceptance == "rejection"


class Draft(ABC):
    """A draft model or head for `target`, before it has memory."""

    def __init__(self, drafter: LoadedDrafter, target: Decoder, config: EngineConfig) -> None:
        self._drafter = drafter
        self._target = target
        self._config = config

    @property
    @abstractmethod
    def bytes_per_page(self) -> int:
        """Bytes that it takes for each of the target's device pages."""

    @property
    def bytes_per_host_page(self) -> int:
        """Bytes that it takes for each of the target's host pages."""
        return 0

    def placed(self, num_pages: int, *, num_slots: int) -> ComputedDrafter:
        """Give it its pages. Raises `ConfigError` for more than there is room."""
        return self._placed(num_pages, self._config.num_host_pages, num_slots)

    def draft_with(self, placed: Drafter) -> None:
        """Let the drafter make draft tokens by what was placed."""
        self._drafter.draft_with(placed)

    def on_trial(self, num_pages: int, *, num_slots: int) -> ComputedDrafter:
        """Give it a few pages, to measure its other memory. Raises as `placed` does."""
        return self._placed(num_pages, 0, num_slots)

    @abstractmethod
    def _placed(self, num_pages: int, num_host_pages: int, num_slots: int) -> ComputedDrafter: ...

    def _options(self, num_slots: int, end_ids: Collection[int]) -> DraftOptions:
        config, target, speculation = self._config, self._target, self._config.speculation
        most_tokens = config.max_num_batched_tokens
        return DraftOptions(
            num_slots=num_slots,
            num_groups=target.layout.num_groups,
            max_model_len=config.max_model_len or target.config.max_position_embeddings,
            # Each has two tokens in the step, one of which is a draft token.
            max_sequences=max(1, min(config.max_num_seqs, most_tokens // 2)),
            max_draft_tokens=0 if speculation is None else speculation.max_tokens,
            most_tokens=most_tokens,
            end_ids=end_ids,
            max_branches=0 if speculation is None else speculation.max_branches,
            keeps_distributions=rejects(config),
        )


class _ModelDraft(Draft):
    def __init__(
        self, decoder: Decoder, drafter: LoadedDrafter, target: Decoder, config: EngineConfig
    ) -> None:
        super().__init__(drafter, target, config)
        self._decoder = decoder

    @property
    def bytes_per_page(self) -> int:
        return self._decoder.kv_shape(1, self._config.page_size).bytes_per_page

    def _placed(self, num_pages: int, num_host_pages: int, num_slots: int) -> ComputedDrafter:
        decoder, size = self._decoder, self._config.page_size
        cache = reserve("num_pages", num_pages, lambda: decoder.new_cache(num_pages, size))
        end_ids = decoder.config.eos_token_ids
        return DraftModel(decoder, cache, self._options(num_slots, end_ids))


class _HeadDraft(Draft):
    def __init__(
        self,
        head: DecoderHead | MedusaHeads,
        drafter: LoadedDrafter,
        target: Decoder,
        config: EngineConfig,
    ) -> None:
        super().__init__(drafter, target, config)
        self._head = head

    @property
    def bytes_per_page(self) -> int:
        head = self._head
        own = 0
        if isinstance(head, DecoderHead):
            own = head.kv_shape(1, self._config.page_size).bytes_per_page
        return own + self._state_bytes

    @property
    def bytes_per_host_page(self) -> int:
        return self._state_bytes

    @property
    def _state_bytes(self) -> int:
        """Bytes of the states of a page."""
        row = self._target.kept_columns * self._target.dtype.itemsize
        return row * self._config.page_size

    def _states(self, num_pages: int, num_host_pages: int) -> StatePages:
        target, size = self._target, self._config.page_size

        def reserved(option: str, count: int, *, on_host: bool) -> torch.Tensor:
            shape, allocate = (count, size, target.kept_columns), target.backend.allocate_pages
            return reserve(option, count, lambda: allocate(shape, target.dtype, on_host=on_host))

        host = None
        if num_host_pages:
            host = reserved("num_host_pages", num_host_pages, on_host=True)
        return StatePages(reserved("num_pages", num_pages, on_host=False), host)

    def _placed(self, num_pages: int, num_host_pages: int, num_slots: int) -> ComputedDrafter:
        head, target, size = self._head, self._target, self._config.page_size
        states = self._states(num_pages, num_host_pages)
        options = self._options(num_slots, target.config.eos_token_ids)
        if isinstance(head, MedusaHeads):
            return DraftMedusa(head, target, states, options)
        cache = reserve("num_pages", num_pages, lambda: head.new_cache(num_pages, size))
        return DraftHead(head, target, cache, states, options)


def draft_of(
    read: AnyReadDraft, target: Decoder, config: EngineConfig, backend: Backend | None = None
) -> Draft:
    """Make a draft on the backend of its target, or another one of the same device.

    Uses up the weights. Raises `ModelError` for missing or broken weights of a head.
    """
    backend = backend or target.backend
    if isinstance(read, ReadDraftHead):
        with naming(read.drafter):
            head = make_head(read.head, target, memory_bytes=total_memory_bytes(), backend=backend)
        return _HeadDraft(head, read.drafter, target, config)
    program = config.step_program
    made = make_decoder(read.weights, backend, use_program=program, grouped=False)
    return _ModelDraft(made, read.drafter, target, config)
