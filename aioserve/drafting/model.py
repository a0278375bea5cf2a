"""A smaller model as drafter."""

from __future__ import annotations

from typing import get_args

from aioserve.arguments import check, choice, optional, text
from aioserve.config import Quantization
from aioserve.drafting.loaded import MAX_PATH_CHARS, LoadedDrafter
from aioserve.errors import ConfigError

__all__ = ["ModelDrafter"]


class ModelDrafter(LoadedDrafter):
    """Drafts by a smaller model with the same tokens as the served one.

    The smaller model draws with the parameters, seed and positions of the request. It therefore
    draws the same token wherever its distribution is the same (Daliri, Musco and Suresh, arXiv
    2408.07978). Its keys and values lie in pages of its own with the same numbers as the other
    model's. So prompts that share pages there share them here.
    """

    kind = "model"

    def __init__(
        self, *, path: str | None = None, quantization: Quantization | None = None
    ) -> None:
        """`path` names the smaller model, like an engine's own. None: the one that comes with the
        served embedded model, or with `quantization` the served model itself.

        `quantization` says how its weights are rounded while they are read, like an engine's own;
        None: not at all. Raises `ConfigError` for an invalid path or quantization.
        """
        super().__init__()
        self.path: str | None = check(ConfigError, "path", path, optional(text(1, MAX_PATH_CHARS)))
        self.quantization: Quantization | None = check(
            ConfigError, "quantization", quantization, optional(choice(*get_args(Quantization)))
        )
