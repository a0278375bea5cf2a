"""A smaller model as drafter."""

from __future__ import annotations

from typing import get_args

from aioserve.arguments import check, choice, optional, text
from aioserve.config import Quantization
from aioserve.drafting.loaded import MAX_PATH_CHARS, LoadedDrafter
from aioserve.errors import ConfigError

__all__ = ["ModelDrafter"]


class ModelDrafter(LoadedDrafter):
    """Guesses by a smaller model that has the tokens of the one that is served.

    The smaller model draws with the parameters, the seed and the positions of the request, which
    makes it draw the same token wherever its distribution is the same (Daliri, Musco and Suresh,
    arXiv 2408.07978). Its keys and values lie in pages of its own with the numbers of the other
    model's, so prompts that share pages there share them here.
    """

    kind = "model"

    def __init__(
        self, *, path: str | None = None, quantization: Quantization | None = None
    ) -> None:
        """`path`: the smaller model, named as an engine's own; None: the one that comes with the
        embedded model that is served, or with `quantization` the served model itself.
        `quantization`: how its weights are rounded while they are read, as an engine's own; None:
        not at all. Raises `ConfigError` for a path that is none, and for another quantization."""
        super().__init__()
        self.path: str | None = check(ConfigError, "path", path, optional(text(1, MAX_PATH_CHARS)))
        self.quantization: Quantization | None = check(
            ConfigError, "quantization", quantization, optional(choice(*get_args(Quantization)))
        )
