"""Regular expressions of files: matched as Python's `re` matches them, in limited time.

Python's own engine has no time limit, and one expression can hold a process up for ever. Engines
that match in linear time (RE2 and its kin) know no looks ahead, which files use to spare modules
("re:^(?!.*lm_head).*"). The library `regex` knows these, and a time limit.
"""

from __future__ import annotations

import re
import time
import warnings

import regex

from aioserve.errors import WeightsError
from aioserve.isolation import shown

__all__ = ["LIMIT_SECONDS", "MAX_PATTERN_CHARS", "Pattern"]

MAX_PATTERN_CHARS = 1000
LIMIT_SECONDS = 5.0
"""Time for all matches of one expression. Common ones take microseconds each."""
_SINGLE = r"\\[dDwWsS]|\\[^\w\s]|\[\^?\]?(?:\\[dDwWsS]|\\[^\w\s]|[^\]\\\[])*\]|[^\\\[\](){}*+?|^$]"
"""What stands for one character."""
_SIMPLE = re.compile(rf"\^?(?:{_SINGLE})*\$?", re.ASCII)
"""Expressions that match in one way."""
_FUZZY = re.compile(r"(?<!\\)\{(?!\d+(?:,\d*)?\}|,\d+\})")
"""Braces that are characters in `re`, and may ask for a fuzzy match in `regex`."""


class Pattern:
    """An expression in the syntax of `re`.

    Raises `WeightsError` for one that is none, is too long, or has braces that count nothing.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._seconds_left = LIMIT_SECONDS
        if len(source) > MAX_PATTERN_CHARS:
            raise self._wrong(f"must have at most {MAX_PATTERN_CHARS} characters")
        if (braces := _FUZZY.search(source)) is not None:
            raise self._wrong(f"{shown(source[braces.start() :])} counts no repetitions")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of what later versions read in another way
                re.compile(source)
            self._compiled = regex.compile(source, regex.VERSION0)
        except (re.error, regex.error, RecursionError, OverflowError, Warning) as error:
            raise self._wrong(str(error)) from error

    @property
    def is_simple(self) -> bool:
        """True if it has neither groups nor repetitions, so that matching takes next to no time."""
        return _SIMPLE.fullmatch(self._source) is not None

    def matches(self, text: str) -> bool:
        """Return whether `text` begins with a match, as `re.match` has it.

        Raises `WeightsError` once all its matches took `LIMIT_SECONDS`.
        """
        began = time.monotonic()
        try:
            return self._compiled.match(text, timeout=max(0.0, self._seconds_left)) is not None
        except TimeoutError as error:
            raise self._wrong(f"takes more than {LIMIT_SECONDS:g} s to match") from error
        finally:
            self._seconds_left -= time.monotonic() - began

    def _wrong(self, why: str) -> WeightsError:
        return WeightsError(f"quantization_config: the expression {shown(self._source)}: {why}")
