"""JSON read character by character: finds where a value ends, and where it stops being JSON.

Follows RFC 8259 strictly, with the current place in the grammar and a stack of open brackets.
"""

from __future__ import annotations

import re
from enum import Enum, auto

__all__ = ["JsonMachine", "Place"]

MAX_DEPTH = 256
"""Deepest nesting that is accepted: readers of the arguments recurse."""

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACES = re.compile(r"[ \t\n\r]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_START = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE](?:[-+]?[0-9]*)?)?)?|[eE](?:[-+]?[0-9]*)?)?)?"
)
_MORE_DIGITS = re.compile(r"(?<=[0-9]{2})[0-9]+")
"""Pattern of the digits after the first two of a number. The first two decide how it may go on. So
little is kept of a number, and a long one takes no longer.
"""
_LITERALS = ("true", "false", "null")


class Place(Enum):
    """Places in the grammar, by what may follow."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    KEY_STRING = auto()
    WORD = auto()
    """Inside of a number or a literal."""
    DONE = auto()


class JsonMachine:
    """Reads one object or list.

    Each `read(text, start)` takes one character, or a run of characters that change nothing. It
    returns where it stopped, or -1 at a character that is no JSON there, and then changes nothing.
    """

    __slots__ = ("_escape", "_word", "depth", "place", "stack")

    def __init__(self) -> None:
        self.place: Place = Place.VALUE
        self.stack: list[str] = []
        """Open braces and brackets."""
        self.depth: int = 0
        self._escape = 0
        """Characters that an escape still lacks: 1 after a backslash, then those of `\\uXXXX`."""
        self._word = ""

    def read(self, text: str, start: int) -> int:
        place, char = self.place, text[start]
        if place is Place.STRING or place is Place.KEY_STRING:
            return self._in_string(text, start)
        if place is Place.WORD:
            word = self._word + char
            if _starts_word(word):
                self._word = _MORE_DIGITS.sub("", word)
                return start + 1
            if char not in ",]}" + _SPACE or not _is_word(self._word):
                return -1
            self._word = ""
            place = self.place = Place.COMMA_OR_END
        if (spaces := _SPACES.match(text, start)) is not None:
            return spaces.end() if place is not Place.DONE else -1
        return start + 1 if self._accepts(place, char) else -1

    def _accepts(self, place: Place, char: str) -> bool:
        if place in (Place.VALUE, Place.VALUE_OR_END):
            return self._value(place, char)
        if place in (Place.KEY, Place.KEY_OR_END) and char == '"':
            self.place = Place.KEY_STRING
        elif place is Place.COLON and char == ":":
            self.place = Place.VALUE
        elif place is Place.COMMA_OR_END and char == ",":
            self.place = Place.KEY if self.stack[-1] == "{" else Place.VALUE
        elif place in (Place.COMMA_OR_END, Place.KEY_OR_END):
            return self._closed(char)
        else:
            return False
        return True

    def _value(self, place: Place, char: str) -> bool:
        if char in "{[":
            if self.depth == MAX_DEPTH:
                return False
            self.stack.append(char)
            self.depth += 1
            self.place = Place.KEY_OR_END if char == "{" else Place.VALUE_OR_END
        elif not self.depth:
            return False
        elif char == '"':
            self.place = Place.STRING
        elif char == "]" and place is Place.VALUE_OR_END:
            return self._closed(char)
        elif _starts_word(char):
            self._word = char
            self.place = Place.WORD
        else:
            return False
        return True

    def _closed(self, char: str) -> bool:
        if self.stack[-1] + char not in ("{}", "[]"):
            return False
        self.stack.pop()
        self.depth -= 1
        self.place = Place.COMMA_OR_END if self.depth else Place.DONE
        return True

    def _in_string(self, text: str, start: int) -> int:
        char = text[start]
        if self._escape == 1:
            if char not in '"\\/bfnrtu':
                return -1
            self._escape = 5 if char == "u" else 0
            return start + 1
        if self._escape:
            if char not in "0123456789abcdefABCDEF":
                return -1
            self._escape = self._escape - 1 if self._escape > 2 else 0
            return start + 1
        if (plain := _PLAIN.match(text, start)) is not None:
            return plain.end()
        if char == "\\":
            self._escape = 1
        elif char == '"':
            self.place = Place.COLON if self.place is Place.KEY_STRING else Place.COMMA_OR_END
        else:
            return -1
        return start + 1


def _starts_word(word: str) -> bool:
    return (
        any(literal.startswith(word) for literal in _LITERALS)
        or _NUMBER_START.fullmatch(word) is not None
    )


def _is_word(word: str) -> bool:
    return word in _LITERALS or _NUMBER.fullmatch(word) is not None
