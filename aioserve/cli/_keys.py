"""Keys of a server, from the command line and from a file that other users can't read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aioserve.errors import ConfigError

__all__ = ["Keys", "keys_of"]

MAX_FILE_BYTES = 2**20
NAMED = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})=(?P<key>.*[^=].*)")
"""Behind the sign is more than the padding that a key in base64 may end with."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The clients that the server answers."""

    api_key: Sequence[str] = ()
    """A key that requests must come with, KEY or NAME=KEY, where the name says in logs whose it is.
    May be given several times. Other users of the machine see it in the list of processes."""
    api_key_file: str | None = None
    """A file with more of them, one a line. Lines that begin with # are comments."""


def keys_of(keys: Keys) -> dict[str, str]:
    """All of them, by their names; those without are key-1, key-2 and so on, by their places.
    Raises `ConfigError`, which shows no key, for names that are given twice and for a file that
    can't be read or has none."""
    found: dict[str, str] = {}
    for place, entry in enumerate([*keys.api_key, *_lines(keys.api_key_file)], 1):
        named = NAMED.fullmatch(entry)
        name, key = (f"key-{place}", entry) if named is None else named.groups()
        if name in found:
            raise ConfigError(f"api_key: two keys have the name {name}", argument="api_key")
        found[name] = key
    return found


def _lines(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        lines = [line.strip() for line in data.decode().splitlines()]
    except (OSError, ValueError) as error:
        why = "it isn't text in UTF-8" if isinstance(error, UnicodeError) else error
        why = getattr(error, "strerror", None) or why
        raise ConfigError(
            f"api_key_file: {file} can't be read: {why}", argument="api_key_file", value=file
        ) from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found or len(data) > MAX_FILE_BYTES:
        why = "no key" if not found else f"more than {MAX_FILE_BYTES} bytes"
        raise ConfigError(f"api_key_file: {file} has {why}", argument="api_key_file", value=file)
    return found
