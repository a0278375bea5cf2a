"""Leases: the pages of KV memory that one sequence holds, and where they came from.

    index     0 ........... published ........ entries .... room
    pages     [ in the tree ][ its own alone            ][ empty ]
    KV        [ borrowed ... ][ computed by itself ......]

A token has a position in its text. Its keys and values, an entry, have an index in the pages. Pages
are counted by index, tokens by position. The two are equal until entries are dropped.

A lease has a page table for each group of the memory (`aioserve.kv.groups`). The table of group 0
has a page for each position. Others may begin later and end sooner, as far as the lease is
`covered`.

A lease is a record. Only `KVMemory` changes it; its holders may read it.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.kv.page_pool import NO_STEP
from aioserve.kv.page_table import PageTable
from aioserve.kv.prefix_tree import NO_RECEIPT

__all__ = ["KVLease", "SwappedPages", "SwappedRun"]

NO_TABLE = PageTable()


class SwappedRun(msgspec.Struct, frozen=True, gc=False):
    """Pages of one group that were copied to another tier, up to the last entry."""

    first: int
    """Position of the first page."""
    page_ids: npt.NDArray[np.int32]


class SwappedPages(msgspec.Struct, frozen=True, gc=False):
    """Pages of a preempted sequence that were copied to another tier."""

    tier: int
    groups: tuple[SwappedRun, ...]
    """One run per group of the memory. The tree has the pages of group 0 before the first of its
    run."""
    computed: int
    """Tokens computed when the pages were copied, including those of the pages before the run."""
    entries: int
    """Entries in all these pages: one for each of these tokens, less the dropped ones."""
    step: int
    """Number of the step that copies them."""

    @property
    def lost_entries(self) -> bool:
        """True if entries were dropped. The sequence can then only go on from these pages, and from
        those before the run."""
        return self.entries != self.computed


class KVLease:
    """Pages of one sequence in order, how far they are written, and what others share of them.

    Empty until `KVMemory.begin`, and over with `KVMemory.leave`. A sequence that begins again needs
    a `successor`.
    """

    __slots__ = (
        "borrowed",
        "cached",
        "carried",
        "computed",
        "covered",
        "entries",
        "inherited_step",
        "last_step",
        "namespace",
        "page_table",
        "published",
        "receipt",
        "shares_partial_page",
        "swapped",
        "tables",
    )

    def __init__(self, namespace: bytes = b"") -> None:
        self.namespace: bytes = namespace
        """Namespace of the sequence. Pages are shared only with leases of the same namespace."""
        self.tables: tuple[PageTable, ...] = ()
        """Page table of each group, in the order of the memory's groups. Empty before it begins."""
        self.page_table: PageTable = NO_TABLE
        """Page table of group 0; an empty one before it begins."""
        self.covered: int = 0
        """Leading page positions that have their pages of all groups."""
        self.carried: int = 0
        """Leading pages that plans have told the runner about."""
        self.computed: int = 0
        """Tokens that are computed once every launched step is done, which is the position of the
        next one."""
        self.entries: int = 0
        """Entries that the pages hold then, which is the index of the next one. Equals `computed`,
        less the entries that were dropped."""
        self.last_step: int = NO_STEP
        """Number of the last step that touches the pages. Given back, they are fenced until it is
        done."""
        self.cached: int = 0
        """Leading tokens whose KV existed when the sequence began: in the prefix tree, in another
        tier, or in the lease it was forked from."""
        self.borrowed: int = 0
        """Number of leading tokens up to the last one with KV that others computed."""
        self.inherited_step: int = NO_STEP
        """Number of the last step that should have written some of the borrowed KV, if the prefix
        tree doesn't know it."""
        self.published: int = 0
        """Leading pages that the receipt covers: they are in the prefix tree."""
        self.receipt: int = NO_RECEIPT
        """Lock on the sequence's path in the prefix tree."""
        self.shares_partial_page: bool = False
        """True if the page that holds the last token in part may belong to another lease, too. It
        is then copied before it is written."""
        self.swapped: SwappedPages | None = None
        """Pages in another tier that an earlier lease of the sequence left behind."""

    def take(self, tables: tuple[PageTable, ...]) -> None:
        """Take these page tables, with their references to pages."""
        self.tables, self.page_table = tables, tables[0]

    def successor(self) -> KVLease:
        """Make an empty lease for the same sequence, after this one is over."""
        lease = KVLease(self.namespace)
        lease.last_step, lease.swapped = self.last_step, self.swapped
        return lease

    @property
    def num_pages(self) -> int:
        """Number of pages of group 0."""
        return len(self.page_table.page_ids)

    @property
    def num_held(self) -> int:
        """References to pages, of all groups."""
        return sum([len(table.held) for table in self.tables])

    @property
    def num_locked(self) -> int:
        """Pages that a pin keeps: those of the prefix tree, and the pages of other groups that it
        holds."""
        return self.published + self.num_held

    @property
    def page_ids(self) -> npt.NDArray[np.int32]:
        """Pages of group 0 in order of position: a read-only view, int32 `[num_pages]`, that never
        changes."""
        return self.page_table.page_ids

    def __repr__(self) -> str:
        return f"KVLease(computed={self.computed}, pages={self.page_ids.tolist()})"
