"""Bounds on what a chat template may do: it is a program that came with a model.

The library counts instructions (its "fuel"), and nothing else: not what is printed, and no other
thread runs meanwhile. So every loop, macro and print of a template is made to ask a `Budget` first.
That bounds steps, text and time, and lets other threads have the interpreter's lock. What a single
expression does in between is bounded by its length alone: `"x" * 10**9` still takes a gigabyte.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from aioserve.errors import ModelError

__all__ = ["Budget", "BudgetSpentError", "asking", "fuel_for"]

MAX_TEMPLATE_CHARS = 1 << 18
MAX_TAG_CHARS = 2048
"""Longest tag, strings aside: the library's parser recurses over operators and kills the process
where thousands nest."""
MAX_ELIFS = 500
STEPS, STEPS_PER_ITEM = 10_000, 100
"""Most iterations, calls of macros, assignments and prints."""
CHARS, CHARS_PER_ITEM, CHARS_PER_CHAR = 1 << 20, 1 << 12, 16
"""Most characters printed and assigned; the last is for each character of the messages."""
FUEL, FUEL_PER_ITEM = 1 << 20, 1 << 12
MAX_SECONDS = 10.0
"""Most CPU time of the rendering thread."""
SPEND = "_aioserve_spend"
_PRINTED = "_aioserve_printed"
LONG_TEXT_CHARS = 64
"""Shorter template text isn't counted, but at the start of a loop or a macro."""

_OPENS = re.compile(r"\{[%{#]")
_IN_TAG = re.compile(
    r"""(?s)"(?:[^"\\]|\\.?)*+(?:"|\Z)|'(?:[^'\\]|\\.?)*+(?:'|\Z)"""
    r"""|(?P<end>[-+]?%\})|(?P<ends>[-+]?\}\})|[{}]"""
)
_END_RAW = re.compile(r"\{%[-+]?\s*endraw\s*[-+]?%\}")
_WORD = re.compile(r"\s*(\w+)")
_ASSIGNS = re.compile(r"\s*set\s+([\w.]+)\s*=(?!=)")


class BudgetSpentError(Exception):
    """A template did more than it may; the message says what."""


class Budget:
    """Budget of one rendering of `num_items`, messages and values that come with them, of
    `num_chars` characters."""

    def __init__(self, num_items: int, num_chars: int) -> None:
        self._max_steps = STEPS + STEPS_PER_ITEM * num_items
        self._max_chars = CHARS + CHARS_PER_ITEM * num_items + CHARS_PER_CHAR * num_chars
        self._steps = self._chars = 0
        self._ends = time.thread_time() + MAX_SECONDS

    def spend(self, chars: int) -> None:
        """Count one step, and text of `chars` characters. Raises `BudgetSpentError`."""
        self._steps += 1
        self._chars += chars
        if self._steps > self._max_steps:
            raise BudgetSpentError(f"it took more than {self._max_steps} steps")
        if self._chars > self._max_chars:
            raise BudgetSpentError(f"it wrote more than {self._max_chars} characters")
        if time.thread_time() > self._ends:
            raise BudgetSpentError(f"it took more than {MAX_SECONDS:g} s of CPU time")


def fuel_for(num_items: int) -> int:
    """Instructions for that many items: a power of two, so that few environments serve all."""
    return FUEL << (num_items * FUEL_PER_ITEM // FUEL).bit_length()


class _Tag(NamedTuple):
    opens: str
    """`{%`, `{{` or `{#`."""
    left: str
    body: str
    right: str
    """Marks beside the braces: "-", "+" or nothing."""
    code_chars: int
    """Characters of the body, strings aside."""
    end: int


def asking(source: str, origin: str) -> str:
    """The template `source`, asking the variable `SPEND` before it does much; lines stay the same.
    Raises `ModelError` naming `origin` if the template is too long in one way or another."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ModelError(
            f"{origin}: the chat template must have at most {MAX_TEMPLATE_CHARS} characters, "
            f"got {len(source)}"
        )
    pieces: list[str] = []
    done = elifs = 0
    while (found := _OPENS.search(source, done)) is not None:
        tag = _tag_at(source, found.start())
        if tag is None:  # never closed: the library says so
            break
        if tag.code_chars > MAX_TAG_CHARS:
            line = source.count("\n", 0, found.start()) + 1
            raise ModelError(
                f"{origin}: a tag of the chat template must have at most {MAX_TAG_CHARS} "
                f"characters, strings aside, got {tag.code_chars} in line {line}"
            )
        word = _WORD.match(tag.body)
        name = word[1] if word and tag.opens == "{%" else ""
        elifs += name == "elif"
        pieces.append(source[done : found.start()])
        done = tag.end
        if name == "raw":
            end = _END_RAW.search(source, done)
            done = len(source) if end is None else end.end()
            raw = source[found.start() + 2 + len(tag.left) : done]
            pieces.append(f"{{%{tag.left} do {SPEND}({len(raw)}) %}}{{%{raw}")
            continue
        following = _OPENS.search(source, done)
        text_chars = (following.start() if following else len(source)) - done
        pieces.append(_rewritten(tag, name, text_chars))
    if elifs > MAX_ELIFS:
        raise ModelError(
            f"{origin}: the chat template must have at most {MAX_ELIFS} elif tags, got {elifs}"
        )
    return "".join([*pieces, source[done:]])


def _rewritten(tag: _Tag, name: str, text_chars: int) -> str:
    """`tag`, which `text_chars` characters of text follow."""
    opens, left, body, right = tag.opens, tag.left, tag.body, tag.right
    closes = {"{%": "%}", "{{": "}}", "{#": "#}"}[opens]
    cost = str(text_chars) if text_chars > LONG_TEXT_CHARS else ""
    if name in ("for", "macro", "call", "block"):
        cost = str(text_chars)
    elif assigns := _ASSIGNS.match(body) if name == "set" else None:
        target = assigns[1]
        cost = f"{text_chars} + ({target}|length if {target} is string else 0)"
    if opens == "{{" and body.strip():
        # Printed once it is counted. White space before a print stays where that before a block
        # goes.
        left = left or "+"
        body = (
            f" set {_PRINTED} = ({body}) %}}"
            f"{{% do {SPEND}({_PRINTED}|string|length) %}}{{{{ {_PRINTED} "
        )
        opens = "{%"
    if not cost:
        return f"{opens}{left}{body}{right}{closes}"
    # A line's end goes after a block, and stays after a print.
    after = right or ("+" if tag.opens == "{{" else "")
    return f"{opens}{left}{body}{closes}{{% do {SPEND}({cost}) {after}%}}"


def _tag_at(source: str, start: int) -> _Tag | None:
    opens, inside = source[start : start + 2], start + 2
    left = source[inside : inside + 1]
    left = left if left in ("-", "+") else ""
    inside += len(left)
    if opens == "{#":
        end = source.find("#}", inside)
        if end < 0:
            return None
        right = source[end - 1] if end > inside and source[end - 1] in "-+" else ""
        return _Tag(opens, left, source[inside : end - len(right)], right, 0, end + 2)
    depth, strings, at = 0, 0, inside
    while (found := _IN_TAG.search(source, at)) is not None:
        text, at = found[0], found.end()
        if text[0] in "\"'":
            strings += len(text)
        elif text == "{":
            depth += 1
        elif found["end" if opens == "{%" else "ends"] and not depth:
            body = source[inside : found.start()]
            return _Tag(opens, left, body, text[:-2], len(body) - strings, at)
        elif "}" in text:
            # One brace of a literal at a time.
            depth = max(depth - 1, 0)
            at = found.start() + text.index("}") + 1
    return None
