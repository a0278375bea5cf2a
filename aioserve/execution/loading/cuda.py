"""Places models on a CUDA device. The largest step shows how much memory steps need.

Imports torch, CuPy and Triton; `aioserve.execution.imports` makes that happen off the event loop.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.execution.gpu.attention_choice import choose_attention
from aioserve.execution.gpu.cupy_device import CupyDevice
from aioserve.execution.gpu.decoder_steps import DecoderSteps
from aioserve.execution.gpu.device import Device
from aioserve.execution.gpu.failures import OutOfDeviceMemoryError
from aioserve.execution.gpu.graphs import graph_sizes, max_sequences
from aioserve.execution.gpu.memory import (
    MemoryCounts,
    TorchMemory,
    measure,
    measure_step,
    room_bytes,
)
from aioserve.execution.gpu.runner import CudaRunner
from aioserve.execution.gpu.waiting import HostSide
from aioserve.execution.gpu.worker import CudaWorker
from aioserve.execution.host import Host
from aioserve.execution.loading.place import (
    Allocated,
    Placement,
    RunnerOptions,
    SparePages,
    wanted_model_len,
)
from aioserve.execution.speculation.drafting import DrafterInMemory
from aioserve.execution.speculation.drafts.computed_drafter import ComputedDrafter
from aioserve.execution.speculation.drafts.placing import Draft, draft_of
from aioserve.execution.speculation.drafts.read import AnyReadDraft
from aioserve.models.decoder import Decoder
from aioserve.models.loader import make_decoder
from aioserve.models.reading import ReadWeights
from aioserve.ops import KVCache
from aioserve.ops.gpu.backend import CudaBackend

__all__ = ["CudaPlacement"]


@dataclass(frozen=True)
class CudaPlacement(Placement[CudaWorker, CudaRunner]):
    """Placement on one device. `open` opens a real one."""

    device: Device
    backend: CudaBackend
    memory: MemoryCounts
    host_side: HostSide | None = None

    @classmethod
    def open(cls, device_name: str) -> CudaPlacement:
        """Open the device "cuda:N". Raises `ConfigError`."""
        device = CupyDevice(torch.device(device_name).index)
        backend = CudaBackend(device.torch_device)
        return cls(device, backend, TorchMemory(device.torch_device))

    def within(self) -> AbstractContextManager[object]:
        return self.device.within()

    def load(
        self, weights: ReadWeights, config: EngineConfig, kept_layers: Sequence[int] = ()
    ) -> Decoder:
        with self.device.within(), self._blaming("the weights don't fit the device"):
            return make_decoder(
                weights, self.backend, use_program=config.step_program, kept_layers=kept_layers
            )

    def load_draft(self, read: AnyReadDraft, target: Decoder, config: EngineConfig) -> Draft:
        # Attention that was chosen for the target's heads may not fit those of another model.
        backend = CudaBackend(self.backend.device)
        with self.device.within(), self._blaming("the weights of the draft don't fit the device"):
            return draft_of(read, target, config, backend)

    @contextmanager
    def _blaming(self, what: str) -> Iterator[None]:
        """Raise `ConfigError` with `what` as its message if the device runs out of memory
        inside."""
        try:
            yield
        except Exception as error:
            meaning = self.device.meaning_of(error)
            if isinstance(meaning, OutOfDeviceMemoryError):
                raise ConfigError(f"{what}: {meaning}") from error
            raise

    def choose_kernels(
        self, decoder: Decoder, config: EngineConfig, seconds: dict[str, float]
    ) -> Mapping[str, Any]:
        """Choose the attention, before pages are counted: it takes memory of the device."""
        began = time.perf_counter()
        length = wanted_model_len(decoder, config)
        choice = choose_attention(decoder, config, self.backend, self.device, max_model_len=length)
        self.backend.prompt_attention = choice.prompts
        self.device.free_cached_memory()
        seconds["attention"] = time.perf_counter() - began
        return {"attention": {"prompts": choice.used, "decodes": "triton", "why": choice.why}}

    def spare_pages(self, decoder: Decoder, config: EngineConfig) -> SparePages:
        """Return the page for padding."""
        return SparePages(1)

    def measure(
        self, decoder: Decoder, config: EngineConfig, draft: Draft | None, num_slots: int
    ) -> int:
        """Return the bytes for KV pages of requests, without the page for padding."""
        max_tokens, most_sequences = config.max_num_batched_tokens, max_sequences(config)
        trial = DecoderSteps(
            decoder,
            decoder.new_cache(2, config.page_size),
            num_slots=num_slots,
            max_model_len=wanted_model_len(decoder, config),
            max_tokens=max_tokens,
            max_sequences=most_sequences,
        )
        step_bytes = measure_step(
            self.device, trial, self.memory, max_tokens=max_tokens, max_sequences=most_sequences
        )
        if draft is not None:
            step_bytes = max(step_bytes, self._measure_draft(draft, num_slots))
        if graph_sizes(config):
            step_bytes += trial.logits_bytes
        del trial
        self.device.free_cached_memory()
        left = room_bytes(self.memory.use(), step_bytes, config.memory_utilization)
        beside_bytes = 0 if draft is None else draft.bytes_per_page
        return left - decoder.kv_shape(1, config.page_size).bytes_per_page - beside_bytes

    def _measure_draft(self, draft: Draft, num_slots: int) -> int:
        """Measure the bytes that the most draft tokens of a step take beside weights and pages."""
        trial = draft.on_trial(1, num_slots=num_slots)
        return measure(self.device, self.memory, lambda stream: trial.rehearse())

    def new_cache(self, decoder: Decoder, config: EngineConfig, num_pages: int) -> KVCache:
        with self._blaming(f"num_pages={num_pages} pages of KV cache can't be reserved"):
            return decoder.new_cache(num_pages + 1, config.page_size)

    def place_draft(self, draft: Draft, num_pages: int, num_slots: int) -> ComputedDrafter:
        """Place the draft, and compile its kernels."""
        drafter = draft.placed(num_pages + 1, num_slots=num_slots)
        with self._blaming("draft tokens don't fit the device beside the KV cache"):
            drafter.rehearse()
        self.device.free_cached_memory()
        draft.draft_with(DrafterInMemory(drafter, self.device))
        return drafter

    def worker_of(self, model: Allocated, config: EngineConfig, num_slots: int) -> CudaWorker:
        drafter = model.drafter
        steps = DecoderSteps(
            model.decoder,
            model.cache,
            host_cache=model.host_cache,
            num_slots=num_slots,
            max_model_len=model.max_model_len,
            max_tokens=config.max_num_batched_tokens,
            max_sequences=max_sequences(config),
            states=None if drafter is None else drafter.states,
        )
        return CudaWorker(self.device, steps, graph_sizes(config))

    def start_of(
        self, worker: CudaWorker, model: Allocated, options: RunnerOptions
    ) -> Callable[[], CudaRunner]:
        cache = model.cache
        groups = cache.layout.num_groups
        return functools.partial(
            CudaRunner,
            Host(cache.page_size, options.num_slots, groups, options.processors),
            worker,
            name=options.name,
            host_side=self.host_side,
            follower=model.drafter,
        )

    async def begin(
        self,
        runner: CudaRunner,
        config: EngineConfig,
        seconds: dict[str, float],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Capture graphs, if options ask for them."""
        if graph_sizes(config) and config.capture_graphs:
            began = time.perf_counter()
            await runner.capture_graphs(progress or (lambda done, total: None))
            seconds["graphs"] = time.perf_counter() - began
