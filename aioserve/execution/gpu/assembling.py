"""What was read becomes a `LoadedModel` on a CUDA device.

Imports torch, CuPy and Triton: `aioserve.execution.imports` does that off the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.execution.assembling import (
    KVStorage,
    described,
    first_steps,
    host_pages,
    sizes,
    wanted_model_len,
)
from aioserve.execution.drafts.computed_drafter import ComputedDrafter
from aioserve.execution.drafts.placing import Draft, draft_of
from aioserve.execution.drafts.read import AnyReadDraft
from aioserve.execution.gpu.attention_choice import AttentionChoice, choose_attention
from aioserve.execution.gpu.cupy_device import CupyDevice
from aioserve.execution.gpu.decoder_steps import DecoderSteps
from aioserve.execution.gpu.device import Device
from aioserve.execution.gpu.drafting import DrafterInMemory
from aioserve.execution.gpu.failures import OutOfDeviceMemoryError
from aioserve.execution.gpu.graphs import default_graph_sizes, max_sequences
from aioserve.execution.gpu.memory import (
    MemoryCounts,
    TorchMemory,
    measure,
    measure_step,
    room_bytes,
)
from aioserve.execution.gpu.runner import CudaRunner
from aioserve.execution.gpu.waiting import HostSide
from aioserve.execution.runner import LoadedModel, Text
from aioserve.models.decoder import Decoder
from aioserve.models.loader import make_decoder
from aioserve.models.reading import ReadWeights
from aioserve.ops.gpu.backend import CudaBackend

__all__ = ["GpuAssembling"]


@dataclass(frozen=True)
class GpuAssembling:
    """On one device. `open` is the real one."""

    device: Device
    backend: CudaBackend
    memory: MemoryCounts
    host_side: HostSide | None = None

    @classmethod
    def open(cls, device_name: str) -> GpuAssembling:
        """`device_name`: "cuda:N". Raises `ConfigError`."""
        device = CupyDevice(torch.device(device_name).index)
        backend = CudaBackend(device.torch_device)
        return cls(device, backend, TorchMemory(device.torch_device))

    def decoder_of(
        self, weights: ReadWeights, config: EngineConfig, kept_layers: Sequence[int] = ()
    ) -> Decoder:
        """With its weights on the device. Uses up what was read."""
        with self.device.within(), self._blaming("the weights don't fit the device"):
            return make_decoder(
                weights, self.backend, use_program=config.step_program, kept_layers=kept_layers
            )

    def draft_of(self, read: AnyReadDraft, target: Decoder, config: EngineConfig) -> Draft:
        """As `aioserve.execution.drafts.placing.draft_of`, with its weights on the device."""
        # Attention that was chosen for the target's heads may not take those of another model.
        backend = CudaBackend(self.backend.device)
        with self.device.within(), self._blaming("the weights of the draft don't fit the device"):
            return draft_of(read, target, config, backend)

    @contextmanager
    def _blaming(self, what: str) -> Iterator[None]:
        """Raise `ConfigError`, which says what, where the device's memory isn't enough inside."""
        try:
            yield
        except Exception as error:
            meaning = self.device.meaning_of(error)
            if isinstance(meaning, OutOfDeviceMemoryError):
                raise ConfigError(f"{what}: {meaning}") from error
            raise

    async def loaded_model(
        self,
        name: str,
        decoder: Decoder,
        text: Text,
        config: EngineConfig,
        *,
        num_slots: int,
        seconds: dict[str, float],
        draft: Draft | None = None,
        captured: Callable[[int, int], None] | None = None,
    ) -> LoadedModel:
        """Ready to serve, with its graphs captured if that is wanted; `captured` is called on the
        loop with how many are, and how many there will be. Otherwise as
        `aioserve.execution.assembling.loaded_model`."""
        began = time.perf_counter()
        attention = await asyncio.to_thread(self._choose_attention, decoder, config)
        seconds["attention"] = time.perf_counter() - began
        began = time.perf_counter()
        model, pages, max_model_len, follower = await asyncio.to_thread(
            self._place, decoder, config, num_slots, draft
        )
        seconds["kv_cache"] = time.perf_counter() - began
        graphs = graph_sizes(config)
        processors: list[Callable[[str], Any]] = []
        runner = CudaRunner(
            self.device,
            model,
            num_slots=num_slots,
            name=name.rsplit("/", 1)[-1],
            graph_sizes=graphs,
            host_side=self.host_side,
            processors=processors,
            follower=follower,
        )
        try:
            if graphs and config.capture_graphs:
                began = time.perf_counter()
                await runner.capture_graphs(captured or (lambda done, total: None))
                seconds["graphs"] = time.perf_counter() - began
            await first_steps(runner, pages, config, max_model_len, seconds)
            return described(
                name,
                decoder,
                runner,
                text,
                pages,
                max_model_len=max_model_len,
                processors=processors,
                seconds=seconds,
                take_drafter=runner.take_drafter,
                facts={
                    "attention": {
                        "prompts": attention.used,
                        "decodes": "triton",
                        "why": attention.why,
                    },
                    **({} if follower is None else {"draft": follower.facts}),
                },
            )
        except BaseException:
            await runner.aclose()
            raise

    def _choose_attention(self, decoder: Decoder, config: EngineConfig) -> AttentionChoice:
        """Before pages are counted: what it needs of the device is taken by then."""
        with self.device.within():
            choice = choose_attention(
                decoder,
                config,
                self.backend,
                self.device,
                max_model_len=wanted_model_len(decoder, config),
            )
            self.backend.prompt_attention = choice.prompts
            self.device.free_cached_memory()
        return choice

    def _place(
        self, decoder: Decoder, config: EngineConfig, num_slots: int, draft: Draft | None
    ) -> tuple[DecoderSteps, KVStorage, int, ComputedDrafter | None]:
        most = {
            "max_tokens": config.max_num_batched_tokens,
            "max_sequences": max_sequences(config),
        }
        steps = functools.partial(DecoderSteps, decoder, num_slots=num_slots, **most)
        beside_bytes = 0 if draft is None else draft.bytes_per_page

        def room() -> int:
            """Bytes of the pool, without the page for padding."""
            length = wanted_model_len(decoder, config)
            trial = steps(decoder.new_cache(2, config.page_size), max_model_len=length)
            step_bytes = measure_step(self.device, trial, self.memory, **most)
            if draft is not None:
                step_bytes = max(step_bytes, self._measure_draft(draft, num_slots))
            if graph_sizes(config):
                step_bytes += trial.logits_bytes
            del trial
            self.device.free_cached_memory()
            left = room_bytes(self.memory.use(), step_bytes, config.memory_utilization)
            return left - decoder.kv_shape(1, config.page_size).bytes_per_page - beside_bytes

        with self.device.within():
            max_model_len, num_pages = sizes(decoder, config, room, beside_bytes=beside_bytes)
            # One more, for padding.
            with self._blaming(f"num_pages={num_pages} pages of KV cache can't be reserved"):
                cache = decoder.new_cache(num_pages + 1, config.page_size)
            host_cache = host_pages(decoder, config)
            follower = self._placed(draft, num_pages + 1, num_slots)
            model = steps(
                cache,
                host_cache=host_cache,
                max_model_len=max_model_len,
                states=None if follower is None else follower.states,
            )
        return model, KVStorage(num_pages, cache, host_cache), max_model_len, follower

    def _measure_draft(self, draft: Draft, num_slots: int) -> int:
        """Bytes that the most guesses of a step take beside weights and pages."""
        trial = draft.on_trial(1, num_slots=num_slots)
        return measure(self.device, self.memory, lambda stream: trial.rehearse())

    def _placed(
        self, draft: Draft | None, num_pages: int, num_slots: int
    ) -> ComputedDrafter | None:
        """What guesses, with its pages, and its kernels compiled."""
        if draft is None:
            return None
        follower = draft.placed(num_pages, num_slots=num_slots)
        with self._blaming("guesses don't fit the device beside the KV cache"):
            follower.rehearse()
        self.device.free_cached_memory()
        draft.guess_by(DrafterInMemory(follower, self.device))
        return follower


def graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of sequences at which decodes are captured."""
    if config.graph_sizes is None:
        return default_graph_sizes(max_sequences(config))
    return tuple(config.graph_sizes)
