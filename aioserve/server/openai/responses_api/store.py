"""Stored responses, which later requests can continue.

Each tenant has its own, bounded in number and bytes: the least recently used is dropped first. All
are dropped at a certain age. They are kept in memory as JSON, so that their size is known and no
caller changes them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

__all__ = ["ResponseStore", "Stored"]


ID_BYTES = 256
"""Bytes to find an item by its id, besides the id itself."""


class Stored(msgspec.Struct, frozen=True):
    """One response. It needs no other: a conversation continues if an earlier response is gone."""

    body: bytes
    """Response in JSON, as it was answered."""
    before: bytes
    """Items of its input, a list in JSON, including those of earlier responses."""
    num_given: int
    """Number of these items that came with its own request; they are the last."""
    ids: tuple[str, ...] = ()
    """Ids of the items of its request and of its answer."""

    @property
    def num_bytes(self) -> int:
        ids = sum([len(one) + ID_BYTES for one in self.ids])
        return len(self.body) + len(self.before) + ids


class ResponseStore:
    """Responses of all tenants, for one event loop. `clock` returns seconds from any origin."""

    def __init__(
        self,
        *,
        max_entries: int,
        max_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._of_tenants: dict[str | None, OrderedDict[str, Stored]] = {}
        """Responses of each tenant, the least recently used first."""
        self._bytes: dict[str | None, int] = {}
        self._of_items: dict[tuple[str | None, str], dict[str, None]] = {}
        """Ids of the responses that have an item, by the tenant and the item's id."""
        self._ends: OrderedDict[tuple[str | None, str], float] = OrderedDict()
        """Time when each response is dropped; the next first."""

    def put(self, tenant: str | None, response_id: str, stored: Stored) -> bool:
        """Store a response; return false if it alone is over the limit. Others then stay."""
        self._forget_old()
        self._drop(tenant, response_id)
        if not self.fits(stored.num_bytes):
            return False
        mine = self._of_tenants.setdefault(tenant, OrderedDict())
        mine[response_id] = stored
        self._bytes[tenant] = self._bytes.get(tenant, 0) + stored.num_bytes
        for item_id in stored.ids:
            self._of_items.setdefault((tenant, item_id), {})[response_id] = None
        self._ends[tenant, response_id] = self._clock() + self._seconds
        while len(mine) > self._max_entries or self._bytes[tenant] > self._max_bytes:
            self._drop(tenant, next(iter(mine)))
        return True

    def fits(self, num_bytes: int) -> bool:
        """Return true if a response of that size can be stored."""
        return self._max_entries > 0 and num_bytes <= self._max_bytes

    def get(self, tenant: str | None, response_id: str) -> Stored | None:
        """Return the tenant's response, and count it as used now; None if it isn't stored."""
        self._forget_old()
        mine = self._of_tenants.get(tenant)
        if mine is None or response_id not in mine:
            return None
        mine.move_to_end(response_id)
        return mine[response_id]

    def with_item(self, tenant: str | None, item_id: str) -> str | None:
        """Return the id of the tenant's last response with this item, or None."""
        self._forget_old()
        return next(reversed(self._of_items.get((tenant, item_id), {})), None)

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Delete a response; return true if it was there."""
        self._forget_old()
        return self._drop(tenant, response_id)

    def num_bytes(self, tenant: str | None) -> int:
        return self._bytes.get(tenant, 0)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._ends:
            (tenant, response_id), ends = next(iter(self._ends.items()))
            if ends > now:
                return
            self._drop(tenant, response_id)

    def _drop(self, tenant: str | None, response_id: str) -> bool:
        mine = self._of_tenants.get(tenant)
        if mine is None or (stored := mine.pop(response_id, None)) is None:
            return False
        del self._ends[tenant, response_id]
        self._bytes[tenant] -= stored.num_bytes
        for item_id in stored.ids:
            having = self._of_items.get((tenant, item_id), {})
            having.pop(response_id, None)
            if not having:
                self._of_items.pop((tenant, item_id), None)
        if not mine:
            del self._of_tenants[tenant], self._bytes[tenant]
        return True
