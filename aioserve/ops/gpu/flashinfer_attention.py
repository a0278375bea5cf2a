"""Attention from prompts by FlashInfer's kernels, on the pages and queries in place.

Decodes don't use it. They run in CUDA graphs, and FlashInfer plans every step on the host, for
numbers of pages that a graph doesn't know.

A plan is made once per batch and kind of layer. Planning is host work, with copies to the device
that the host does not wait for. So its arrays stay unchanged until the copies are done:

    turn 0   [ plan 4 ]•            [ plan 6 waits for •, writes ]•
    turn 1              [ plan 5 ]•

Each turn has pinned memory of its own for its arrays. It also has wrappers of its own, since each
wrapper writes its schedule to pinned memory without waiting. A runner has at most two steps in
flight, so the event of two plans ago is done and planning never waits.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from aioserve.ops.backend import AttentionKind
from aioserve.ops.gpu.gpu_batch import GpuKVLayer, HostPrompts
from aioserve.paging.pages import capacity_tokens, full_pages, pages_for_each

__all__ = [
    "DTYPES",
    "HEAD_DIMS",
    "CopyEvent",
    "FlashInferAttention",
    "copy_event",
    "import_flashinfer",
    "is_installed",
    "why_not",
]

HEAD_DIMS = (64, 128, 256)
"""Head sizes for which FlashInfer has kernels, for keys and values alike, and Triton, too."""
DTYPES = (torch.float16, torch.bfloat16)

_TURNS = 2
_FLOAT_WORKSPACE_BYTES = 1 << 20
"""Workspace for partial results of split contexts; contexts aren't split."""
_INT_WORKSPACE_BYTES = 8 << 20
"""Workspace of a wrapper for its schedule, on the host and on the device."""
_MIN_TILE_ROWS = 16


def is_installed() -> bool:
    """True if FlashInfer is installed. Doesn't import it."""
    return importlib.util.find_spec("flashinfer") is not None


def import_flashinfer() -> Any:
    """Import and return the module. It imports torch and much else: not for an event loop's
    thread."""
    return importlib.import_module("flashinfer")


