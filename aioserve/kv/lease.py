"""Leases: pages of KV memory that one sequence holds, and how they came to it.

    position  0 ........... published ........ computed ... room
    pages     [ in the tree ][ its own alone            ][ empty ]
    KV        [ borrowed ... ][ computed by itself ......]

Where a model has window layers, the lease has window pages beside these, as far as it is `covered`
(`aioserve.kv.window_pages`).

A lease is a record. `KVMemory` alone changes it; its holders may read it.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.kv.page_pool import NO_STEP
from aioserve.kv.page_table import PageTable
from aioserve.kv.prefix_tree import NO_RECEIPT
from aioserve.kv.window_pages import NO_PAGES, WindowPages

__all__ = ["KVLease", "SwappedPages"]


class SwappedPages(msgspec.Struct, frozen=True, gc=False):
    """Pages of a preempted sequence that were copied to the host."""

    first: int
    """Index in the page table of the first of them."""
    host_page_ids: npt.NDArray[np.int32]
    computed: int
    """Tokens computed when they were copied, those of the pages before `first` included."""
    step: int
    """Number of the step that copies them."""
    first_window: int = 0
    """Position of the first of the window pages."""
    host_window_page_ids: npt.NDArray[np.int32] = NO_PAGES
    """Window pages, up to the position of the last page."""


class KVLease:
    """Pages of one sequence in order, how far they are written, and what others share of them.

    Empty until `KVMemory.begin`, and over with `KVMemory.leave`: a sequence that begins again needs
    a `successor`.
    """

    __slots__ = (
        "borrowed",
        "cached",
        "carried",
        "computed",
        "covered",
        "inherited_step",
        "last_step",
        "namespace",
        "page_table",
        "published",
        "receipt",
        "shares_partial_page",
        "swapped",
        "windows",
    )

    def __init__(self, namespace: bytes = b"") -> None:
        self.namespace: bytes = namespace
        """Pages are shared with leases of the same namespace alone."""
        self.page_table: PageTable = PageTable()
        self.covered: int = 0
        """Leading page positions that have all their pages: window pages come with the chunks of a
        prompt. Without these, the number of pages."""
        self.windows: WindowPages | None = None
        """Window pages, where there are any."""
        self.carried: int = 0
        """Leading pages that plans have told the runner of."""
        self.computed: int = 0
        """Tokens whose KV is in pages once every launched step is done."""
        self.last_step: int = NO_STEP
        """Number of the last step that touches the pages: given back, they are fenced until it is
        done."""
        self.cached: int = 0
        """Leading tokens whose KV was there when the sequence began: in the prefix tree, on the
        host, or that of the lease it was forked from."""
        self.borrowed: int = 0
        """Leading tokens among which is KV that others computed."""
        self.inherited_step: int = NO_STEP
        """Number of the last step that should have written some of these, where the prefix tree
        doesn't know it."""
        self.published: int = 0
        """Leading pages that the receipt covers: they are in the prefix tree."""
        self.receipt: int = NO_RECEIPT
        """The lock on the sequence's path in the prefix tree."""
        self.shares_partial_page: bool = False
        """The page that holds the last token in part may be another lease's too: it is copied
        before it is written."""
        self.swapped: SwappedPages | None = None
        """Pages on the host that an earlier lease of the sequence left behind."""

    def successor(self) -> KVLease:
        """An empty lease for the same sequence, after this one is over."""
        lease = KVLease(self.namespace)
        lease.last_step, lease.swapped = self.last_step, self.swapped
        return lease

    @property
    def num_pages(self) -> int:
        return len(self.page_table.page_ids)

    @property
    def num_held(self) -> int:
        """Pages to which it has references, window pages included."""
        windows = 0 if self.windows is None else len(self.windows.held)
        return len(self.page_table.page_ids) + windows

    @property
    def num_locked(self) -> int:
        """Pages that a pin keeps: those of the prefix tree, and the window pages that it holds."""
        windows = 0 if self.windows is None else len(self.windows.held)
        return self.published + windows

    @property
    def page_ids(self) -> npt.NDArray[np.int32]:
        """Pages in order of position: a read-only view, int32 `[num_pages]`, that never changes."""
        return self.page_table.page_ids

    def __repr__(self) -> str:
        return f"KVLease(computed={self.computed}, pages={self.page_ids.tolist()})"
