"""Pages whose keys and values must be somewhere else before the next plan computes, in order."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.steps.pages import CopyKind, PageCopy

__all__ = ["Copies", "MemoryCounters"]

PageIds = npt.NDArray[np.int32]


class MemoryCounters(msgspec.Struct):
    """Totals since the memory was made."""

    pages_copied: int = 0
    """Pages copied on the device: shared ones before a write, and cached ones in part."""
    pages_swapped_out: int = 0
    pages_swapped_in: int = 0


class Copies:
    """Copies that no plan carries yet, and counts of all copies so far."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.waiting: list[PageCopy] = []
        """Copies for the next plan to carry, in order, and to clear."""
        self.counters: MemoryCounters = MemoryCounters()

    def on_device(self, sources: PageIds, targets: PageIds, num_tokens: int) -> None:
        """Copy the first `num_tokens` of each page."""
        self._add(CopyKind.DEVICE, sources, targets, num_tokens)
        self.counters.pages_copied += len(sources)

    def to_host(self, sources: PageIds, targets: PageIds) -> None:
        self._add(CopyKind.TO_HOST, sources, targets, self._page_size)
        self.counters.pages_swapped_out += len(sources)

    def from_host(self, sources: PageIds, targets: PageIds) -> None:
        self._add(CopyKind.FROM_HOST, sources, targets, self._page_size)
        self.counters.pages_swapped_in += len(sources)

    def _add(self, kind: CopyKind, sources: PageIds, targets: PageIds, num_tokens: int) -> None:
        self.waiting += [
            PageCopy(kind, source, target, num_tokens)
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True)
        ]
