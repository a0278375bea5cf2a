"""Responses that were stored, for those who go on from them.

Each tenant has its own, bounded in number and bytes: the least recently used goes first. All go
when they are old enough. They are kept in memory as JSON, so that what they take is known and
no caller changes them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

__all__ = ["ResponseStore", "Stored"]


ID_BYTES = 256
"""Bytes that an item takes to be found by its id, beside the id itself."""


class Stored(msgspec.Struct, frozen=True):
    """One response. It needs no other: a conversation goes on where one before it is gone."""

    body: bytes
    """As it was answered."""
    before: bytes
    """The items that it answered, a list, those of earlier responses included."""
    num_given: int
    """How many of these came with its own request; they are the last."""
    ids: tuple[str, ...] = ()
    """Ids of the items that came with its request, and of those that it answered with."""

    @property
    def num_bytes(self) -> int:
        ids = sum([len(one) + ID_BYTES for one in self.ids])
        return len(self.body) + len(self.before) + ids


class ResponseStore:
    """`clock` counts seconds from anywhere. For one event loop."""

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
        """The least recently used first."""
        self._bytes: dict[str | None, int] = {}
        self._of_items: dict[tuple[str | None, str], dict[str, None]] = {}
        """Ids of the responses that have an item, by the tenant and the item's id."""
        self._ends: OrderedDict[tuple[str | None, str], float] = OrderedDict()
        """When each is forgotten; the next first."""

    def put(self, tenant: str | None, response_id: str, stored: Stored) -> bool:
        """Keep it; whether that is possible. One that is larger than all may be is not kept, and
        nothing goes for it."""
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
        """Whether a response of that size can be kept."""
        return self._max_entries > 0 and num_bytes <= self._max_bytes

    def get(self, tenant: str | None, response_id: str) -> Stored | None:
        """The tenant's; it counts as used now."""
        self._forget_old()
        mine = self._of_tenants.get(tenant)
        if mine is None or response_id not in mine:
            return None
        mine.move_to_end(response_id)
        return mine[response_id]

    def with_item(self, tenant: str | None, item_id: str) -> str | None:
        """The id of the tenant's last response that has the item."""
        self._forget_old()
        return next(reversed(self._of_items.get((tenant, item_id), {})), None)

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Whether it was there."""
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
