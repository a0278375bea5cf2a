"""Rows in a runner's per-sequence buffers, given back behind the step fence like pages."""

from __future__ import annotations

from aioserve.kv.page_pool import NO_STEP

__all__ = ["SlotPool"]


class SlotPool:
    """Hands out slots `0..num_slots-1`; one given back is free once its last step is done."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._fenced: list[tuple[int, int]] = []
        self._done = NO_STEP

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        return self._free.pop()

    def release(self, slot: int, last_step: int) -> None:
        if last_step <= self._done:
            self._free.append(slot)
        else:
            self._fenced.append((last_step, slot))

    def complete(self, step: int) -> None:
        """Step number `step`, and every one before it, is done."""
        self._done = step
        still_fenced = []
        for last_step, slot in self._fenced:
            if last_step <= step:
                self._free.append(slot)
            else:
                still_fenced.append((last_step, slot))
        self._fenced = still_fenced
