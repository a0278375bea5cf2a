"""What an operator decides about a server: who may call it, and how much each call may ask for.

API keys are checked when an operator gives them, and kept so that nothing can show them: as two
hashes, one to know a key by and one that tells cached prefixes of its holder from those of others.
Both are made with a tag of their own, so that one says nothing of the other.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Literal

import msgspec

from aioserve.arguments import check_fields, integer, number, rules_of, sequence, text
from aioserve.errors import ConfigError
from aioserve.hints import (
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
)

__all__ = [
    "MAX_KEYS",
    "MIN_KEY_CHARS",
    "ApiKey",
    "ServerSettings",
    "keys_of",
]

logger: logging.Logger = logging.getLogger(__name__)

MIN_KEY_CHARS, WEAK_KEY_CHARS, MAX_KEY_CHARS = 8, 16, 512
MAX_KEYS = 1024
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One that opens the server. Its name is in logs and metrics."""

    name: str
    digest: bytes = field(repr=False)
    cache_salt: str = field(repr=False)

    @classmethod
    def of(cls, name: str, key: str) -> ApiKey:
        return cls(name, digest_of(key), "key-" + _tagged("cache salt", key).hex())


def digest_of(key: str) -> bytes:
    """32 bytes to know `key` by."""
    return _tagged("api key", key)


def _tagged(tag: str, key: str) -> bytes:
    return hmac.digest(f"aioserve {tag}".encode(), key.encode("utf-8", "surrogatepass"), "sha256")


