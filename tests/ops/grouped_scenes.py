"""Layers of several groups over one pool of pages, compared with the same layers in one group.

Entries outside of every window are NaN, in whole pages and inside of pages. Table entries before a
window name no existing page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from aioserve.ops import Backend, HostBatch, KVShape
from aioserve.ops.backend import AttentionKind, KVLayer
from aioserve.ops.kv_cache import format_of_floats
from aioserve.paging.format import KVEntry
from aioserve.paging.layout import KVLayout, LayerKV, first_seen, kv_layout
from tests.ops.contents import contents, fill
from tests.ops.scenarios import random

__all__ = ["GroupedScene", "grouped_scenes"]

NO_PAGE = 2**30
HEADS, KV_HEADS, DIM = 4, 2, 8


@dataclass(frozen=True)
class GroupedScene:
    windows: tuple[int, ...]
    """Window of each layer; 0: full attention."""
    sequences: tuple[tuple[int, int], ...]
    """Query tokens and context of each sequence."""
    page_size: int
    dtype: torch.dtype = torch.float32
    whole_pages: bool = False
    """True if a page that is partly seen has numbers everywhere."""

    def layout(self, grouped: bool) -> KVLayout:
        entry = KVEntry(format_of_floats(self.dtype), KV_HEADS, DIM)
        layers = [LayerKV(entry, window) for window in self.windows]
        return kv_layout(layers, 10**6, grouped=grouped)

    def attended(self, backend: Backend, grouped: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Run the step, and return the attention of each layer, and the KV that it wrote.

        KV is `[2, T, KV_HEADS, DIM]`, read from the pages. Everything else in the pages must be
        unchanged."""
        layout = self.layout(grouped)
        host, num_pages = self.host(layout)
        kv = backend.allocate_kv(KVShape(layout, num_pages, self.page_size))
        fill(kv, self.history(layout, host, num_pages))
        before = contents(kv).cpu()
        batch = backend.prepare(host, kv, backend.allocate_slots(1))
        tokens, attended = len(host.positions), []
        for layer, window in enumerate(self.windows):
            qkv = random(tokens, (HEADS + 2 * KV_HEADS) * DIM, dtype=self.dtype, seed=1000 + layer)
            qkv, at = qkv.to(backend.device), KVLayer(batch, kv, layer)
            backend.rotary_kv_write(qkv, at, None, None)
            attended.append(backend.paged_attention(qkv, at, AttentionKind(0.3, window)).cpu())
        after, written = contents(kv).cpu(), []
        for group, index in layout.places:
            locations = host.token_locations[group]
            pages, offsets = locations // self.page_size, locations % self.page_size
            written.append(after[index][:, pages, :, offsets])
            after[index][:, pages, :, offsets] = before[index][:, pages, :, offsets]
        bits = torch.int32 if self.dtype is torch.float32 else torch.int16
        assert torch.equal(after.view(bits), before.view(bits))
        return attended, written

    def host(self, layout: KVLayout) -> tuple[HostBatch, int]:
        """Make a step over pages in a random order. Returns the number of pages, too."""
        counts = np.array([tokens for tokens, _ in self.sequences])
        contexts = np.array([context for _, context in self.sequences])
        ends = -(-contexts // self.page_size)
        shape = len(layout.groups), len(self.sequences), int(ends.max()) + 1
        table = np.full(shape, NO_PAGE, np.int32)
        order = np.random.default_rng(0).permutation(table.size).astype(np.int32)
        used = 0
        for group, of_group in enumerate(layout.groups):
            for row, (tokens, context) in enumerate(self.sequences):
                first = first_seen(context - tokens, of_group.window) // self.page_size
                held = int(ends[row]) - first
                table[group, row, first : ends[row]] = order[used : used + held]
                used += held
        return HostBatch.laid_out(counts, contexts, table, self.page_size), table.size

    def history(self, layout: KVLayout, host: HostBatch, num_pages: int) -> Tensor:
        """Make pages, shaped as by `contents`, with the entries before the step's tokens."""
        shape = layout.layers_per_page, 2, num_pages, KV_HEADS, self.page_size, DIM
        values = torch.full(shape, float("nan"), dtype=self.dtype)
        for layer, (group, index) in enumerate(layout.places):
            for row, (tokens, context) in enumerate(self.sequences):
                start = context - tokens
                first = first_seen(start, self.windows[layer])
                if self.whole_pages:
                    first = first // self.page_size * self.page_size
                at = np.arange(first, start)
                pages = torch.from_numpy(host.page_table[group, row, at // self.page_size]).long()
                own = random(2, 80, KV_HEADS, DIM, dtype=self.dtype, seed=100 * layer + row)
                for which in (0, 1):
                    values[index, which][pages, :, at % self.page_size] = own[which, first:start]
        return values


@st.composite
def grouped_scenes(draw: st.DrawFn) -> GroupedScene:
    """Draw layers with and without windows, and steps that decode or go on with prompts."""
    window = draw(st.integers(1, 30))
    seen = st.sampled_from([0, window, max(1, window - draw(st.integers(0, 5)))])
    windows = draw(st.lists(seen, min_size=2, max_size=5).filter(any))
    sequence = st.tuples(st.sampled_from([1, 1, 2, 7, 20]), st.integers(0, 60))
    sequences = draw(st.lists(sequence, min_size=1, max_size=3))
    # Decodes come first, as a runner packs them.
    sequences = sorted((tokens, tokens + before) for tokens, before in sequences)
    page_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return GroupedScene(tuple(windows), tuple(sequences), page_size, dtype)
