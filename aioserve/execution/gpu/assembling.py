"""What was read becomes a `LoadedModel` on a CUDA device.

Imports torch, CuPy and Triton: `aioserve.execution.imports` does that off the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
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
from aioserve.execution.gpu.attention_choice import AttentionChoice, choose_attention
from aioserve.execution.gpu.cupy_device import CupyDevice
from aioserve.execution.gpu.decoder_steps import DecoderSteps
from aioserve.execution.gpu.device import Device
from aioserve.execution.gpu.failures import OutOfDeviceMemoryError
from aioserve.execution.gpu.graphs import default_graph_sizes, max_sequences
from aioserve.execution.gpu.memory import MemoryCounts, TorchMemory, measure_step, room_bytes
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

    def decoder_of(self, weights: ReadWeights, config: EngineConfig) -> Decoder:
        """With its weights on the device. Uses up what was read."""
        with self.device.within(), self._blaming("the weights don't fit the device"):
            return make_decoder(weights, self.backend, use_program=config.step_program)

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
        captured: Callable[[int, int], None] | None = None,
    ) -> LoadedModel:
        """Ready to serve, with its graphs captured if that is wanted; `captured` is called on the
        loop with how many are, and how many there will be. Otherwise as
        `aioserve.execution.assembling.loaded_model`."""
        began = time.perf_counter()
        attention = await asyncio.to_thread(self._choose_attention, decoder, config)
        seconds["attention"] = time.perf_counter() - began
        began = time.perf_counter()
        model, pages, max_model_len = await asyncio.to_thread(
            self._place, decoder, config, num_slots
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
                    }
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
        self, decoder: Decoder, config: EngineConfig, num_slots: int
    ) -> tuple[DecoderSteps, KVStorage, int]:
        most = {
            "max_tokens": config.max_num_batched_tokens,
            "max_sequences": max_sequences(config),
        }
        steps = functools.partial(DecoderSteps, decoder, num_slots=num_slots, **most)

        def room() -> int:
            """Bytes of the pool, without the page for padding."""
            length = wanted_model_len(decoder, config)
            trial = steps(decoder.new_cache(2, config.page_size), max_model_len=length)
            step_bytes = measure_step(self.device, trial, self.memory, **most)
            del trial
            self.device.free_cached_memory()
            left = room_bytes(self.memory.use(), step_bytes, config.memory_utilization)
            return left - decoder.kv_shape(1, config.page_size).bytes_per_page

        with self.device.within():
            max_model_len, num_pages = sizes(decoder, config, room)
            # One more, for padding.
            with self._blaming(f"num_pages={num_pages} pages of KV cache can't be reserved"):
                cache = decoder.new_cache(num_pages + 1, config.page_size)
            host_cache = host_pages(decoder, config)
            model = steps(cache, host_cache=host_cache, max_model_len=max_model_len)
        return model, KVStorage(num_pages, cache, host_cache), max_model_len


def graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of sequences at which decodes are captured."""
    if config.graph_sizes is None:
        return default_graph_sizes(max_sequences(config))
    return tuple(config.graph_sizes)
