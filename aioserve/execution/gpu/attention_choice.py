"""Chooses the kernels for attention of prompts: Triton's, or FlashInfer's if these are faster.

FlashInfer's are tried first, on a batch of the model's own shapes. The trial compiles them, and
shows that they compute the same as Triton's, before any request depends on it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from aioserve.config import Attention, EngineConfig
from aioserve.errors import ConfigError
from aioserve.execution.gpu.device import Device
from aioserve.execution.gpu.failures import DeviceFailedError
from aioserve.models import architecture
from aioserve.models.decoder import Decoder
from aioserve.ops import HostBatch, KVShape
from aioserve.ops.backend import AttentionKind
from aioserve.ops.gpu.attention import PromptAttention, paged_attention
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.flashinfer_attention import (
    FlashInferAttention,
    import_flashinfer,
    is_installed,
    why_not,
)
from aioserve.ops.gpu.gpu_batch import GpuBatch, GpuKVLayer
from aioserve.ops.kv_cache import PlainKVCache
from aioserve.paging.layout import kv_layout
from aioserve.paging.pages import full_pages, pages_for_each, tokens_in_part

__all__ = ["AttentionChoice", "choose_attention", "trial_prompts"]

logger: logging.Logger = logging.getLogger(__name__)

ROUNDS = 5
"""Number of times that each kernel is timed, in turns. The shortest time counts."""
NEEDED_SHARE = 0.95
"""Largest share of Triton's time. A smaller gain isn't worth rows that depend on their batch."""
MAX_TRIAL_TOKENS = 8192
ROUNDINGS = 4
"""Largest difference of two results, in units of the last place of their dtype; below 1, of 1."""


class AttentionChoice(NamedTuple):
    prompts: PromptAttention | None
    """Value for `CudaBackend.prompt_attention`."""
    why: str

    @property
    def used(self) -> Attention:
        """Name of the chosen kernels; never "auto"."""
        return "triton" if self.prompts is None else "flashinfer"


def choose_attention(
    decoder: Decoder,
    config: EngineConfig,
    backend: CudaBackend,
    device: Device,
    *,
    max_model_len: int,
    installed: Callable[[], bool] = is_installed,
    load: Callable[[], Any] = import_flashinfer,
    clock: Callable[[], float] = time.perf_counter,
) -> AttentionChoice:
    """Choose as `config.attention` asks.

    Call it inside `device.within()`, in a thread that may take its time, since it may compile
    kernels. Raises `ConfigError` if FlashInfer is asked for but can't be used, saying why. Raises
    `DeviceFailedError` if the device fails.
    """
    if config.attention == "triton":
        return AttentionChoice(None, "attention='triton' is asked for")
    unfit = _why_unfit(decoder, config) if installed() else "FlashInfer isn't installed"
    if unfit is None:
        choice = _tried(decoder, config, backend, device, max_model_len, load, clock)
    else:
        choice = AttentionChoice(None, unfit)
    if config.attention == "flashinfer" and choice.prompts is None:
        raise ConfigError(
            f"attention='flashinfer' can't be used: {choice.why}",
            argument="attention",
            value="flashinfer",
        )
    logger.info("prompts attend with %s: %s", choice.used, choice.why)
    return choice


def _why_unfit(decoder: Decoder, config: EngineConfig) -> str | None:
    if decoder.config.latent_rank:
        return "FlashInfer: it isn't used for latents"
    if all(layer.mixer.sinks is not None for layer in decoder.config.layers):
        return "FlashInfer: its kernels know no sinks, which this model's attention has"
    heads = decoder.config.heads
    unfit = why_not(
        dtype=decoder.dtype,
        query_heads=heads.query,
        kv_heads=heads.kv,
        head_dim=heads.dim,
        max_tokens=config.max_num_batched_tokens,
        max_sequences=config.max_num_seqs,
    )
    return None if unfit is None else f"FlashInfer: {unfit}"


def _tried(
    decoder: Decoder,
    config: EngineConfig,
    backend: CudaBackend,
    device: Device,
    max_model_len: int,
    load: Callable[[], Any],
    clock: Callable[[], float],
) -> AttentionChoice:
    max_tokens = min(config.max_num_batched_tokens, MAX_TRIAL_TOKENS)
    prompts = trial_prompts(max_tokens, max_model_len)[: config.max_num_seqs]
    if not prompts:
        return AttentionChoice(None, "a step has no room for a prompt of two tokens")
    version = ""
    try:
        module = load()
        version = f" {module.__version__}"
        attention = FlashInferAttention(module, backend.device)
        trial = _Trial(decoder, config, prompts, backend, device, clock)
        difference = trial.difference(attention)
        if difference is not None:
            return AttentionChoice(None, f"FlashInfer{version}: {difference}")
        seconds, triton_seconds = trial.seconds(attention)
    except Exception as error:
        meaning = device.meaning_of(error)
        if isinstance(meaning, DeviceFailedError):
            raise meaning from error
        return AttentionChoice(None, f"FlashInfer{version} failed: {type(error).__name__}: {error}")
    why = (
        f"the prompts of a step of {trial.tokens} tokens took {seconds * 1e3:.3f} ms in all layers "
        f"with FlashInfer{version}, and {triton_seconds * 1e3:.3f} ms with Triton"
    )
    faster = seconds < NEEDED_SHARE * triton_seconds
    return AttentionChoice(attention if faster or config.attention != "auto" else None, why)


def trial_prompts(max_tokens: int, max_model_len: int) -> list[tuple[int, int]]:
    """Make (query tokens, context) of prompts that fill a step.

    Half of the step is a chunk that follows a prefix of the same length. The rest is up to four
    prompts from their starts. Contexts are odd, so that they end inside pages. Empty if no prompt
    of two tokens fits.
    """
    half = max(2, max_tokens // 2)
    contexts = [min(2 * half, max_model_len), *[min(max(1, half // 4), max_model_len)] * 4]
    contexts = [context - 1 + context % 2 for context in contexts]
    prompts = [(min(half, contexts[0]), contexts[0]), *[(one, one) for one in contexts[1:]]]
    kept, left = [], max_tokens
    for tokens, context in prompts:
        if 1 < tokens <= left:  # one token is a decode
            kept.append((tokens, context))
            left -= tokens
    return kept


class _Trial:
    """The prompts of one step, with random queries, keys and values. Unused parts of pages are
    NaN."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        prompts: Sequence[tuple[int, int]],
        backend: CudaBackend,
        device: Device,
        clock: Callable[[], float],
    ) -> None:
        mixers = [layer.mixer for layer in decoder.config.layers]
        attending = [one for one in mixers if isinstance(one, architecture.Attention)]
        layers = [one for one in attending if one.sinks is None]
        self._kinds = [AttentionKind(one.scale, one.window, one.soft_cap) for one in layers]
        """Kind of each layer whose attention FlashInfer may compute."""
        self._backend = backend
        self._device = device
        self._clock = clock
        self.tokens: int = sum(tokens for tokens, _ in prompts)
        heads = layers[0].heads
        self._host, num_pages = _lay_out(prompts, config.page_size)
        # One layer in one group serves kinds of any group.
        layout = kv_layout(decoder.config.kv_layers(decoder.kv_format)[:1], 1)
        cache = backend.allocate_kv(KVShape(layout, num_pages, config.page_size))
        # Leaves the random numbers of the surrounding program alone.
        generator = torch.Generator(backend.device).manual_seed(0)
        self._cache = _filled(cache, self._host, generator)
        size = heads.query_size + 2 * heads.kv_size
        self._qkv = torch.empty(
            (self.tokens, size), dtype=decoder.dtype, device=backend.device
        ).normal_(generator=generator)
        self._slots = backend.allocate_slots(1)

    def difference(self, attention: PromptAttention) -> str | None:
        """Describe results that differ beyond rounding in some kind of layer; None if all agree."""
        batch = self._batch()
        for kind in dict.fromkeys(self._kinds):
            got, expected = (
                self._attend(kind, batch, prompts).float() for prompts in (attention, None)
            )
            error = (got - expected).abs()
            unit = torch.finfo(self._qkv.dtype).eps
            if not bool((error <= ROUNDINGS * unit * expected.abs().clamp(min=1)).all()):
                return (
                    f"its results differ from Triton's by up to {error.max().item():.3g} "
                    f"(window {kind.window}, soft cap {kind.soft_cap})"
                )
        return None

    def seconds(self, attention: PromptAttention) -> tuple[float, float]:
        """Time the attention of a step's prompts in all layers, with `attention` and with Triton's
        kernels.

        Includes planning.
        """
        shortest = [float("inf"), float("inf")]
        for _ in range(ROUNDS):
            for index, prompts in enumerate((attention, None)):
                shortest[index] = min(shortest[index], self._time(prompts))
        return shortest[0], shortest[1]

    def _time(self, prompts: PromptAttention | None) -> float:
        batch = self._batch()
        self._device.synchronize()
        began = self._clock()
        for kind in self._kinds:
            self._attend(kind, batch, prompts)
        self._device.synchronize()
        return self._clock() - began

    def _attend(
        self, kind: AttentionKind, batch: GpuBatch, prompts: PromptAttention | None
    ) -> torch.Tensor:
        return paged_attention(self._qkv, GpuKVLayer(batch, self._cache, 0), kind, prompts=prompts)

    def _batch(self) -> GpuBatch:
        """Make a new batch, since FlashInfer plans each batch anew."""
        return self._backend.prepare(self._host, self._cache, self._slots)


def _lay_out(prompts: Sequence[tuple[int, int]], page_size: int) -> tuple[HostBatch, int]:
    """Lay prompts out over pages in a random order; return the number of pages, too."""
    counts = np.array([tokens for tokens, _ in prompts])
    contexts = np.array([context for _, context in prompts])
    pages = pages_for_each(contexts, page_size)
    order = np.random.default_rng(0).permutation(int(pages.sum())).astype(np.int32)
    table = np.zeros((len(prompts), int(pages.max())), np.int32)
    table[np.arange(table.shape[1]) < pages[:, None]] = order
    return HostBatch.laid_out(counts, contexts, table[None], page_size), len(order)


def _filled(cache: PlainKVCache, host: HostBatch, generator: torch.Generator) -> PlainKVCache:
    """Fill pages with random values where a context has tokens, and with NaN elsewhere."""
    cache.storage.normal_(generator=generator)
    page_size = cache.page_size
    for context, row in zip(host.context_lens.tolist(), host.page_table[0], strict=True):
        if held := tokens_in_part(context, page_size):
            cache.storage[int(row[full_pages(context, page_size)]), ..., held:, :] = math.nan
    return cache
