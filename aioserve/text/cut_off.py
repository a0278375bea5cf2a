"""JSON of an object that is cut off, such as the arguments of a call that `max_tokens` ended.

Its complete parts are kept, and closed. For JSON with a mistake in it, see `json_values`.
"""

from __future__ import annotations

import re

from aioserve.text.output_parsers.json_machine import JsonMachine, Place

__all__ = ["closed"]

_PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
"""Pattern of the first half of a character in two escapes."""


def closed(text: str) -> str | None:
    """Return JSON of an object with the parts that are there; None if the text begins no object.

    A string is kept as far as it goes. Members, elements, numbers and words are kept if they are
    whole. Takes time in proportion to the text.
    """
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
    """Return the text without an escape, or a part of one, at its end."""
    found = ending.search(text)
    if found is None or (found.start() and _is_escaped(text, found.start())):
        return text
    return text[: found.start()]


def _is_escaped(text: str, at: int) -> bool:
    """True if the backslash at `at` belongs to the one before it."""
    before = text[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
