"""What is said where `with` or `for` is used on what asyncio enters and reads.

Of `await` Python says enough. Objects that had a method for it would be awaited by frameworks that
await whatever they can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

__all__ = ["EnteredByAsync", "ReadByAsync"]


class EnteredByAsync:
    """A class whose objects are entered by `async with` alone."""

    __slots__ = ()

    # Type checkers say by themselves that these are missing.
    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is entered by `async with`, not by `with`")

        def __exit__(self, *exc: object) -> None: ...


class ReadByAsync(EnteredByAsync):
    """One whose objects are read by `async for` as well."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is read by `async for`, not by `for`")
