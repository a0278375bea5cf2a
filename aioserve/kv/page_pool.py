"""Page pool: decides for every page of the KV cache if it is free, fenced or held.

Knows page numbers, reference counts and step numbers; the counting itself is native. Must not know
tokens or tensors. Not thread-safe: one scheduler owns a pool.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from aioserve import _native

__all__ = ["NO_STEP", "OutOfPagesError", "PagePool", "PageState"]

NO_STEP = -1
"""Value of `last_step` for pages that no launched step has named."""


class PageState(IntEnum):
    """State of a page; each page is in exactly one."""

    FREE = 0
    FENCED = 1
    """Released, but a step in flight may still touch it."""
    HELD = 2
    """Has at least one reference."""


class OutOfPagesError(Exception):
    """More pages were asked for than are free. This is a matter of timing, not a bug."""

    def __init__(self, requested: int, free: int, fenced: int) -> None:
        super().__init__(f"{requested} pages requested, {free} free ({fenced} more are fenced)")
        self.requested = requested
        self.free = free
        self.fenced = fenced


class PagePool:
    """`num_pages` pages of `page_size` tokens, numbered from 0.

    ::

              acquire                 release, last reference
        free ---------> held (count) ------------------------> free     if its last step is done
          ^                         \\-----------------------> fenced   if not
          +--------------------------------------------------- complete

    Steps are numbered upwards from 0. A release names the last launched step that may still touch
    the page, and the page is not handed out before that step is done. The page freed last is reused
    first, which keeps the memory in use small and warm.

    A page of group 0 may have `num_group_pages` group pages: the pages of the other groups at its
    position. It holds a reference to each, until they are detached or its own last reference goes.
    While they have no other references they are idle.

    An operation that raises has changed nothing. An `InvariantError` means a bug of the caller or
    the pool: a page released or retained that isn't held, or a page of another pool.
    """

    __slots__ = ("_native", "num_group_pages", "num_pages", "page_size")

    num_pages: int
    page_size: int
    num_group_pages: int

    def __init__(self, num_pages: int, page_size: int, num_group_pages: int = 0) -> None:
        self._native = _native.PagePool(num_pages, page_size, num_group_pages)
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_group_pages = num_group_pages

    @property
    def num_free(self) -> int:
        """Pages that `acquire` can hand out now."""
        return self._native.num_free

    @property
    def num_fenced(self) -> int:
        """Pages that become free when steps in flight are done."""
        return self._native.num_fenced

    @property
    def num_held(self) -> int:
        """Pages with at least one reference."""
        return self._native.num_held

    @property
    def num_idle(self) -> int:
        """Pages whose group pages have no other references."""
        return self._native.num_idle

    @property
    def done_step(self) -> int:
        """The last step that is done; `NO_STEP` before the first."""
        return self._native.done_step

    def acquire(self, count: int) -> npt.NDArray[np.int32]:
        """Take `count` free pages with one reference each, or none: int32 `[count]`.

        Raises `OutOfPagesError` if fewer are free, `ValueError` for a negative count.
        """
        native = self._native
        if count > native.num_free:
            raise OutOfPagesError(count, native.num_free, native.num_fenced)
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        pages = np.empty(count, np.int32)
        native.acquire_into(pages)
        return pages

    def retain(self, pages: npt.NDArray[np.int32]) -> None:
        """Add one reference to each of `pages`, int32 `[n]`, all of them held."""
        self._native.retain(pages)

    def release(self, pages: npt.NDArray[np.int32], last_step: int) -> None:
        """Drop one reference from each of `pages`, int32 `[n]`. This is the only way to give pages
        back.

        `last_step` is the last launched step that names these pages for this holder, or `NO_STEP`.
        A page without references becomes free once the latest step named by any of its holders is
        done, and is fenced until then.
        """
        self._native.release(pages, last_step)

    def unretain(self, pages: npt.NDArray[np.int32]) -> None:
        """Undo a `retain` of `pages`, int32 `[n]`, that led to nothing. Group pages that are idle
        again count as idle since before it."""
        self._native.unretain(pages)

    def attach(self, owner: int, pages: npt.NDArray[np.int32]) -> None:
        """Make `pages`, int32 `[num_group_pages]`, the group pages of `owner`, which has none. Adds
        a reference to each. They must have no owner and no group pages."""
        self._native.attach(owner, pages)

    def detach(self, owner: int, last_step: int) -> None:
        """End the references of `owner` to its group pages, as `release` does."""
        self._native.detach(owner, last_step)

    def group_pages(self, pages: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Group pages of each of `pages`, int32 `[n]`: int32 `[n, num_group_pages]`, -1 where a
        page has none."""
        found = np.empty(len(pages) * self.num_group_pages, np.int32)
        self._native.group_pages_into(pages, found)
        return found.reshape(len(pages), self.num_group_pages)

    def idle_owners(self) -> list[tuple[int, int]]:
        """Pages whose group pages are idle, in the order in which they became so, each with the
        time of that. For tests and dumps."""
        return self._native.idle_owners()

    def set_clock(self, now: int) -> None:
        """Set the time for what becomes idle from now on."""
        self._native.set_clock(now)

    def complete(self, step: int) -> None:
        """Record that step `step` and every one before it are done. Pages fenced for them become
        free.

        Raises `InvariantError` if a later step was done already.
        """
        self._native.complete(step)

    def ref_count(self, page: int) -> int:
        """References to `page`; 0 unless it is held."""
        return self._native.ref_count(page)

    def ref_counts(self) -> npt.NDArray[np.int32]:
        """References to each page: a copy, int32 `[num_pages]`."""
        counts = np.empty(self.num_pages, np.int32)
        self._native.ref_counts_into(counts)
        return counts

    def num_unshared(self, pages: npt.NDArray[np.int32]) -> int:
        """Number of `pages`, int32 `[n]`, with exactly one reference, not counting that of the page
        they are group pages of."""
        return self._native.num_unshared(pages)

    def state(self, page: int) -> PageState:
        """State of `page`."""
        return PageState(self._native.state(page))

    def sanity_check(self) -> None:
        """Recount everything; raise `InvariantError` naming every term that is off. The pool is
        consistent if:

        - pages = free + fenced + held, and no page is listed twice,
        - exactly the held pages have references,
        - no fence waits for a step that is done, and
        - group pages have one owner, which is held, and are listed as idle while it is their only
          holder.

        Costs time in proportion to the number of pages: for tests and for an idle engine.
        """
        self._native.sanity_check()

    def __repr__(self) -> str:
        return (
            f"PagePool(num_pages={self.num_pages}, page_size={self.page_size}, "
            f"free={self.num_free}, fenced={self.num_fenced}, held={self.num_held}, "
            f"done_step={self.done_step})"
        )
