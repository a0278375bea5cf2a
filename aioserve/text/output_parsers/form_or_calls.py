"""Reader of completions that are either calls of tools or a form: JSON that contains no call."""

from __future__ import annotations

from aioserve.text.output_parsers.call_object import CallReader
from aioserve.text.output_parsers.parts import Parts
from aioserve.text.output_parsers.tool_parser import ToolParser

__all__ = ["FormOrCallsReader"]


class FormOrCallsReader:
    """Reader of one completion, like `ToolParser`, which it uses for calls.

    The start of the text decides what all of it is, white space aside. It is calls if it begins
    with one of the marks `parser.opens`. Otherwise it is a form, which is content, whatever marks
    its strings hold. For calls without a mark, it is calls from the moment that an object has a
    name and arguments. Beside calls there is no content: an unread rest is a call that was cut off,
    and no form.
    """

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._held = ""
        """The start of the text, while it is undecided."""
        self._is_form: bool | None = None
        """True for a form, False for calls; None while it is undecided."""
        self._object: CallReader | None = None
        """Reader of the object that the text begins with."""

    def push(self, text: str) -> Parts:
        """Read more text; return the new parts."""
        if self._is_form is None:
            new = text
            text = self._held + text
            self._is_form = self._look(text) if self._object is None else self._look_on(new)
            self._held = text if self._is_form is None else ""
            if self._is_form is None:
                return Parts()
        if self._is_form:
            return Parts(text)
        return Parts(tool_calls=self._parser.push(text).tool_calls)

    def _look(self, text: str) -> bool | None:
        """Return true if a text, from its start, is a form; None while it is undecided."""
        begun = text.lstrip()
        opens = self._parser.opens or self._parser.marks
        if begun.startswith(opens):
            return False
        if not begun or any(mark.startswith(begun) for mark in opens):
            return None
        if self._parser.opens:
            return True
        if self._parser.takes_lists and begun.startswith("["):
            begun = begun[1:].lstrip()
        if begun.startswith("{"):
            self._object = CallReader()
            return self._look_on(begun)
        return bool(begun) or None

    def _look_on(self, text: str) -> bool | None:
        """Continue `_look` with more of the object."""
        if self._object is None:
            return None
        self._object.read(text, 0)
        if self._object.has_begun:
            return False
        return True if self._object.is_broken or self._object.is_done else None

    def finish(self) -> Parts:
        """End the text; return what was held back. Nothing may be pushed afterwards."""
        if self._is_form is None and not self._parser.opens:
            return Parts(self._held)
        return Parts() if self._is_form else Parts(tool_calls=self._parser.finish().tool_calls)
