"""Errors for `with` or `for` on objects that need `async with` or `async for`.

Python's own error for `await` is clear enough. A method for it would be harmful: some frameworks
await every object that has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

__all__ = ["EnteredByAsync", "ReadByAsync"]


class EnteredByAsync:
    """Base of classes whose objects are entered by `async with` only."""

    __slots__ = ()

    # Type checkers report the missing methods themselves.
    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is entered by `async with`, not by `with`")

        def __exit__(self, *exc: object) -> None: ...


class ReadByAsync(EnteredByAsync):
    """Base of classes whose objects are also read by `async for` only."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is read by `async for`, not by `for`")
