"""Reads completions that are calls of tools, or else a form: JSON, in which no call is."""

from __future__ import annotations

from aioserve.text.output_parsers.parts import Parts
from aioserve.text.output_parsers.tool_parser import ToolParser

__all__ = ["FormOrCallsReader"]


class FormOrCallsReader:
    """Reader of one completion, as `ToolParser`, which it asks for calls.

    How the text begins says what all of it is, white space aside: calls where it begins with one of
    the marks that `parser.opens`, and a form otherwise, which is content, whatever marks its
    strings hold. Beside calls there is no content: what of them wasn't read is a call that was cut
    off, and no form.
    """

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._held = ""
        """The start of the text, as long as it doesn't say what it is."""
        self._is_form: bool | None = None
        """None while that isn't known."""

    def push(self, text: str) -> Parts:
        """Take more text; return what became known."""
        if self._is_form is None:
            text = self._held + text
            self._held, begun = "", text.lstrip()
            opens = self._parser.opens
            if begun.startswith(opens):
                self._is_form = False
            elif any(mark.startswith(begun) for mark in opens):
                self._held = text
                return Parts()
            else:
                self._is_form = True
        if self._is_form:
            return Parts(text)
        return Parts(tool_calls=self._parser.push(text).tool_calls)

    def finish(self) -> Parts:
        """End the text; return what was held back. Nothing may be pushed afterwards."""
        return Parts() if self._is_form else Parts(tool_calls=self._parser.finish().tool_calls)