def why_not(
    *,
    dtype: torch.dtype,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    max_tokens: int,
    max_sequences: int,
) -> str | None:
    """Reason why FlashInfer's kernels don't fit a model or its steps; None if they fit.

    `max_tokens` and `max_sequences` are those of a step.
    """
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"it computes in float16 and bfloat16, and the model is in {name}"
    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"it has kernels for heads of {sizes} dimensions, and the model's have {head_dim}"
    needed = _schedule_bytes(query_heads, query_heads // kv_heads, max_tokens, max_sequences)
    if needed > _INT_WORKSPACE_BYTES:
        return (
            f"the schedule of {max_tokens} tokens of {max_sequences} sequences may take {needed} "
            f"bytes, and it has {_INT_WORKSPACE_BYTES}"
        )
    return None


def _schedule_bytes(heads: int, group: int, tokens: int, sequences: int) -> int:
    """Upper bound of the bytes of a step's schedule, for either kind of kernels.

    FA2's: three numbers for each tile of at least 16 rows, and one for each sequence and token.
    FA3's: seven for each tile of 128 tokens and each head, or for all heads at once beyond 4,096.
    """
    fa2 = 3 * (-(-tokens * group // _MIN_TILE_ROWS) + sequences) + sequences + tokens
    tiles = -(-tokens // 128) + sequences
    fa3 = 7 * (tiles if tiles - 1 > 4096 else tiles * heads)
    return 4 * max(fa2, fa3) + 4096


class CopyEvent(Protocol):
    """An event recorded after copies to the device. Before that, waiting returns at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _NoEvent:
    """An event on the CPU, whose copies are done when they return."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def copy_event(device: torch.device) -> CopyEvent:
    """Make an event of torch's current stream. A thread that waits for it sleeps."""
    return torch.cuda.Event(blocking=True) if device.type == "cuda" else _NoEvent()


class _Kind(NamedTuple):
    """Layers that one plan serves."""

    group: int
    """Group of layers whose pages they have."""
    dtype: torch.dtype
    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    attention: AttentionKind


class _Arrays(NamedTuple):
    """Arrays of a plan, int32. All but `pages` are read on the host, too.

    For layers with a window, a context begins with the page of the first position that a query
    sees. The pages before it may be gone.
    """

    query_starts: Tensor
    """[N + 1]: prefix sums of the query tokens of each prompt."""
    page_starts: Tensor
    """[N + 1]: prefix sums of the pages of each context."""
    last_page_lens: Tensor
    """[N]: tokens in the last page of each context, 1 to `page_size`."""
    context_lens: Tensor
    pages: Tensor
    """[all pages], on the device: the pages of each context, one after the other."""


class _Keys(NamedTuple):
    """Key of the pages that the contexts of a batch have."""

    group: int
    window: int


class _Turn:
    """Memory with which plans are made until the next batch but one."""

    def __init__(self, device: torch.device, copied: CopyEvent) -> None:
        self._device = device
        self._hosts: dict[_Keys, Tensor] = {}
        self.wrappers: dict[_Kind, Any] = {}
        self.copied = copied
        """Event after which the last plan made here is on the device."""

    def arrays(self, prompts: HostPrompts, keys: _Keys, page_size: int) -> _Arrays:
        counts, contexts = prompts.query_counts, prompts.context_lens
        table = prompts.page_table[keys.group]
        ends = pages_for_each(contexts, page_size)
        if keys.window:
            seen = np.maximum(contexts - counts - keys.window + 1, 0)
            first = full_pages(seen, page_size)
        else:
            first = np.zeros_like(ends)
        num_pages = ends - first
        contexts = contexts - capacity_tokens(first, page_size)
        index = np.arange(table.shape[1])
        held = (index >= first[:, None]) & (index < ends[:, None])
        parts = (
            np.concatenate(([0], np.cumsum(counts))),
            np.concatenate(([0], np.cumsum(num_pages))),
            contexts - capacity_tokens(np.maximum(num_pages - 1, 0), page_size),
            contexts,
            table[held],
        )
        sizes = [len(part) for part in parts]
        total = sum(sizes)
        host = self._hosts.get(keys)
        if host is None or len(host) < total:
            pinned = self._device.type == "cuda"
            host = torch.empty(2 * total, dtype=torch.int32, pin_memory=pinned)
            self._hosts[keys] = host
        np.concatenate(parts, out=host.numpy()[:total], casting="unsafe")
        starts, page_starts, last_page_lens, context_lens, pages = host[:total].split(sizes)
        on_device = pages.to(self._device, non_blocking=True)
        return _Arrays(starts, page_starts, last_page_lens, context_lens, on_device)


class FlashInferAttention:
    """Attends from prompts on `device`; `flashinfer` is the module.

    One thread at a time, on one stream. A row's bits may depend on its batch. FlashInfer chooses
    tiles by the mean length of prompts. Tiles of a window's keys begin with the first key that a
    tile of rows sees. Contexts aren't split, so nothing else depends on the batch, and results need
    no further memory.
    """

    def __init__(
        self,
        flashinfer: Any,
        device: torch.device,
        *,
        new_event: Callable[[torch.device], CopyEvent] = copy_event,
    ) -> None:
        self._wrapper_class = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._turns = deque(_Turn(device, new_event(device)) for _ in range(_TURNS))
        """Turns; the first one plans now."""
        self._prompts: HostPrompts | None = None
        """Prompts of the batch that is planned now."""
        self._arrays: dict[_Keys, _Arrays] = {}
        self._planned: dict[_Kind, Any] = {}

    def __call__(self, out: Tensor, qkv: Tensor, at: GpuKVLayer, kind: AttentionKind) -> None:
        """Attend as `PromptAttention` says. Raises what FlashInfer raises, on a first call also for
        kernels that can't be compiled."""
        batch, kv, layer = at
        dim, heads = kv.head_dim, out.shape[1] // kv.head_dim
        planned = _Kind(at.group, kv.dtype, heads, kv.num_kv_heads, dim, kv.page_size, kind)
        first = batch.num_decodes
        queries = qkv[first:, : heads * dim].unflatten(1, (heads, dim))
        results = out[first:].unflatten(1, (heads, dim))
        # Programmatic dependent launch would let a kernel begin before those it depends on.
        self._wrapper(batch.prompts, planned).run(
            queries, kv.layer(layer), out=results, enable_pdl=False
        )

    def _wrapper(self, prompts: HostPrompts, kind: _Kind) -> Any:
        """Return a wrapper that is planned for this batch and kind of layer."""
        if prompts is not self._prompts:
            self._begin(prompts)
        wrapper = self._planned.get(kind)
        if wrapper is None:
            wrapper = self._planned[kind] = self._plan(prompts, kind)
        return wrapper

    def _begin(self, prompts: HostPrompts) -> None:
        self._prompts = None
        self._arrays.clear()
        self._planned.clear()
        self._turns.rotate()
        self._turns[0].copied.synchronize()
        self._prompts = prompts

    def _plan(self, prompts: HostPrompts, kind: _Kind) -> Any:
        turn = self._turns[0]
        wrapper = turn.wrappers.get(kind)
        if wrapper is None:
            wrapper = turn.wrappers[kind] = self._wrapper_class(self._workspace, "HND")
        try:
            keys = _Keys(kind.group, kind.attention.window)
            arrays = self._arrays.get(keys)
            if arrays is None:
                arrays = self._arrays[keys] = turn.arrays(prompts, keys, kind.page_size)
            wrapper.plan(
                arrays.query_starts,
                arrays.page_starts,
                arrays.pages,
                arrays.last_page_lens,
                kind.query_heads,
                kind.kv_heads,
                kind.head_dim,
                kind.page_size,
                causal=True,
                sm_scale=kind.attention.scale,
                # Keys before its own that a query sees; -1 for all.
                window_left=kind.attention.window - 1,
                logits_soft_cap=kind.attention.soft_cap,
                q_data_type=kind.dtype,
                kv_data_type=kind.dtype,
                non_blocking=True,
                seq_lens=arrays.context_lens,
                disable_split_kv=True,
            )
        finally:
            # Anything that was enqueued reads this turn's memory.
            turn.copied.record()
        return wrapper
