"""Drafters that take all slots of a step at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from aioserve.drafting.drafter import Drafter

__all__ = ["AtOnce"]


class AtOnce(Drafter):
    """Drafter that handles all slots of a step in one call. A single slot is a step of one."""

    @abstractmethod
    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None: ...

    @abstractmethod
    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]: ...

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self.extend_all((slot,), (token_ids,))

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        return self.draft_all((slot,), (limit,))[0]
