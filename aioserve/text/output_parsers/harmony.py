"""Parser of completions in harmony, the format of GPT-OSS: messages, each in a channel.

    <|channel|>analysis<|message|>They want the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Oslo"}<|call|>

The line breaks are only here. The channel `analysis` is reasoning. A message to a recipient is a
tool call, whatever its channel. If the recipient is none of `functions`, the name of the call keeps
its namespace (`browser.search`, `python`), and the arguments may be no JSON. Everything else is
content: `final`, text in `commentary` before calls, and messages without a channel or in an unknown
one. Messages of one kind are joined by a line break.

A completion begins after `<|start|>assistant`, with which the prompt ends. A head in which the
text ends is ignored. Text that looks like a mark is one here, except in strings of arguments, which
only JSON ends. Marks that the model typed are escaped by `TypedMarks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

import msgspec

from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.reading import Reading
from aioserve.text.output_parsers.tool_parser import MAX_WORD_CHARS, ToolParser

__all__ = [
    "CALL",
    "CHANNEL",
    "CONSTRAIN",
    "END",
    "MESSAGE",
    "RETURN",
    "ROLE",
    "START",
    "HarmonyChannels",
    "HarmonyParser",
    "is_reasoning_opened",
]

START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN = (
    f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "call", "return")
)
ENDS = (END, CALL, RETURN)
ROLE = "assistant"
MAX_HEAD_CHARS = 1024
"""Most characters between two marks of a head: longer text is a message."""
_CHANNEL = re.compile(r"\s{0,16}([a-z]{0,16})\s?")
_CHANNEL_IN = re.compile(rf"{re.escape(CHANNEL)}\s{{0,16}}([a-z]{{0,16}})")
_RECIPIENT_IN = re.compile(r"\bto=([^\s<]*)")
_RECIPIENT = re.compile(r"to=\S*(?:\s+\w*)?\s*")
"""Pattern of text that may stand between the role and the first mark of a head."""
_NO_TOOLS = ("", "all", "assistant", "user")
"""Recipients that aren't tools."""


class _Head(msgspec.Struct, frozen=True):
    """Text before a message, with its marks and without its role."""

    raw: str

    @property
    def function(self) -> str:
        """Name of the function that the message calls; empty if it calls none."""
        found = _RECIPIENT_IN.findall(self.raw)
        if not found or found[-1] in _NO_TOOLS or not self.raw.endswith(MESSAGE):
            return ""
        name = found[-1].removeprefix("functions.")
        return name if len(name) <= MAX_WORD_CHARS else ""

    @property
    def is_reasoning(self) -> bool:
        found = _CHANNEL_IN.findall(self.raw)
        return bool(found) and found[-1] == "analysis"


