"""What an operator decides about a server: who may call it, and how much each call may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aioserve.arguments import Rule, check, integer, sequence, text
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
    max_top_logprobs: int = 20
    """Most likely tokens that are told at each place: `top_logprobs` of chat, `logprobs` of
    completions."""
    max_stops: int = 16
    """Strings in `stop`; the engine takes no more than 16."""
    max_tools: int = 128
    """In one request."""
    max_schema_bytes: int = 65_536
    """Of each JSON schema, and of those of all tools together where the answer must be a call; as
    compact JSON. The engine takes no more than 131,072 characters."""
    max_items: int = 4096
    """Of the input of a response, those of earlier responses included; messages and their blocks in
    a request for a message."""
    max_metadata: int = 16
    """Entries of a response's metadata."""
    max_metadata_key_chars: int = 64
    max_metadata_value_chars: int = 512
    max_stored_responses: int = 1024
    """Of each tenant; the least recently used goes. 0 stores none."""
    max_stored_bytes: int = 64 * 2**20
    """Of the responses of each tenant, with all that came before them, as JSON; likewise."""
    stored_response_seconds: int = 24 * 3600
    """After that long a response is forgotten."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = check(ConfigError, name, getattr(self, name), rule)
            msgspec.structs.force_setattr(self, name, value)


_RULES: dict[str, Rule[Any]] = {
    "served_model_names": sequence(text(1, 256), 16),
    "max_body_bytes": integer(1024, 2**30),
    "max_prompts": integer(1, 4096),
    "max_n": integer(1, 4096),
    "max_top_logprobs": integer(0, 64),
    "max_stops": integer(0, 16),
    "max_tools": integer(0, 1024),
    "max_schema_bytes": integer(2, 131_072),
    "max_items": integer(1, 10_000),
    "max_metadata": integer(0, 1024),
    "max_metadata_key_chars": integer(1, 4096),
    "max_metadata_value_chars": integer(1, 65_536),
    "max_stored_responses": integer(0, 2**20),
    "max_stored_bytes": integer(0, 2**40),
    "stored_response_seconds": integer(1, 10 * 365 * 24 * 3600),
}
