"""A smaller model as drafter: what the engine is told of it, and where its guesses come from once
it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from aioserve.arguments import check, choice, optional, text
from aioserve.config import Quantization
from aioserve.drafting.at_once import AtOnce
from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.errors import ConfigError, InvariantError

__all__ = ["MAX_PATH_CHARS", "ModelDrafter"]

MAX_PATH_CHARS = 4096


class ModelDrafter(AtOnce):
    """Guesses by a smaller model that has the tokens of the one that is served.

    The smaller model draws with the parameters, the seed and the positions of the request, which
    makes it draw the same token wherever its distribution is the same (Daliri, Musco and Suresh,
    arXiv 2408.07978). Its keys and values lie in pages of its own with the numbers of the other
    model's, so prompts that share pages there share them here.

    Only an engine that loads its model by name can have one: it loads the smaller model beside it.
    """

    def __init__(
        self, *, path: str | None = None, quantization: Quantization | None = None
    ) -> None:
        """`path`: the smaller model, named as an engine's own; None: the one that comes with the
        embedded model that is served, or with `quantization` the served model itself.
        `quantization`: how its weights are rounded while they are read, as an engine's own; None:
        not at all. Raises `ConfigError` for a path that is none, and for another quantization."""
        self.path: str | None = check(ConfigError, "path", path, optional(text(1, MAX_PATH_CHARS)))
        self.quantization: Quantization | None = check(
            ConfigError, "quantization", quantization, optional(choice(*get_args(Quantization)))
        )
        self._loaded: Drafter | None = None

    def guess_by(self, loaded: Drafter) -> None:
        """Pass calls on to what computes the model."""
        self._loaded = loaded

    @property
    def _guesses(self) -> Drafter:
        if self._loaded is None:
            raise InvariantError(f"no engine has loaded the draft model {self.path!r}")
        return self._loaded

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._guesses.start(slot, sequence)

    def end(self, slot: int) -> None:
        self._guesses.end(slot)

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._guesses.extend_all(slots, token_ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return self._guesses.draft_all(slots, limits)
