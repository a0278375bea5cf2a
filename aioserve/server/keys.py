"""API keys: checked when an operator gives them, and kept so that nothing can show them.

What is kept of a key are two hashes, one to know it by and one that tells cached prefixes of its
holder from those of others. Both are made with a tag of their own, so that one says nothing of the
other.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from aioserve.errors import ConfigError

__all__ = ["MAX_KEYS", "MIN_KEY_CHARS", "ApiKey", "keys_of"]

logger: logging.Logger = logging.getLogger(__name__)

MIN_KEY_CHARS, WEAK_KEY_CHARS, MAX_KEY_CHARS = 8, 16, 512
MAX_KEYS = 1024
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One that opens the server. Its name may be seen by anybody who reads logs and metrics."""

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
    """Those of a mapping of names to keys, or of a sequence of keys, which are then called key-1,
    key-2 and so on. Raises `ConfigError`, which never shows a key."""
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
