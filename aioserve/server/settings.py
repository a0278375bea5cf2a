"""Settings of a server: who may call it, and how much each call may ask for.

API keys are checked when an operator gives them, and kept as two hashes, which don't reveal them.
One hash recognises a key. The other is a salt that separates cached prefixes of this key from those
of other keys. Each hash has its own tag, so that one reveals nothing about the other.
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
    """API key that opens the server. Its name appears in logs and metrics."""

    name: str
    digest: bytes = field(repr=False)
    cache_salt: str = field(repr=False)

    @classmethod
    def of(cls, name: str, key: str) -> ApiKey:
        return cls(name, digest_of(key), "key-" + _tagged("cache salt", key).hex())


def digest_of(key: str) -> bytes:
    """Hash of 32 bytes that recognises `key`."""
    return _tagged("api key", key)


def _tagged(tag: str, key: str) -> bytes:
    return hmac.digest(f"aioserve {tag}".encode(), key.encode("utf-8", "surrogatepass"), "sha256")


def keys_of(given: object) -> tuple[ApiKey, ...]:
    """Return keys of a mapping by name, or of a sequence, which are named key-1, key-2 and so on.
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
        # An invalid name may be a key in the wrong place: it isn't shown.
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
    """Settings of a server. Raises `ConfigError` for a value outside its range."""

    served_model_names: Annotated[Sequence[str], sequence(text(1, 256), 16)] = ()
    """Names under which requests may ask for the model, up to 16. Answers carry the first. By
    default, the last part of the model's path."""
    max_body_bytes: Annotated[int, integer(1024, 2**30)] = 2 * 2**20
    """Largest body of a request, in bytes. Parsing a body holds the event loop, longer for a longer
    one."""
    max_prompts: Annotated[int, integer(1, 4096)] = 64
    """Most prompts in one request for completions, or conversations in one batch."""
    max_inputs: Annotated[int, integer(1, 65_536)] = 2048
    """Most texts in one request for embeddings, scores or ranks. The engine's `max_waiting` limits
    them too. OpenAI has the same default."""
    max_n: Annotated[int, integer(1, 4096)] = 16
    """Largest `n` and `best_of` of one request. The engine's `max_num_seqs` limits them too."""
    max_top_logprobs: Annotated[int, integer(0, 64)] = 20
    """Most alternatives for each token: `top_logprobs` of chat and responses, `logprobs` of
    completions, `prompt_logprobs`."""
    max_answer_bytes: Annotated[int, integer(1024, 2**40)] = 2**28
    """Most bytes of one answer, estimated from its request. A stream counts only what waits for a
    slow reader."""
    max_unsent_bytes: Annotated[int, integer(1024, 2**40)] = 2**30
    """Most bytes of all clients' unsent answers together, estimated as for `max_answer_bytes`. One
    answer is always accepted."""
    max_stops: Annotated[int, integer(0, 16)] = 16
    """Most strings in `stop`. The engine takes up to 16."""
    max_tools: Annotated[int, integer(0, 1024)] = 128
    """Most tools in one request."""
    max_schema_bytes: Annotated[int, integer(2, 131_072)] = 65_536
    """Largest JSON schema, in bytes of compact JSON. It also limits all schemas of tools together
    if the answer must be a call. The engine takes up to 131,072 characters."""
    api_keys: Mapping[str, str] | Sequence[str] | Sequence[ApiKey] = ()
    """Names with their keys, or keys alone. If there are any, every request must carry one. Up to
    1024 keys of 8 to 512 characters, better 16 or more. Kept as a tuple of `ApiKey`, which hides
    the keys."""
    operators: Annotated[Sequence[str], sequence(text(1, 64), MAX_KEYS)] = ()
    """Names of up to 1024 `api_keys` whose holders may use the paths about all keys, like
    `/metrics`. By default, the holder of a single key. Without keys, every caller."""
    open_paths: Annotated[Sequence[str], sequence(text(1, 256), 16)] = (
        "/health",
        "/ready",
        "/ping",
    )
    """Paths that need no key, for load balancers: they reveal nothing about callers. Up to 16, as
    written in a URL."""
    allowed_hosts: Annotated[Sequence[str], sequence(text(1, 256), 256)] = ()
    """Host names of the server, up to 256. `*.example.org` allows all names below it, and `*` any
    name. The server always allows IP addresses, `localhost` and names that end in `.localhost`."""
    allowed_origins: Annotated[Sequence[str], sequence(text(1, 300), 256)] = ()
    """Other sites whose pages may call the server from browsers, like `https://example.org`, up to
    256. `*` allows any site."""
    max_header_bytes: Annotated[int, integer(1024, 2**20)] = 32 * 2**10
    """Largest head of a request, in bytes, including its path and query."""
    max_headers: Annotated[int, integer(8, 1000)] = 100
    """Most headers of one request."""
    body_timeout_seconds: Annotated[float, number(0, 3600, above=True)] = 60.0
    """Seconds in which all of a body must arrive."""
    max_concurrent_calls: Annotated[int, integer(1, 2**20)] = 2048
    """Most POST requests in progress, of all clients together. One more replaces the request whose
    body has been awaited longest, or else gets the status 503."""
    stream_interval: Annotated[int, integer(1, 1024)] = 1
    """Tokens of each choice in one chunk of a stream, at most half of the engine's
    `max_buffered_tokens`. More make a faster server and a less even stream."""
    metrics: bool = True
    """Serve metrics at `/metrics`."""
    metrics_names: Literal["aioserve", "vllm", "both"] = "aioserve"
    """Names of the metrics. "vllm" uses vLLM's names, for dashboards made for vLLM, and shows only
    numbers that aioserve has."""
    access_log: Literal["json", "key_value", "off"] = "json"
    """Format of the logger `aioserve.access`, which has a line for each call that has ended."""
    page: bool = True
    """Serve the page at `/`, and `/live` and `/trace`, which show the engine's work."""
    max_live_readers: Annotated[int, integer(1, 1024)] = 16
    """Most readers of `/live` at the same time. One more gets the status 503."""
    max_step_age_seconds: Annotated[float, number(0, 24 * 3600.0, above=True)] = 60.0
    """`/health` answers 503 if there is work and no step has ended for this long. Choose more than
    the longest step takes, which has `max_num_batched_tokens` prompt tokens."""
    max_items: Annotated[int, integer(1, 10_000)] = 4096
    """Most items in the input of a response, including those of earlier responses. Also the most
    messages and blocks in a request for a message."""
    max_metadata: Annotated[int, integer(0, MAX_METADATA)] = 16
    """Most entries in the metadata of a conversation or a response."""
    max_metadata_key_chars: Annotated[int, integer(1, MAX_METADATA_KEY_CHARS)] = 64
    """Most characters of each metadata key."""
    max_metadata_value_chars: Annotated[int, integer(1, MAX_METADATA_VALUE_CHARS)] = 512
    """Most characters of each metadata value."""
    max_stored_responses: Annotated[int, integer(0, 2**20)] = 1024
    """Most stored responses of each tenant. The least recently used are dropped. 0 stores none."""
    max_stored_bytes: Annotated[int, integer(0, 2**40)] = 64 * 2**20
    """Most bytes of each tenant's stored responses, with all that came before them, as JSON. The
    least recently used are dropped."""
    stored_response_seconds: Annotated[int, integer(1, 10 * 365 * 24 * 3600)] = 24 * 3600
    """Seconds after which a stored response is dropped."""

    def __post_init__(self) -> None:
        check_fields(ConfigError, self, _RULES)
        msgspec.structs.force_setattr(self, "api_keys", keys_of(self.api_keys))

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """`api_keys` as a tuple of `ApiKey`."""
        return keys_of(self.api_keys)


_RULES = rules_of(ServerSettings)
