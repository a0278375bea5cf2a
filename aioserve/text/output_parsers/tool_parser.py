"""Base of the parsers of tool calls.

A call is one from the moment that its name and the start of its arguments are there; from then on
its arguments are given out as they come. What turns out to be no call before that is content,
marks included. Where arguments stop being JSON after that, what follows up to the mark of the end
belongs to them as the model wrote it: nothing is lost, and the caller sees what was wrong. Further
members of a call's object are read and left out. Where the object stops being JSON behind its
arguments, or isn't closed, the call ends with these, and all that follows them is read as what
follows a call: nothing of it is lost, and it is content but for the mark of the end. White space
around calls is not content.
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
"""Longest name of a function, or id, that is read without quotes around it."""
_WORD = re.compile(r"[A-Za-z0-9_.-]+")


class CallEnd(Enum):
    """Outcome of a call."""

    WHOLE = auto()
    BROKEN = auto()
    """The arguments aren't JSON, or the text ended in them."""
    NO_CALL = auto()
    """The text was given out as content."""


class ToolParser(TextReader):
    """Tells tool calls from content in the text of one completion; `new_id` makes their ids, and
    `types` says what arguments are, which some families don't write with their values. A subclass
    reads the calls of one family of models."""

    name: ClassVar[str]
    """Name of the parser, as vLLM has it."""
    marks: ClassVar[tuple[str, ...]]
    """Marks, which may be special tokens; the completion's text has them all the same."""
    opens: ClassVar[tuple[str, ...]] = ()
    """Marks one of which every call begins with; none where a call may begin with a brace."""
    takes_lists: ClassVar[bool] = False
    """True if a call may also begin with the bracket of a list, where none has a mark."""
    takes_typed_marks: ClassVar[bool] = False
    """Whether marks that are special tokens are marks also where the model types them: the family
    of models writes its marks in words."""
    _ids: Callable[[], str] = staticmethod(call_id)

    @classmethod
    def reads(cls, source: str) -> bool:
        """Whether a chat template of this source is written for the parser."""
        return False

    def __init__(
        self, new_id: Callable[[], str] | None = None, types: ArgumentTypes | None = None
    ) -> None:
        self._new_id = new_id or self._ids
        self._types = types or ArgumentTypes()
        self._num_calls = 0
        self._model_ids: set[str] = set()
        self._is_after_call = False
        """Whether nothing but white space came since the last call."""
        super().__init__()

    def _give(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._is_after_call = False

    def _give_up_to(self, *marks: str, held: str = "") -> Reading[str]:
        """Give out content up to the next mark, and take the mark. Return it with the white space
        before it; empty at the end of the text. `held` is white space that came before."""
        held, mark = yield from self._up_to(marks, self._give, held)
        if not mark and not self._is_after_call:
            self._give(held)
        return held + mark if mark else ""

    def _begin_call(self, name: str, model_id: str = "") -> None:
        """Begin a call. `model_id` is the id that the model wrote, which it may have written
        twice."""
        if not model_id or model_id in self._model_ids:
            self._deltas.append(ToolCallDelta(self._num_calls, self._new_id(), name))
        else:
            self._model_ids.add(model_id)
            self._deltas.append(ToolCallDelta(self._num_calls, model_id, name))
        self._num_calls += 1
        self._end_call()

    def _end_call(self) -> None:
        """End a call. White space that follows is not content, if nothing else follows."""
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
        """Take a name, or an id, that is written without quotes; empty where there is none."""
        word = ""
        while (yield from self._next()) and len(word) <= MAX_WORD_CHARS:
            found = _WORD.match(self._text, self._at, self._at + MAX_WORD_CHARS - len(word))
            if found is None:
                break
            word += found[0]
            self._at = found.end()
        return word

    def _call(self, raw: str) -> Reading[CallEnd]:
        """Read a call that is an object; `raw` is what led to it, which is content if it is none.
        Behind a mark, an object with a name and without arguments is a call with none. What is
        taken ends with the object, or before what can't be part of it: where that comes behind the
        arguments, with these."""
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

    def _arguments(self) -> Reading[CallEnd]:
        """Read an object of arguments, of the call that has begun."""
        arguments = ArgumentsReader()
        while not arguments.is_done and not arguments.is_broken and (yield from self._next()):
            self._at = arguments.read(self._text, self._at)
            self._give_arguments(arguments.take())
        return CallEnd.WHOLE if arguments.is_done else CallEnd.BROKEN

    def _broken_arguments(self, *marks: str) -> Reading[str]:
        """Give out all up to a mark as arguments; take and return the mark."""
        mark = ""
        while not mark and (yield from self._next()):
            text, mark = yield from self._some(marks)
            self._give_arguments(text)
        return mark
