"""Escapes of characters while a chat template renders, which hide what they are part of.

Knows text alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

from aioserve.errors import InvalidPromptError

__all__ = ["NOTHING", "NOTHINGS", "Escapes"]

STAND_IN_TRIES = 64
_STAND_INS = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_LETTERS = (range(0x12000, 0x1239A), range(0x13000, 0x1342F))
"""Stand-ins for letters and digits, beside which some tokens aren't recognised: cuneiform,
hieroglyphs.
"""
NOTHING = "\U0010fffd"
"""Content that means nothing; part of no special token."""
NOTHINGS = (NOTHING, "\U0010fffc")
"""Characters that make meaningless keys differ from each other."""


class Escapes:
    """Stand-ins for characters, each of which is in none of `texts`."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = list(texts)
        self._stand_ins: dict[str, str] = {}

    @property
    def is_empty(self) -> bool:
        """True if it escapes nothing."""
        return not self._stand_ins

    def escape(self, text: str, at: Iterable[int]) -> str:
        """Return `text` with a stand-in for the character at each index of `at`."""
        pieces, done = [], 0
        for index in sorted(set(at)):
            pieces += (text[done:index], self._stand_in(text[index]))
            done = index + 1
        return "".join([*pieces, text[done:]]) if pieces else text

    def occur_in(self, text: str) -> bool:
        """True if a stand-in is in `text`."""
        return any(stand_in in text for stand_in in self._stand_ins.values())

    def unescape(self, text: str) -> str:
        """Return `text` with the characters in place of their stand-ins.

        Stand-ins that were escaped for JSON, or by a `repr`, are replaced too.
        """
        for char, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, char)
            text = text.replace(_as_json(stand_in), _as_json(char))
            text = text.replace(_as_shown(stand_in), _as_shown(char))
        return text

    def _stand_in(self, char: str) -> str:
        if (known := self._stand_ins.get(char)) is not None:
            return known
        for _ in range(STAND_IN_TRIES):
            new = chr(random.choice(random.choice(_LETTERS if char.isalnum() else _STAND_INS)))
            if (
                new not in NOTHINGS
                and new not in self._stand_ins.values()
                and not any(
                    form(new) in text for form in (str, _as_json, _as_shown) for text in self._texts
                )
            ):
                self._stand_ins[char] = new
                return new
        raise InvalidPromptError(
            "messages must leave some of Unicode's supplementary private-use characters, cuneiform "
            f"and hieroglyphs unused, got texts with {STAND_IN_TRIES} of {STAND_IN_TRIES} drawn at "
            "random"
        )


def _as_shown(char: str) -> str:
    return repr(char)[1:-1]


def _as_json(char: str) -> str:
    return json.dumps(char)[1:-1]
