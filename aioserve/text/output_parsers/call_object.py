"""Reader of a tool call as one JSON object, {"name": ..., "arguments": {...}}, as it comes."""

from __future__ import annotations

import json

from aioserve.text.output_parsers.json_machine import JsonMachine, Place

__all__ = ["ArgumentsReader", "CallReader"]

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("id", "type")
"""Further keys that some models write; their values are ignored."""
MAX_NAME_CHARS = 256


class ArgumentsReader:
    """Reads an object of arguments."""

    def __init__(self) -> None:
        self._machine = JsonMachine()
        self._fragments: list[str] = []
        self.is_broken: bool = False
        """True if it isn't valid JSON, or isn't an object."""

    @property
    def is_done(self) -> bool:
        return self._machine.place is Place.DONE

    def read(self, text: str, start: int) -> int:
        """Read the part of the text that belongs to the object; return where it stopped.

        That is before the end of the text if the object ends, or is broken.
        """
        at = start
        while at < len(text) and not self.is_done:
            if (end := self._machine.read(text, at)) < 0:
                self.is_broken = True
                break
            at = end
        self._fragments.append(text[start:at])
        return at

    def take(self) -> str:
        """Return the arguments that came since the last call of this method."""
        fragments, self._fragments = self._fragments, []
        return "".join(fragments)


class CallReader(ArgumentsReader):
    """Reads one call, from its opening brace on.

    The order of keys doesn't matter. There is one name, a str, and one object of arguments. Once
    both are there, further members may be any JSON, and are ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self.has_arguments: bool = False
        """True if all arguments are there."""
        self._key = ""
        self._keys: set[str] = set()
        self._collected: list[str] | None = None
        self._in_arguments = False
        self._raw: list[str] = []
        self._rest: list[str] = []

    @property
    def has_begun(self) -> bool:
        """True if the name is known, and arguments are there."""
        return self.name is not None and bool(self._in_arguments or self.has_arguments)

    @property
    def raw(self) -> str:
        """Text that was read until the call has begun."""
        return "".join(self._raw)

    @property
    def rest(self) -> str:
        """Text that was read once the name and all arguments were there."""
        return "".join(self._rest)

    def read(self, text: str, start: int) -> int:
        at = start
        while at < len(text) and not self.is_done:
            place, depth = self._machine.place, self._machine.depth
            if (end := self._machine.read(text, at)) < 0:
                self.is_broken = True
                break
            piece = text[at:end]
            if self.name is not None and self.has_arguments:
                self._rest.append(piece)
            elif depth <= 1 and not self._fits(piece, place, depth):
                self.is_broken = True
                break
            elif self._in_arguments:
                self._fragments.append(piece)
                if self._machine.depth == 1:
                    self._in_arguments, self.has_arguments = False, True
            elif self._collected is not None:
                self._collected.append(piece)
                if self._machine.place in (Place.COLON, Place.COMMA_OR_END):
                    self._take_string()
                    if self.is_broken:
                        break
            at = end
        if not self.has_begun:
            self._raw.append(text[start:at])
            if self.is_done:
                self.is_broken = True
        return at

    def _fits(self, piece: str, place: Place, depth: int) -> bool:
        """True if a piece may stand among the call's members. Records what begins with it."""
        if depth == 0:
            return piece == "{"
        if piece.isspace() and place not in (Place.STRING, Place.KEY_STRING):
            return True
        if place in (Place.KEY, Place.KEY_OR_END) and piece == '"':
            self._collected = []
        elif place is Place.VALUE:
            if self._key == "name":
                self._collected = []
                return piece == '"'
            if self._key in ARGUMENTS:
                self._in_arguments = piece == "{"
                return self._in_arguments
        return True

    def _take_string(self) -> None:
        """Take a complete key or name."""
        text = json.loads("".join(self._collected or ()))
        self._collected = None
        if self._machine.place is Place.COMMA_OR_END:
            self.is_broken: bool = not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable()
            self.name = None if self.is_broken else text
            return
        key = "arguments" if text in ARGUMENTS else text
        self.is_broken = key in self._keys or key not in ("name", *ARGUMENTS, *OTHERS)
        self._keys.add(key)
        self._key = text