class HarmonyParser(ToolParser):
    """Reads a whole completion: reasoning, content and tool calls.

    `opened` is the part of the first message that the prompt has written, after its role. If
    reasoning or calls aren't told apart, their messages are content as the model wrote them, marks
    included. With `has_heads` every message has a head, so the start of one is never content.
    """

    name = "harmony"
    marks: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    opens: ClassVar[tuple[str, ...]] = (CHANNEL, START)

    @classmethod
    def reads(cls, source: str) -> bool:
        return CHANNEL in source and MESSAGE in source

    def __init__(
        self,
        new_id: Callable[[], str] | None = None,
        types: ArgumentTypes | None = None,
        *,
        opened: str = "",
        tells_reasoning: bool = False,
        tells_calls: bool = True,
        has_heads: bool = False,
    ) -> None:
        self._opened = opened
        self._has_heads = has_heads
        self._tells_reasoning = tells_reasoning
        self._tells_calls = tells_calls
        self._said: set[int] = set()
        """Kinds of parts that have had a message."""
        self.is_inside: bool = False
        """True if more text is reasoning, or the mark after it."""
        self.has_ended: bool = False
        """True if only content follows: never, as any message may be followed by reasoning."""
        super().__init__(new_id, types)

    def _read(self) -> Reading[None]:
        self._put_back(self._opened)
        mark = ""
        while (yield from self._next()):
            head = yield from self._head(has_role=mark != START)
            if head.function and self._tells_calls:
                mark = yield from self._called(head.function)
            else:
                mark = yield from self._message(head)

    def _head(self, *, has_role: bool) -> Reading[_Head]:
        """Read the head of a message. Text that is no part of a head is left, as a message without
        one.

        Set `has_role` if no role is to come, or if it may be left out.
        """
        raw = text = ""
        while (yield from self._next()):
            more, mark = yield from self._some(self.marks)
            text += more
            said = None if raw else _said(text, has_role=has_role, is_whole=bool(mark))
            if said is None and (mark in ENDS or len(text) > MAX_HEAD_CHARS):
                is_bare = not raw and len(text) <= MAX_HEAD_CHARS
                said = "" if is_bare else _behind_channel(text, raw)
            if said is not None:
                self._put_back(said + mark)
                return _Head(raw + text.removesuffix(said) if raw else "")
            if mark == START:
                raw, text, has_role = "", "", False
            elif mark:
                raw += (text if raw or has_role else text.removeprefix(ROLE)) + mark
                text = ""
            if mark == MESSAGE:
                return _Head(raw)
        if not raw and not self._has_heads:
            self._put_back(_said(text, has_role=has_role, is_whole=True) or "")
        return _Head("")

    def _message(self, head: _Head) -> Reading[str]:
        """Read a message of reasoning or content, up to the mark after it, and return the mark."""
        is_raw = bool(head.function) or (head.is_reasoning and not self._tells_reasoning)
        self.is_inside = head.is_reasoning and not is_raw
        give = self._giving(self._reasoning if self.is_inside else self._content)
        if is_raw:
            give(head.raw)
        mark = ""
        while not mark and (yield from self._next()):
            text, mark = yield from self._some(self.marks)
            give(text)
            mark = self._end(mark)
        self.is_inside = False
        if is_raw and mark in ENDS:
            give(mark)
        return mark

    def _called(self, function: str) -> Reading[str]:
        """Read a call, up to the mark after it, and return the mark. Missing arguments become
        `{}`.
        """
        self._begin_call(function)
        held = yield from self._spaces()
        has_arguments = (yield from self._next()) == "{"
        if has_arguments:
            held = ""
            yield from self._arguments()
        mark = ""
        while not mark and (yield from self._next()):
            text, mark = yield from self._some(self.marks)
            if not has_arguments:
                text = text.lstrip()
            kept = text.rstrip()
            if kept:
                self._give_arguments((held if has_arguments else "") + kept)
                held, has_arguments = "", True
            held += text[len(kept) :]
            mark = self._end(mark)
        if mark and not has_arguments:
            self._give_arguments("{}")
        return mark

    def _end(self, mark: str) -> str:
        """Return the mark if it ends a message. A mark that begins a head is left."""
        if mark == CHANNEL:
            self._put_back(mark)
        return "" if mark in (MESSAGE, CONSTRAIN) else mark

    def _giving(self, parts: list[str]) -> Callable[[str], None]:
        """Return a function that adds text of one message to parts of its kind."""
        has_begun = False

        def give(text: str) -> None:
            nonlocal has_begun
            if text and not has_begun:
                if id(parts) in self._said:
                    parts.append("\n")
                self._said.add(id(parts))
                has_begun = True
            parts.append(text)

        return give


class HarmonyChannels(msgspec.Struct, frozen=True):
    """Reasoning in a channel of its own, which may come again after other messages."""

    calls: bool = False
    """True if a call follows the reasoning, and no content."""

    @property
    def marks(self) -> tuple[str, ...]:
        return HarmonyParser.marks

    @property
    def closes(self) -> str:
        """Text that ends reasoning and begins what follows it."""
        behind = "commentary to=functions." if self.calls else f"final{MESSAGE}"
        return f"{END}{START}{ROLE}{CHANNEL}{behind}"

    def opened_by(self, prompt_end: str, begun: str) -> str:
        """Return the part of the first message that the prompt has written, after its role.

        `prompt_end` is the end of the prompt, `begun` the content that the completion continues.
        """
        if begun:
            return f"{CHANNEL}final{MESSAGE}"
        role, _, head = prompt_end.rpartition(START)[2].partition(ROLE)
        if role or any(mark in head for mark in ENDS):
            return ""
        head, mark, _ = head.partition(MESSAGE)
        return head + mark

    def reader(
        self,
        opened: str,
        types: ArgumentTypes | None = None,
        *,
        tells_calls: bool = False,
        has_heads: bool = False,
    ) -> HarmonyParser:
        """Return a reader of one completion."""
        return HarmonyParser(
            types=types,
            opened=opened,
            tells_reasoning=True,
            tells_calls=tells_calls,
            has_heads=has_heads,
        )


def is_reasoning_opened(opened: str) -> bool:
    """True if `opened`, written by the prompt, begins a message of reasoning."""
    head = _Head(opened)
    return opened.endswith(MESSAGE) and head.is_reasoning and not head.function


def _said(text: str, *, has_role: bool, is_whole: bool) -> str | None:
    """Return text that is said without a head; None if it begins a head, or may become one.

    Set `is_whole` if no more text comes before a mark.
    """
    said = text
    rest = text.lstrip()
    if has_role:
        if not is_whole and ROLE.startswith(rest):
            return None
        rest = rest.removeprefix(ROLE)
    elif text.startswith(ROLE):
        said = rest = text[len(ROLE) :]
    else:
        return None
    rest = rest.lstrip()
    may_be = not is_whole and "to=".startswith(rest)
    return None if not rest or may_be or _RECIPIENT.fullmatch(rest) else said


def _behind_channel(text: str, raw: str) -> str:
    """Return the text of a message whose head, `raw`, lacks its end mark."""
    found = _CHANNEL.match(text) if raw.endswith(CHANNEL) else None
    return text if found is None else text[found.end() :]
