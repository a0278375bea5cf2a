"""JSON of an object that ends before its end: a call that `max_tokens` cut off, which comes back.

What is there of it is kept, and closed. JSON with a mistake in it is another matter: see
`json_values`.
"""

from __future__ import annotations

import re

from aioserve.text.output_parsers.json_machine import JsonMachine, Place

__all__ = ["closed"]

_PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
"""The first half of a character in two escapes."""


def closed(text: str) -> str | None:
    """JSON of an object with what is there of it: a string as far as it goes; members, elements,
    numbers and words that are whole. None where the text isn't the beginning of an object. Takes
    time in proportion to the text."""
    machine, at, whole = JsonMachine(), 0, 0
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] != "{":
        return None
    at = whole = start
    while at < len(text) and machine.place is not Place.DONE:
        before, was_word = at, machine.place is Place.WORD
        if (at := machine.read(text, at)) < 0:
            return None
        if was_word and machine.place is not Place.WORD:
            whole = before
        if machine.place in (Place.COMMA_OR_END, Place.KEY_OR_END, Place.VALUE_OR_END):
            whole = at
    if machine.place is Place.DONE:
        return None
    kept = text[:whole]
    if machine.place is Place.STRING:
        kept = _without(_HALF, _without(_PART_OF_ESCAPE, text)) + '"'
    return kept + "".join(["}" if one == "{" else "]" for one in reversed(machine.stack)])


def _without(ending: re.Pattern[str], text: str) -> str:
    """Without an escape, or a part of one, that a string ends with."""
    found = ending.search(text)
    if found is None or (found.start() and _is_escaped(text, found.start())):
        return text
    return text[: found.start()]


def _is_escaped(text: str, at: int) -> bool:
    """Whether a backslash belongs to the one before it."""
    before = text[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
