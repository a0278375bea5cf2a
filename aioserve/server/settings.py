"""What an operator decides about a server: who may call it, and how much each call may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aioserve.arguments import Rule, boolean, check, integer, sequence, text
from aioserve.errors import ConfigError

__all__ = ["ServerSettings"]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `ConfigError` for a value outside its range."""

    served_model_names: Sequence[str] = ()
    """Names under which requests may ask for the model, up to 16; the first is the one that answers
    carry. None: the model's own, which is the last part of its path. Kept as a tuple."""
    max_body_bytes: int = 8 * 2**20
    """Of one request."""
    max_prompts: int = 64
    """In one request for completions or embeddings."""
    max_n: int = 16
    """`n` and `best_of` of one request; the engine's `max_num_seqs` limits them as well."""
    page: bool = True
    """Whether there are the page at `/`, and `/live` and `/trace`, which show what the engine
    does."""
    max_live_readers: int = 16
    """Who may look at `/live` at the same time; one more gets the status 503."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = check(ConfigError, name, getattr(self, name), rule)
            msgspec.structs.force_setattr(self, name, value)


_RULES: dict[str, Rule[Any]] = {
    "served_model_names": sequence(text(1, 256), 16),
    "max_body_bytes": integer(1024, 2**30),
    "max_prompts": integer(1, 4096),
    "max_n": integer(1, 4096),
    "page": boolean,
    "max_live_readers": integer(1, 1024),
}
