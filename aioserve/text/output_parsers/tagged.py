"""Parsers of tool calls whose arguments stand between tags, one by one, without quotes.

The text between the tags doesn't show its type: only the function's schema tells that it is a
number (`ArgumentTypes`). Arguments are delivered as JSON, like all parsers do: strings as they
come, other values once they are whole.

Models forget tags. A value without its closing tag ends at the next argument, or at the end of its
call. That end is the call's consecutive closing tags, or one with another call or nothing after
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import ClassVar

from aioserve.text.output_parsers.argument_types import STRING, written
from aioserve.text.output_parsers.call_object import ArgumentsReader
from aioserve.text.output_parsers.reading import Reading
from aioserve.text.output_parsers.tool_parser import MAX_WORD_CHARS, ToolParser

__all__ = ["CLOSES", "OPENS", "Glm45Parser", "Qwen3CoderParser", "TaggedParser"]

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class TaggedParser(ToolParser):
    """Base of the parsers.

    A call has `begins` before its name. For each argument follow `key_opens`, its name,
    `key_closes`, and its value up to `value_closes`. The call ends with `ends`.
    """

    begins: ClassVar[str]
    name_closes: ClassVar[str] = ""
    key_opens: ClassVar[str]
    key_closes: ClassVar[tuple[str, ...]]
    """Tags after an argument's name, in their order."""
    value_closes: ClassVar[str]
    ends: ClassVar[str]
    takes_typed_marks: ClassVar[bool] = True
    line: ClassVar[str] = ""
    """Text that stands on both sides of a value, once, and is no part of it."""

    @classmethod
    def cutting(cls, escape: Callable[[str], str], spaces: str) -> str:
        """Return the expression of texts within a value that end it without its closing tag.

        `escape` escapes a text for it, and `spaces` is its expression of white space.
        """
        argument = f"{escape(cls.line + cls.key_opens)}[A-Za-z0-9_.-]+{escape(cls.key_closes[0])}"
        ends, closes = escape(cls.ends), escape(CLOSES)
        another = f"({ends}|{closes}){spaces}({escape(OPENS)}|{escape(cls.begins)})"
        whole = "" if cls.ends == CLOSES else f"|{ends}{spaces}{closes}"
        return f"({argument}|{another}{whole})"

    def _read(self) -> Reading[None]:
        begins = (OPENS, self.begins)
        held, marks = "", begins
        while raw := (yield from self._give_up_to(*marks, held=held)):
            held, marks = "", begins
            if raw.endswith(CLOSES):
                self._end_call()
                continue
            name, taken, mark = yield from self._head(raw.endswith(self.begins))
            if not mark:
                self._give(raw + taken)
                continue
            self._begin_call(name)
            self._give_arguments("{")
            end = yield from self._members(name, mark)
            if end != CLOSES:
                held = yield from self._spaces()
                if (yield from self._one_of(CLOSES)):
                    held = ""
                else:
                    marks = (*begins, CLOSES)

    def _head(self, has_begun: bool) -> Reading[tuple[str, str, str]]:
        """Read up to the arguments; return the name, the text before the mark after it, and the
        mark.

        The mark is empty if this is no call.
        """
        taken = ""
        if not has_begun:
            taken = yield from self._spaces()
            taken += (begun := (yield from self._one_of(self.begins)))
            if not begun:
                return "", taken, ""
        taken += yield from self._spaces()
        name = yield from self._word()
        closes = (yield from self._one_of(self.name_closes)) if self.name_closes else ""
        taken += name + closes
        if not name or closes != self.name_closes:
            return "", taken, ""
        taken += yield from self._spaces()
        return name, taken, (yield from self._one_of(self.key_opens, self.ends))

    def _members(self, function: str, mark: str) -> Reading[str]:
        """Read arguments up to the end mark, and return the mark.

        Text out of place is delivered as arguments.
        """
        before = ""
        while mark == self.key_opens:
            key = yield from self._key()
            if key is None:
                return (yield from self._broken_arguments(self.ends, CLOSES))
            self._give_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._value(function, key)):
                return ""
            spaces = yield from self._spaces()
            mark = yield from self._one_of(self.key_opens, self.ends, CLOSES, OPENS, self.begins)
            if mark in (OPENS, self.begins):
                self._put_back(mark)
            if not mark:
                self._give_arguments(spaces)
                return (yield from self._broken_arguments(self.ends, CLOSES))
        self._give_arguments("}")
        return mark

    def _key(self) -> Reading[str | None]:
        """Read a name up to the value. None, and nothing is taken, if the value doesn't come."""
        taken, key = self.key_opens, ""
        for index, closes in enumerate(self.key_closes):
            text, mark = "", ""
            while not mark and len(text) <= MAX_WORD_CHARS and (yield from self._next()):
                more, mark = yield from self._some((closes, CLOSES))
                text += more
            taken += text + mark
            if mark != closes or len(text) > MAX_WORD_CHARS or (index and text.strip()):
                self._put_back(taken)
                return None
            key = key or text.strip()
        return key

    def _value(self, function: str, key: str) -> Reading[bool]:
        """Read a value; return true if its end came."""
        types = self._types.of(function, key)
        pieces: list[str] = []
        give: Callable[[str], None] = pieces.append
        if types == STRING:
            self._give_arguments('"')
            give = self._give_string
        if self.line:
            yield from self._one_of(self.line)
        closes = (self.value_closes, self.ends, CLOSES)
        closes = (*[f"{self.line}{tag}" for tag in (*closes, self.key_opens)], *closes)
        if "string" not in types:
            yield from self._json(give)
        mark = ""
        while not mark and (yield from self._next()):
            text, mark = yield from self._some(closes)
            give(text)
            if mark and not mark.endswith(self.value_closes):
                behind, ends = yield from self._behind(mark.removeprefix(self.line))
                self._put_back(mark + behind if ends else behind)
                if not ends:
                    give(mark)
                    mark = ""
        if types == STRING:
            self._give_arguments('"' if mark else "")
        else:
            text = "".join(pieces)
            self._give_arguments(written(text, types) if mark else text)
        return bool(mark)

    def _behind(self, tag: str) -> Reading[tuple[str, bool]]:
        """Read after a tag that may end a value, as far as needed to tell; return that text, and
        true if it does.
        """
        if tag == self.key_opens:
            word = yield from self._word()
            closes = yield from self._one_of(self.key_closes[0])
            return word + closes, bool(word and closes)
        behind = yield from self._spaces()
        closes = ""
        if tag != CLOSES:
            closes = yield from self._one_of(CLOSES)
        behind += closes + (opens := (yield from self._one_of(OPENS, self.begins)))
        return behind, bool(closes or opens) or not (yield from self._next())

    def _json(self, give: Callable[[str], None]) -> Reading[None]:
        """Read an object or a list, in which the closing tag may be quoted."""
        give((yield from self._spaces()))
        if (yield from self._next()) not in ("{", "["):
            return
        reader = ArgumentsReader()
        while not reader.is_done and not reader.is_broken and (yield from self._next()):
            self._at = reader.read(self._text, self._at)
        give(reader.take())

    def _give_string(self, text: str) -> None:
        self._give_arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class Glm45Parser(TaggedParser):
    """Reads tool calls as GLM 4.5 and later write them:

        <tool_call>get_weather
        <arg_key>city</arg_key>
        <arg_value>Oslo</arg_value>
        </tool_call>

    The line breaks may be missing.
    """

    name = "glm45"
    begins = OPENS
    key_opens = "<arg_key>"
    key_closes: ClassVar[tuple[str, ...]] = ("</arg_key>", "<arg_value>")
    value_closes = "</arg_value>"
    ends = CLOSES
    marks: ClassVar[tuple[str, ...]] = (OPENS, key_opens, *key_closes, value_closes, CLOSES)
    opens: ClassVar[tuple[str, ...]] = (OPENS,)

    @classmethod
    def reads(cls, source: str) -> bool:
        return cls.key_opens in source


class Qwen3CoderParser(TaggedParser):
    """Reads tool calls as Qwen3-Coder writes them:

        <tool_call>
        <function=get_weather>
        <parameter=city>
        Oslo
        </parameter>
        </function>
        </tool_call>

    The tag around the function may be missing: the model forgets it.
    """

    name = "qwen3_coder"
    begins = "<function="
    name_closes = ">"
    key_opens = "<parameter="
    key_closes: ClassVar[tuple[str, ...]] = (">",)
    value_closes = "</parameter>"
    ends = "</function>"
    line = "\n"
    marks: ClassVar[tuple[str, ...]] = (OPENS, begins, key_opens, value_closes, ends, CLOSES)
    opens: ClassVar[tuple[str, ...]] = (OPENS, begins)

    @classmethod
    def reads(cls, source: str) -> bool:
        return cls.begins in source and cls.key_opens in source