def keys_of(given: object) -> tuple[ApiKey, ...]:
    """Keys of a mapping by names, or of a sequence, which are then called key-1, key-2 and so on.
    Raises `ConfigError`, which never shows a key."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise _wrong("must be a mapping of names to keys, or a sequence of keys")
    pairs = given.items() if isinstance(given, Mapping) else enumerate(given, 1)
    found: list[ApiKey] = []
    for name, key in islice(pairs, MAX_KEYS + 1):
        if isinstance(key, ApiKey):
            found.append(key)
        else:
            found.append(_key_of(f"key-{name}" if isinstance(name, int) else name, key))
    if len(found) > MAX_KEYS:
        raise _wrong(f"must have at most {MAX_KEYS} entries", limit=MAX_KEYS)
    if len({key.name for key in found}) < len(found):
        raise _wrong("must have names that differ")
    if len({key.digest for key in found}) < len(found):
        raise _wrong("must be keys that differ: two names have the same one")
    return tuple(found)


def _key_of(name: object, key: object) -> ApiKey:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        # A name that isn't one may be a key that was put in the wrong place.
        raise _wrong("must have names of 1 to 64 letters, digits, dots, underscores and hyphens")
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise _wrong(f"[{name}] must be a str of ASCII characters without spaces")
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        limit = MIN_KEY_CHARS if len(key) < MIN_KEY_CHARS else MAX_KEY_CHARS
        must = f"[{name}] must be {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters long"
        raise _wrong(f"{must}, got {len(key)}", value=len(key), limit=limit)
    if len(key) < WEAK_KEY_CHARS:
        logger.warning(
            "API key %s has %d characters; %d and more can't be guessed",
            name,
            len(key),
            WEAK_KEY_CHARS,
        )
    return ApiKey.of(name, key)


def _wrong(message: str, *, value: int | None = None, limit: int | None = None) -> ConfigError:
    space = "" if message.startswith("[") else " "
    return ConfigError(f"api_keys{space}{message}", argument="api_keys", value=value, limit=limit)


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `ConfigError` for a value outside its range."""

    served_model_names: Annotated[Sequence[str], sequence(text(1, 256), 16)] = ()
    """Names under which requests may ask for the model, up to 16; the first is the one that answers
    carry. None: the model's own, which is the last part of its path. Kept as a tuple."""
    max_body_bytes: Annotated[int, integer(1024, 2**30)] = 2 * 2**20
    """Largest body of a request. Reading one holds the event loop, the longer the more there is of
    it."""
    max_prompts: Annotated[int, integer(1, 4096)] = 64
    """Prompts in one request for completions; conversations of a batch."""
    max_inputs: Annotated[int, integer(1, 65_536)] = 2048
    """Texts in one request for embeddings, scores or ranks; the engine's `max_waiting` limits them
    as well. OpenAI takes as many."""
    max_n: Annotated[int, integer(1, 4096)] = 16
    """`n` and `best_of` of one request; the engine's `max_num_seqs` limits them as well."""
    max_top_logprobs: Annotated[int, integer(0, 64)] = 20
    """Most likely tokens that are told at each place: `top_logprobs` of chat and responses,
    `logprobs` of completions, `prompt_logprobs`."""
    max_answer_bytes: Annotated[int, integer(1024, 2**40)] = 2**28
    """Most bytes that one answer may have, about, by what is asked for: prompts times `n` times
    tokens times log-probabilities. A stream counts by what waits for a slow reader."""
    max_unsent_bytes: Annotated[int, integer(1024, 2**40)] = 2**30
    """The same of the answers of all clients together that aren't sent to their ends; one is always
    taken."""
    max_stops: Annotated[int, integer(0, 16)] = 16
    """Strings in `stop`; the engine takes no more than 16."""
    max_tools: Annotated[int, integer(0, 1024)] = 128
    """Tools in one request."""
    max_schema_bytes: Annotated[int, integer(2, 131_072)] = 65_536
    """Largest JSON schema, and all schemas of tools together where the answer must be a call; as
    compact JSON. The engine takes no more than 131,072 characters."""
    api_keys: Mapping[str, str] | Sequence[str] | Sequence[ApiKey] = ()
    """Every request must carry one of these, where there are any: names with their keys, or keys
    alone, up to 1024 of 8 to 512 characters each, and better 16 or more. Kept as a tuple of
    `ApiKey`, from which no key can be read."""
    operators: Annotated[Sequence[str], sequence(text(1, 64), MAX_KEYS)] = ()
    """Names of `api_keys` whose holders may see `/metrics`, `/live`, `/trace` and `/server_info`,
    which are about the requests of all keys together, and may ask for `/reset_prefix_cache`,
    `/abort_requests` and `/abort_request`; up to 1024. None: where there is one key, its holder,
    and no holder where there are several. Without keys every caller may."""
    open_paths: Annotated[Sequence[str], sequence(text(1, 256), 16)] = (
        "/health",
        "/ready",
        "/ping",
    )
    """Paths that need no key: load balancers ask them, and they say nothing of who asks for what.
    Up to 16, as they are written in a URL."""
    allowed_hosts: Annotated[Sequence[str], sequence(text(1, 256), 256)] = ()
    """Names under which the server may be addressed besides `localhost`, those that end in
    `.localhost`, and addresses; up to 256. `*.example.org` stands for all below, `*` for any."""
    allowed_origins: Annotated[Sequence[str], sequence(text(1, 300), 256)] = ()
    """Other sites, whose pages may call the server from browsers: `https://example.org`, up to
    256; `*` for any."""
    max_header_bytes: Annotated[int, integer(1024, 2**20)] = 32 * 2**10
    """Largest head of a request, its path and query included."""
    max_headers: Annotated[int, integer(8, 1000)] = 100
    """Headers of one request."""
    body_timeout_seconds: Annotated[float, number(0, 3600, above=True)] = 60.0
    """Time until all of a body has come."""
    max_concurrent_calls: Annotated[int, integer(1, 2**20)] = 2048
    """Requests that ask for something to be computed (POST), of all clients together. One more
    takes the place of the one whose body is awaited the longest, and else gets the status 503."""
    stream_interval: Annotated[int, integer(1, 1024)] = 1
    """Tokens of each choice that a streamed answer gathers for one chunk. More make a faster server
    and a less even stream. The first token of a choice is never held back, nor is its last, and a
    chunk has no more than half of the engine's `max_buffered_tokens`."""
    metrics: bool = True
    """`/metrics`."""
    metrics_names: Literal["aioserve", "vllm", "both"] = "aioserve"
    """Names of what `/metrics` shows. "vllm": those of vLLM, for dashboards made for it, where
    aioserve has the number too."""
    access_log: Literal["json", "key_value", "off"] = "json"
    """How the logger `aioserve.access` writes a call that has ended."""
    page: bool = True
    """Whether there are the page at `/`, and `/live` and `/trace`, which show what the engine
    does."""
    max_live_readers: Annotated[int, integer(1, 1024)] = 16
    """Readers of `/live` at the same time; one more gets the status 503."""
    max_step_age_seconds: Annotated[float, number(0, 24 * 3600.0, above=True)] = 60.0
    """`/health` says 503 where there is work and no step has come to its end for so long. More than
    the longest step takes: that of `max_num_batched_tokens` tokens of a prompt."""
    max_items: Annotated[int, integer(1, 10_000)] = 4096
    """Items in the input of a response, those of earlier responses included; messages and their
    blocks in a request for a message."""
    max_metadata: Annotated[int, integer(0, MAX_METADATA)] = 16
    """Entries of the metadata of a conversation or a response."""
    max_metadata_key_chars: Annotated[int, integer(1, MAX_METADATA_KEY_CHARS)] = 64
    """Length of each key."""
    max_metadata_value_chars: Annotated[int, integer(1, MAX_METADATA_VALUE_CHARS)] = 512
    """Length of each value."""
    max_stored_responses: Annotated[int, integer(0, 2**20)] = 1024
    """Stored responses of each tenant; the least recently used goes. 0 stores none."""
    max_stored_bytes: Annotated[int, integer(0, 2**40)] = 64 * 2**20
    """Size of the responses of each tenant, with all that came before them, as JSON; the least
    recently used go."""
    stored_response_seconds: Annotated[int, integer(1, 10 * 365 * 24 * 3600)] = 24 * 3600
    """After that long a response is forgotten."""

    def __post_init__(self) -> None:
        check_fields(ConfigError, self, _RULES)
        msgspec.structs.force_setattr(self, "api_keys", keys_of(self.api_keys))

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """`api_keys`, as they are kept."""
        return keys_of(self.api_keys)


_RULES = rules_of(ServerSettings)
