"""Drafters whose draft tokens a model computes. The engine loads the model, and calls pass on to
it."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.drafting.at_once import AtOnce
from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.errors import InvariantError

__all__ = ["MAX_PATH_CHARS", "LoadedDrafter", "loaded_by_engine"]

MAX_PATH_CHARS = 4096


class LoadedDrafter(AtOnce):
    """Drafts by a model that an engine loads beside its own, in its own memory.

    Only an engine that loads its model by name can have one.
    """

    kind: str
    """Name of this kind of drafter."""
    path: str | None
    """Path of the model. None: it comes with that of the engine."""

    def __init__(self) -> None:
        self._loaded: Drafter | None = None

    def draft_with(self, loaded: Drafter) -> None:
        """Pass calls on to the drafter that computes the model."""
        self._loaded = loaded

    @property
    def _drafter(self) -> Drafter:
        if self._loaded is None:
            raise InvariantError(f"no engine has loaded the draft model {self.path!r}")
        return self._loaded

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._drafter.start(slot, sequence)

    def end(self, slot: int) -> None:
        self._drafter.end(slot)

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._drafter.extend_all(slots, token_ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return self._drafter.draft_all(slots, limits)


def loaded_by_engine(drafter: object) -> LoadedDrafter | None:
    """Return the drafter if an engine loads a model for it, else None."""
    return drafter if isinstance(drafter, LoadedDrafter) else None
