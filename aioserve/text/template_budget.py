"""Bounds on the work of a chat template, which is a program that came with a model.

Each rendering has a `Budget`. The template's loops, calls, filters and operators report to it, and
it ends the rendering at a limit. Knows values of Python and no template.

The largest value that a template can hold is bounded too. So a single operation on one (print it,
compare it, sort it) takes a bounded time. Size here is the number of values and characters inside,
each counted as often as it would be printed. So `[x, x]` is twice as large as `x`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

__all__ = ["MAX_WIDTH", "SCOPES", "Budget", "BudgetSpentError"]

STEPS, STEPS_PER_ITEM = 200_000, 1000
"""Most iterations, calls, filters, operators and values looked at."""
CHARS, CHARS_PER_ITEM, CHARS_PER_CHAR = 1 << 20, 1 << 12, 32
"""Most characters and values that are made or printed; the last is for each character of the
messages.
"""
MAX_SECONDS = 10.0
"""Most CPU time of the rendering thread, in seconds."""
MAX_CALLS = 100
"""Most calls of macros and loops, one inside the other."""
MAX_INT_BITS = 1 << 12
MAX_WIDTH = 1 << 12
"""Widest column, indent or precision, in characters."""
_STEPS_BETWEEN_LOOKS = 32
_MAX_KEPT = 1 << 17
_PLAIN = frozenset((bool, float, type(None)))
_COMMON = frozenset((list, tuple, dict))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_CONTAINERS += (type({}.items()), type({}.keys()), type({}.values()))
SCOPES = frozenset(("_loop_vars", "_block_vars"))
"""Arguments of the library's own, beside those of a call."""
_WIDE_FORMAT = re.compile(r"%\([^()]*\(|%(?:\([^()]*\))?[^%a-zA-Z]*(?:\d{5}|\*)")
"""Pattern of a width of five digits or one from an argument, possibly after a key; or of a key
with parentheses.
"""
_WIDE_FIELD = re.compile(r"\{[^{}]*(?:\d{5}|\{)")


class BudgetSpentError(Exception):
    """A template did more than it may; the message says what."""


