"""Hidden states of a target, in pages with the numbers of its KV pages.

A head computes from them whenever it drafts, however long after the target. So they also serve a
prefix that another request computed, or that came back from the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from aioserve.sampling.uploads import upload
from aioserve.steps.pages import PageCopy

__all__ = ["StatePages"]

Locations = npt.NDArray[np.int64]


class StatePages:
    """States of each token of a page, on the device and on the host: `[pages, page_size, columns]`.

    The host has None if it has no pages.
    """

    def __init__(self, pages: torch.Tensor, host_pages: torch.Tensor | None) -> None:
        self._pages = pages
        self._host_pages = host_pages
        self._rows = pages.view(-1, pages.shape[-1])
        self.page_size: int = pages.shape[1]

    @property
    def facts(self) -> Mapping[str, int]:
        """Bytes of the pages."""
        host = self._host_pages
        return {
            "state_bytes": self._pages.nbytes,
            "host_state_bytes": 0 if host is None else host.nbytes,
        }

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages as the target's were copied, one after the other."""
        if not copies:
            return
        tiers = (self._pages, self._host_pages)
        for copy in copies:
            source, target = tiers[copy.from_tier], tiers[copy.to_tier]
            if source is not None and target is not None:
                count = copy.num_tokens
                # Later work on the stream waits for the copy, and nothing else reads it.
                target[copy.target, :count].copy_(source[copy.source, :count], non_blocking=True)

    def put(self, locations: Locations, states: torch.Tensor) -> None:
        """Store `states` `[T, columns]` at these locations, page * page_size + offset, int64
        `[T]`."""
        self.put_at(self._placed(locations), states)

    def put_at(self, locations: torch.Tensor, states: torch.Tensor) -> None:
        """Do what `put` does, with locations on the device, int64 `[T]`. Waits for nothing, so a
        graph may contain it."""
        self._rows.index_copy_(0, locations, states)

    def clear(self, page: int) -> None:
        """Fill a page with zeros."""
        self._pages[page].zero_()

    def at(self, locations: Locations) -> torch.Tensor:
        """Return the states at these locations, int64 `[T]`, as `[T, columns]`. Locations
        without a stored state give arbitrary values."""
        return self._rows.index_select(0, self._placed(locations))

    def _placed(self, locations: Locations) -> torch.Tensor:
        return upload(locations, np.int64, self._rows.device)
