"""Allocates memory for pages, or raises a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aioserve.errors import ConfigError

__all__ = ["reserve"]

Pages = TypeVar("Pages")


def reserve(
    option: str, num_pages: int, allocate: Callable[[], Pages], *, beside: str = ""
) -> Pages:
    """Allocate pages. Raises `ConfigError`, which names the option, if there isn't enough room.

    `beside` names what else is allocated with them, like "and 9 pages for ...".
    """
    try:
        return allocate()
    except (MemoryError, OSError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"{option}={num_pages} pages of KV cache{beside and f' {beside}'} can't be reserved: "
            f"{error}"
        ) from error
