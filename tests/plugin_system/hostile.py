"""Objects that raise when they are looked at, as those of a plugin may."""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["ERRORS", "TOUCHES", "HostileText", "contained", "hostile"]

ERRORS = (ValueError, RecursionError, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Errors that the hostile objects raise. `KeyboardInterrupt` would be the user's."""

PROPERTIES = ("__class__", "__notes__", "__cause__")
TOUCHES = (
    *("__getattribute__", "__repr__", "__str__", "__format__", "__dir__"),
    *("__eq__", "__ne__", "__lt__", "__hash__", "__bool__", "__len__", "__call__"),
    *("__iter__", "__next__", "__index__", "__int__", "__float__"),
    *PROPERTIES,
)


def hostile(touches: Iterable[str], error: type[BaseException], *, base: type = object) -> Any:
    """An object that raises `error` when it is touched in one of these ways."""

    def fail(*args: object) -> Any:
        raise error("touched")

    members: dict[str, Any] = {
        name: property(fail) if name in PROPERTIES else fail for name in touches
    }
    return type("Hostile", (base,), members)()


def _fail(*args: object) -> Any:
    raise ValueError("touched")


HostileText: Any = type(
    "HostileText",
    (str,),
    dict.fromkeys(("__str__", "__repr__", "__format__", "__len__", "__getitem__"), _fail),
)
"""Reads as any other str does, and raises when Python code handles it."""


def contained(test: Callable[..., None]) -> Callable[..., None]:
    """A test whose failure is told in words: pytest would look at what it holds, and end."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            test(*args, **kwargs)
        except BaseException as error:
            said = object.__str__(error) if type(error).__name__ == "Hostile" else str(error)
            where = "".join(traceback.format_tb(error.__traceback__))
            told = f"{where}{type(error).__name__}: {said}"
        else:
            return
        raise AssertionError(told)

    return run
