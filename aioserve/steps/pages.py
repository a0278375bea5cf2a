"""What happens to pages before a step computes anything."""

from __future__ import annotations

from enum import Enum

import msgspec

__all__ = ["CopyKind", "PageCopy"]


class CopyKind(Enum):
    """Between which storages a page is copied."""

    DEVICE = "device"
    """Within the device: a shared page before it is written, or the valid part of a cached one."""
    TO_HOST = "to host"
    FROM_HOST = "from host"


class PageCopy(msgspec.Struct, frozen=True, gc=False):
    """The KV of the first `num_tokens` tokens of page `source` goes to page `target`, all layers.

    Pages on the host have numbers of their own.
    """

    kind: CopyKind
    source: int
    target: int
    num_tokens: int
