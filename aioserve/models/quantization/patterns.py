"""Regular expressions of files, matched with the meaning of Python's `re`, in limited time.

Python's own engine has no time limit, and one expression can block a process for ever. Engines of
linear time, for example RE2, lack lookahead, which files use to leave modules out
("re:^(?!.*lm_head).*"). The library `regex` has both lookahead and a time limit.
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
"""Most seconds for all matches of one expression. Usual ones take microseconds each."""
_SINGLE = r"\\[dDwWsS]|\\[^\w\s]|\[\^?\]?(?:\\[dDwWsS]|\\[^\w\s]|[^\]\\\[])*\]|[^\\\[\](){}*+?|^$]"
"""Part of an expression that matches one character."""
_SIMPLE = re.compile(rf"\^?(?:{_SINGLE})*\$?", re.ASCII)
"""Expressions that can match in only one way."""
_FUZZY = re.compile(r"(?<!\\)\{(?!\d+(?:,\d*)?\}|,\d+\})")
"""Braces that `re` reads as characters, and `regex` perhaps as a fuzzy match."""


class Pattern:
    """Regular expression in the syntax of `re`.

    Raises `WeightsError` if it is invalid or too long, or has braces that count no repetitions.
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
                warnings.simplefilter("error")  # for syntax whose meaning will change
                re.compile(source)
            self._compiled = regex.compile(source, regex.VERSION0)
        except (re.error, regex.error, RecursionError, OverflowError, Warning) as error:
            raise self._wrong(str(error)) from error

    @property
    def is_simple(self) -> bool:
        """True if it has no groups and no repetitions, so that matching takes next to no time."""
        return _SIMPLE.fullmatch(self._source) is not None

    def matches(self, text: str) -> bool:
        """True if `text` begins with a match, as by `re.match`.

        Raises `WeightsError` once its matches have taken `LIMIT_SECONDS` in total.
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
