"""Base of the parsers of tool calls.

A call exists from the moment that its name and the start of its arguments are there. From then on
its arguments are delivered as they come. Text that turns out before that to be no call is content,
marks included.

If arguments stop being JSON, the text up to the end mark belongs to them as the model wrote it.
Nothing is lost, and the caller sees the mistake. Further members of a call's object are read and
ignored. If the object stops being JSON after its arguments, or isn't closed, the call ends with
the arguments. The text after them is read like text after a call: it is content, except the end
mark. White space around calls is not content.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import ClassVar

from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.call_object import ArgumentsReader, CallReader
from aioserve.text.output_parsers.parts import ToolCallDelta, call_id
from aioserve.text.output_parsers.reading import Reading, TextReader

__all__ = ["MAX_WORD_CHARS", "CallEnd", "ToolParser"]

MAX_WORD_CHARS = 256
"""Most characters of a function's name, or an id, without quotes around it."""
_WORD = re.compile(r"[A-Za-z0-9_.-]+")


class CallEnd(Enum):
    """Outcome of a call."""

    WHOLE = auto()
    BROKEN = auto()
    """The arguments aren't JSON, or the text ended in them."""
    NO_CALL = auto()
    """The text was delivered as content."""


class ToolParser(TextReader):
    """Separates tool calls from content in the text of one completion.

    `new_id` makes the calls' ids. `types` are the types of arguments, which some families don't
    write with their values. A subclass reads the calls of one family of models.
    """

    name: ClassVar[str]
    """Name of the parser, as in vLLM."""
    marks: ClassVar[tuple[str, ...]]
    """Marks, which may be special tokens; the completion's text has them even so."""
    opens: ClassVar[tuple[str, ...]] = ()
    """Marks with which every call begins; empty if a call may begin with a brace."""
    takes_lists: ClassVar[bool] = False
    """True if a call may also begin with the bracket of a list, in a family without marks."""
    takes_typed_marks: ClassVar[bool] = False
    """True if marks that are special tokens also count when the model types them: the family of
    models writes its marks in words.
    """
    has_grammar: ClassVar[bool] = True
    """True if a grammar can hold calls, as the parser reads them, to the schemas of tools."""
    _ids: Callable[[], str] = staticmethod(call_id)

    @classmethod
    def reads(cls, source: str) -> bool:
        """Return true if a chat template of this source is written for the parser."""
        return False

    def __init__(
        self, new_id: Callable[[], str] | None = None, types: ArgumentTypes | None = None
    ) -> None:
        self._new_id = new_id or self._ids
        self._types = types or ArgumentTypes()
        self._num_calls = 0
        self._model_ids: set[str] = set()
        self._is_after_call = False
        """True if only white space came since the last call."""
        super().__init__()

    def _give(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._is_after_call = False

    def _give_up_to(self, *marks: str, held: str = "") -> Reading[str]:
        """Deliver content up to the next mark, and take the mark.

        Returns it with the white space before it; empty at the end of the text. `held` is white
        space that came before.
        """
        held, mark = yield from self._up_to(marks, self._give, held)
        if not mark and not self._is_after_call:
            self._give(held)
        return held + mark if mark else ""

    def _begin_call(self, name: str, model_id: str = "") -> None:
        """Begin a call. `model_id` is the id that the model wrote, possibly twice."""
        if not model_id or model_id in self._model_ids:
            self._deltas.append(ToolCallDelta(self._num_calls, self._new_id(), name))
        else:
            self._model_ids.add(model_id)
            self._deltas.append(ToolCallDelta(self._num_calls, model_id, name))
        self._num_calls += 1
        self._end_call()

    def _end_call(self) -> None:
        """End a call. White space after it is not content, if nothing else follows."""
        self._is_after_call = True

    def _give_arguments(self, fragment: str) -> None:
        index = self._num_calls - 1
        if not fragment:
            return
        if self._deltas and self._deltas[-1].index == index:
            last = self._deltas.pop()
            delta = ToolCallDelta(index, last.id, last.name, last.arguments + fragment)
        else:
            delta = ToolCallDelta(index, arguments=fragment)
        self._deltas.append(delta)

    def _word(self) -> Reading[str]:
        """Take a name, or an id, that is written without quotes; empty without one."""
        word = ""
        while (yield from self._next()) and len(word) <= MAX_WORD_CHARS:
            found = _WORD.match(self._text, self._at, self._at + MAX_WORD_CHARS - len(word))
            if found is None:
                break
            word += found[0]
            self._at = found.end()
        return word

    def _call(self, raw: str) -> Reading[CallEnd]:
        """Read a call that is an object. The text `raw`, which led to it, is content if it is no
        call.

        Behind a mark, an object with a name and without arguments is a call without arguments.
        Reading stops at the end of the object, or before text that can't be part of it. If that
        text comes after the arguments, it stops at their end.
        """
        call, begun = CallReader(), False
        while not call.is_done and not call.is_broken and (yield from self._next()):
            self._at = call.read(self._text, self._at)
            if call.has_begun:
                if not begun and call.name is not None:
                    self._begin_call(call.name)
                begun = True
                self._give_arguments(call.take())
        if not begun and call.is_done and call.name is not None and self.opens:
            self._begin_call(call.name)
            self._give_arguments("{}")
            return CallEnd.WHOLE
        if not begun:
            self._give(raw + call.raw)
            return CallEnd.NO_CALL
        if not call.has_arguments:
            return CallEnd.BROKEN
        if not call.is_done:
            self._put_back(call.rest)
        return CallEnd.WHOLE

    def _list(self, raw: str) -> Reading[tuple[CallEnd, str]]:
        """Read a list of calls, behind its bracket; `raw` is what led to it. Return how the list
        ended, and white space behind what is taken."""
        raw += yield from self._spaces()
        while True:
            end = yield from self._call(raw)
            if end is not CallEnd.WHOLE:
                return end, ""
            raw = yield from self._spaces()
            if not (separator := (yield from self._one_of(",", "]"))):
                return end, raw
            if separator == "]":
                return end, ""
            raw += separator + (yield from self._spaces())

    def _arguments(self) -> Reading[CallEnd]:
        """Read the arguments of the call that has begun."""
        arguments = ArgumentsReader()
        while not arguments.is_done and not arguments.is_broken and (yield from self._next()):
            self._at = arguments.read(self._text, self._at)
            self._give_arguments(arguments.take())
        return CallEnd.WHOLE if arguments.is_done else CallEnd.BROKEN

    def _broken_arguments(self, *marks: str) -> Reading[str]:
        """Deliver everything up to a mark as arguments; take and return the mark."""
        mark = ""
        while not mark and (yield from self._next()):
            text, mark = yield from self._some(marks)
            self._give_arguments(text)
        return mark
