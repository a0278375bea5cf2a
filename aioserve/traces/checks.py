"""Checks of numbers where they enter: invalid ones and those outside their range are refused.

Only Python's own numbers are taken, and numpy's float: those of a subclass may raise when compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from aioserve.errors import AioserveError, ConfigError
from aioserve.isolation import shown

__all__ = ["check_int", "check_number", "named", "number_in"]

T = TypeVar("T", int, float)


def check_int(
    name: str,
    value: Any,
    least: int,
    most: int,
    *,
    error: type[AioserveError] = ConfigError,
) -> None:
    """Raise unless `value` is an int in `[least, most]`; the message begins with the name."""
    if type(value) is not int:
        raise error(f"{name} must be an int, got {shown(value)}")
    if not least <= value <= most:
        limit = f"at least {least}" if value < least else f"at most {most}"
        raise error(f"{name} must be {limit}, got {shown(value)}")


def check_number(
    name: str,
    value: Any,
    most: float,
    *,
    above: float | None = 0.0,
    error: type[AioserveError] = ConfigError,
) -> None:
    """Raise unless `value` is a number above `above` and at most `most`.

    If `above` is None, it must be at least 0.
    """
    number = value if type(value) in (int, float, np.float64) else math.nan
    if number > most:
        raise error(f"{name} must be at most {most:g}, got {shown(value)}")
    if not (number >= 0 if above is None else number > above):
        least = "from 0 on" if above is None else f"more than {above:g}"
        raise error(f"{name} must be {least}, got {shown(value)}")


def number_in(text: str, name: str, kind: type[T]) -> T:
    """Return the int or float that a text is. Raises `ConfigError`, whose message begins with the
    name.
    """
    try:
        return kind(text)
    except ValueError:
        must = "an int" if kind is int else "a number"
        raise ConfigError(f"{name} must be {must}, got {shown(text)}") from None


@contextmanager
def named(what: str, error: type[AioserveError] = ConfigError) -> Iterator[None]:
    """Turn what an object of a caller raises in the block into an `error` that begins with `what`.

    Errors of ours pass unchanged.
    """
    try:
        yield
    except AioserveError:
        raise
    except Exception as raised:
        raise error(f"{what}: {shown(raised)}") from raised
