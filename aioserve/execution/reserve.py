"""Memory for pages, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aioserve.errors import ConfigError

__all__ = ["reserve"]

Pages = TypeVar("Pages")


def reserve(
    option: str, num_pages: int, allocate: Callable[[], Pages], *, beside: str = ""
) -> Pages:
    """New pages. Raises `ConfigError`, which names the option, for more than there is room.
    `beside` says what else is allocated with them, as "and 9 pages for ..."."""
    try:
        return allocate()
    except (MemoryError, OSError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"{option}={num_pages} pages of KV cache{beside and f' {beside}'} can't be reserved: "
            f"{error}"
        ) from error