class Budget:
    """Budget of one rendering.

    `num_items` counts messages and the values that come with them, and `num_chars` their
    characters. Methods raise `BudgetSpentError`, and what the operation itself raises.
    """

    __slots__ = (
        "_chars",
        "_depth",
        "_ends",
        "_kept",
        "_look_at",
        "_max_chars",
        "_max_steps",
        "_sizes",
        "_steps",
    )

    def __init__(self, num_items: int, num_chars: int) -> None:
        self._max_steps = STEPS + STEPS_PER_ITEM * num_items
        self._max_chars = CHARS + CHARS_PER_ITEM * num_items + CHARS_PER_CHAR * num_chars
        self._steps = self._chars = self._depth = self._kept = 0
        self._look_at = _STEPS_BETWEEN_LOOKS
        self._ends = time.thread_time() + MAX_SECONDS
        self._sizes: dict[int, tuple[object, int]] = {}
        """Sizes of containers by `id`, with the container itself, so that its id stays its own."""

    # -- work

    def step(self, steps: int = 1) -> None:
        """Count work."""
        self._steps += steps
        if self._steps >= self._look_at:
            self._look()

    def wrote(self, chars: int) -> None:
        """Count characters, or values, that are made or printed."""
        self._chars += chars
        if self._chars > self._max_chars:
            raise BudgetSpentError(f"it wrote more than {self._max_chars} characters")

    def enter(self) -> None:
        """Count a call that may call itself; `leave` ends it."""
        self._depth += 1
        if self._depth > MAX_CALLS:
            raise BudgetSpentError(f"it called macros more than {MAX_CALLS} deep")

    def leave(self) -> None:
        self._depth -= 1

    def _look(self) -> None:
        if self._steps > self._max_steps:
            raise BudgetSpentError(f"it took more than {self._max_steps} steps")
        if time.thread_time() > self._ends:
            raise BudgetSpentError(f"it took more than {MAX_SECONDS:g} s of CPU time")
        self._look_at = min(self._steps + _STEPS_BETWEEN_LOOKS, self._max_steps + 1)

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values, each counted as it is taken."""
        for value in values:
            self.step()
            yield value

    # -- values

    def made(self, value: Any) -> Any:
        """Count a value that an operation has made, and return it."""
        kind = type(value)
        if kind is str:
            self.wrote(len(value))
        elif kind is int:
            self._check_bits(value.bit_length())
        elif kind in _COMMON:
            self.wrote(len(value))
            self._check_size(self.size(value))
        elif kind in _PLAIN:
            pass
        elif isinstance(value, str):
            self.wrote(len(value))
        elif isinstance(value, _CONTAINERS):
            self._check_size(self.size(value))
        return value

    def passed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the arguments of a call, which may be kept as one value."""
        size = 0
        for value in args:
            if type(value) not in _PLAIN and isinstance(value, _CONTAINERS):
                size += self.size(value)
        for name, value in kwargs.items():
            if name not in SCOPES and isinstance(value, _CONTAINERS):
                size += self.size(value)
        self._check_size(size)

    def size(self, value: Any) -> int:
        """Return the size of a value. Takes time in proportion to it, or none if it is known."""
        kind = type(value)
        if kind is str:
            return len(value) + 1
        if kind in _PLAIN or kind is int:
            return 1
        if kind in _COMMON or isinstance(value, _CONTAINERS):
            known = self._sizes.get(id(value))
            return self._measured(value) if known is None else known[1]
        return len(value) + 1 if isinstance(value, str) else 1

    def _measured(self, value: Any) -> int:
        self.step(len(value) + 1)
        size = 1
        for entry in value:
            size += self.size(entry)
        if isinstance(value, dict):
            for entry in value.values():
                size += self.size(entry)
            size += len(value)
        self._check_size(size)
        return self._known(value, size)

    def _known(self, value: Any, size: int) -> int:
        self._kept += len(value) + 1
        if self._kept > _MAX_KEPT:
            self._sizes.clear()
            self._kept = 0
        self._sizes[id(value)] = (value, size)
        return size

    def _check_size(self, size: int) -> None:
        if size > self._max_chars:
            raise BudgetSpentError(f"it made a value of more than {self._max_chars} characters")

    def _check_bits(self, bits: int) -> None:
        if bits > MAX_INT_BITS:
            raise BudgetSpentError(f"it made an int of more than {MAX_INT_BITS} bits")

    def check_width(self, width: Any) -> None:
        """Check a number of columns, of decimals, or of other padding."""
        if isinstance(width, int) and width > MAX_WIDTH:
            raise BudgetSpentError(f"it asked for a width of more than {MAX_WIDTH}")

    def check_room(self, chars: int) -> None:
        """Check that `chars` more characters may be made."""
        if self._chars + chars > self._max_chars:
            raise BudgetSpentError(f"it wrote more than {self._max_chars} characters")

    # -- operations of templates

    def text(self, value: Any) -> str:
        """Return `value` as it is printed."""
        if type(value) is str:
            return value
        self.step()
        if isinstance(value, _CONTAINERS):
            self._check_size(self.size(value))
        text = str(value)
        self.wrote(len(text))
        return text

    def join(self, values: Iterable[Any]) -> str:
        """Return the prints of the values as one text."""
        texts = [self.text(value) for value in values]
        self.step()
        self.wrote(sum(map(len, texts)))
        return "".join(texts)

    def cut(self, value: Any, part: slice) -> Any:
        """Return `value[part]`."""
        self.step()
        made = value[part]
        if type(made) in _COMMON and (known := self._sizes.get(id(value))) is not None:
            self._known(made, known[1])  # or less
        return self.made(made)

    def add(self, left: Any, right: Any) -> Any:
        self.step()
        made = left + right
        if type(made) in _COMMON:
            self._check_size(size := self.size(left) + self.size(right))
            self._known(made, size)
        return self.made(made)

    def multiply(self, left: Any, right: Any) -> Any:
        self.step()
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Sequence) and isinstance(other, int):
                self.check_room(self.size(one) * other)
        if isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() + right.bit_length())
        return self.made(left * right)

    def power(self, left: Any, right: Any) -> Any:
        self.step()
        if isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * max(right, 0))
        return self.made(left**right)

    def remainder(self, left: Any, right: Any) -> Any:
        """Return `left % right`, which formats if `left` is text."""
        self.step()
        if isinstance(left, str):
            self.check_format(left, right)
        return self.made(left % right)

    def check_format(self, text: str, values: Any) -> None:
        """Check what `text % values` makes."""
        if _WIDE_FORMAT.search(text):
            self._refuse_format()
        times = text.count("%") if isinstance(values, dict) else 1
        self.check_room(len(text) + times * self.size(values))

    def check_fields(self, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check what `text.format(*args, **kwargs)` makes."""
        if _WIDE_FIELD.search(text):
            self._refuse_format()
        self.check_room(len(text) + text.count("{") * (self.size(args) + self.size(kwargs)))

    def check_replaced(self, text: str, old: str, new: str) -> None:
        """Check what `text.replace(old, new)` makes."""
        self.check_room(len(text) + text.count(old) * len(new))

    def _refuse_format(self) -> NoReturn:
        raise BudgetSpentError(f"it asked for a width of more than {MAX_WIDTH} in a format")
