"""Writes a file that replaces another one when it is whole, and not before.

It is written beside, under a name of its own, and renamed at the end: a run that fails or is
interrupted leaves what was there. What is no regular file, a pipe or a device, is written to at
once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Literal, TextIO

from aioserve.errors import ConfigError

__all__ = ["whole_file"]

MOST_NAME_CHARS = 40
"""Most characters of the name that the file beside begins with: names have at most 255 bytes."""


@contextmanager
def whole_file(option: str, path: Path) -> Iterator[TextIO]:
    """Open a text file to be written, which is at `path` if the block ends without an exception.
    Raises `ConfigError` where none can be; `option` names the option that asked for it."""
    place = Path(os.path.realpath(path))  # a link stays one
    beside = place.with_name(f"{place.name[:MOST_NAME_CHARS]}.{token_hex(4)}.part")
    try:
        # Of the path as given: what a link to an open pipe leads to has no name.
        is_replaced = path.is_file() or not path.exists()
        file = _begun(place, beside) if is_replaced else _opened(path)
    except OSError as error:
        raise ConfigError(f"{option}: {path} can't be written: {error.strerror}") from error
    if not is_replaced:
        with file:
            yield file
        return
    try:
        with file:
            yield file
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    try:
        beside.replace(place)
    except OSError as error:  # all that was written is kept
        raise ConfigError(
            f"{option}: {path} can't be replaced: {error.strerror}; what it would have is in "
            f"{beside}"
        ) from error


def _begun(place: Path, beside: Path) -> TextIO:
    """A file beside, as open to others as the one that it will replace, where that one may be
    written to."""
    mode = None
    if place.exists():
        place.open("ab").close()
        mode = place.stat().st_mode & 0o777
    file = _opened(beside, "x")
    if mode is not None:
        beside.chmod(mode)
    return file


def _opened(path: Path, mode: Literal["w", "x"] = "w") -> TextIO:
    return path.open(mode, encoding="utf-8", errors="surrogateescape", newline="")
