"""Checks of numbers on the command line: digits, a sign, and for floats a point and an exponent.

The parser's own conversion would round 1.5 to a count, and accept 0x10, 1_000 and nan.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, get_args

from aioserve.errors import ConfigError
from aioserve.isolation import shown

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection

__all__ = ["MAX_DIGITS", "check_numbers", "is_count", "is_float"]

MAX_DIGITS = 20
"""Most digits of a count: as many as 64 bits have."""
MAX_CHARS = 40
"""Most characters of a float."""
COUNT = re.compile(rf"[+-]?[0-9]{{1,{MAX_DIGITS}}}")
FLOAT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def check_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise `ConfigError` naming the option if a word is no number and must be one."""
    for argument in arguments:
        if argument.parameter.converter is not None:  # its converter checks it
            continue
        kinds = (argument.hint, *get_args(argument.hint))
        for token in argument.tokens:
            if int in kinds and not is_count(token.value):
                raise ConfigError(
                    f"{argument.name} must be a whole number of at most {MAX_DIGITS} digits, "
                    f"got {shown(token.value)}"
                )
            if float in kinds and not is_float(token.value):
                raise ConfigError(
                    f"{argument.name} must be a decimal number, got {shown(token.value)}"
                )


def is_count(text: str) -> bool:
    """True if it is a whole number of at most `MAX_DIGITS` digits."""
    return COUNT.fullmatch(text) is not None


def is_float(text: str) -> bool:
    """True if it is a finite decimal number of at most `MAX_CHARS` characters."""
    plain = len(text) <= MAX_CHARS and FLOAT.fullmatch(text) is not None
    return plain and math.isfinite(float(text))
