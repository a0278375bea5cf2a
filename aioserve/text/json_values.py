"""Copies of a sender's JSON values in Python's own classes, within limits.

The size that a sender's class claims isn't trusted: no more is read than may be there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from aioserve.arguments import plain_int, plain_str
from aioserve.errors import InvalidPromptError, PromptTooLongError
from aioserve.isolation import shown
from aioserve.schema_classes import has_schema, placed
from aioserve.structured_output import plain_schema
from aioserve.text.cut_off import closed

__all__ = ["MAX_DEPTH", "MAX_VALUES", "Reader", "check_texts", "check_utf8", "parsed_arguments"]

MAX_DEPTH = 32
"""Deepest nesting of lists and objects."""
MAX_VALUES = 10_000
"""Most values in the tools, tool calls, content parts and template arguments of one prompt
together. Reading that many takes the event loop some 10 ms.
"""
STEPS_TO_PARAMETERS = len((0, "function", "parameters"))
"""Steps from the tools to the schema of one of them."""
MAX_INT_BITS = 127
MAX_JSON_CHARS = 2**20
"""Most characters of a text that is parsed."""

_PIECE_CHARS = 2**16


class Reader:
    """Copies the parts of one prompt, of at most `max_chars` characters in all.

    In errors, `argument` names the prompt, followed by the path to the value. Raises
    `InvalidPromptError`, and `PromptTooLongError` for too many characters.
    """

    def __init__(self, argument: str, max_chars: int | None = None) -> None:
        self.argument: str = argument
        self.num_chars: int = 0
        self.num_values: int = 0
        self._max_chars = max_chars
        self._path: list[str | int] = []

    @property
    def where(self) -> str:
        return self.argument + "".join([f"[{shown(part)}]" for part in self._path])

    def error(self, must: str, *, value: object = None, limit: object = None) -> InvalidPromptError:
        """Return the error that the value at the current path must be something else."""
        argument = "prompt" if self.argument == "messages" else self.argument
        return InvalidPromptError(
            f"{self.where} {must}", argument=argument, value=value, limit=limit
        )

    def text(self, value: object, *, max_chars: int | None = None) -> str:
        """Copy a str of any class, of at most `max_chars` characters."""
        text = plain_str(value)
        if text is None:
            raise self.error(f"must be a str, got {type(value).__name__}")
        if max_chars is not None and len(text) > max_chars:
            raise self.error(
                f"must have at most {max_chars} characters, got {len(text)}",
                value=len(text),
                limit=max_chars,
            )
        self.count_chars(len(text))
        return text

    def count_chars(self, chars: int) -> None:
        self.num_chars += chars
        if self._max_chars is not None and self.num_chars > self._max_chars:
            top = self.argument + "".join([f"[{shown(part)}]" for part in self._path[:1]])
            raise PromptTooLongError(
                f"prompt has {self.num_chars} characters up to {top}; {self._max_chars} are read "
                "at most",
                value=self.num_chars,
                limit=self._max_chars,
                unit="characters",
            )

    def at(self, part: str | int) -> Reader:
        """Context within which values are read that are this part of the outer value."""
        self._path.append(part)
        return self

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._path.pop()

    def items(self, value: Any) -> list[tuple[str, Any]]:
        """Return the items of a mapping with keys of str, each counted as a value."""
        if not issubclass(type(value), Mapping):
            raise self.error(f"must be a dict, got {type(value).__name__}")
        items: list[tuple[str, Any]] = []
        for key in islice(value, MAX_VALUES - self.num_values + 1):
            text = plain_str(key)
            if text is None:
                raise self.error(f"must have keys of str, got {shown(key)}")
            self._count_value()
            items.append((text, value[key]))
        return items

    def elements(self, value: Any) -> list[Any]:
        """Return the elements of a list, each counted as a value."""
        kind = type(value)
        if not issubclass(kind, Sequence) or issubclass(kind, str | bytes | bytearray | memoryview):
            raise self.error(f"must be a list, got {kind.__name__}")
        elements: list[Any] = []
        for element in islice(value, MAX_VALUES - self.num_values + 1):
            self._count_value()
            elements.append(element)
        return elements

    def value(self, value: Any) -> Any:
        """Copy any value of JSON."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if issubclass(kind, str):
            return self.text(value)
        if len(self._path) > MAX_DEPTH:
            raise self.error(
                f"must be nested at most {MAX_DEPTH} deep, got {len(self._path)}",
                value=len(self._path),
                limit=MAX_DEPTH,
            )
        if issubclass(kind, Mapping):
            copy: dict[str, Any] = {}
            for key, entry in self.items(value):
                self.count_chars(len(key))
                with self.at(key):
                    copy[key] = self.value(entry)
            return copy
        if issubclass(kind, list | tuple):
            entries: list[Any] = []
            for index, entry in enumerate(self.elements(value)):
                with self.at(index):
                    entries.append(self.value(entry))
            return entries
        if not issubclass(kind, int | float) and has_schema(value):
            schema = plain_schema(value, lambda must, _: self.error(f"must {must}"))
            return placed(self.value(schema), self._path[STEPS_TO_PARAMETERS:])
        return self._number(value)

    def _number(self, value: Any) -> int | float:
        if (number := plain_int(value)) is not None:
            if number.bit_length() > MAX_INT_BITS:
                raise self.error(
                    f"must be an int of at most {MAX_INT_BITS} bits, got {number.bit_length()}",
                    value=number.bit_length(),
                    limit=MAX_INT_BITS,
                )
            return number
        if issubclass(type(value), float):
            if not math.isfinite(plain := float.__float__(value)):
                raise self.error(f"must be finite, got {plain}", value=plain)
            return plain
        raise self.error(f"must be a value of JSON, got {type(value).__name__}")

    def _count_value(self) -> None:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise self.error(
                f"must not bring more than {MAX_VALUES} values of tools, tool calls, content parts "
                "and template arguments into one prompt",
                value=self.num_values,
                limit=MAX_VALUES,
            )


def parsed_arguments(text: str, reader: Reader) -> dict[str, Any] | str:
    """Parse a text that is a JSON object, or the beginning of one, and copy it as `Reader.value`
    does.

    An empty text, or null, is an empty object. Any other text is returned unchanged, because a
    model may write anything. So is one of more than `MAX_JSON_CHARS`, and an object that templates
    can't be given. Raises `InvalidPromptError` for too many values. Takes time in proportion to the
    text, so parse long ones on a thread.
    """
    if not text.strip():
        return {}
    try:
        value = _read_json(text)
        if value is None:
            return {}
        if not isinstance(value, dict):
            return text
        plain = reader.value(value)
        check_texts("prompt", reader.where, plain)
    except (ValueError, RecursionError):  # `InvalidPromptError` is a ValueError
        if reader.num_values > MAX_VALUES:
            raise
        return text
    return plain


def _read_json(text: str) -> Any:
    """Parse a JSON text, or the beginning of one. Raises `ValueError` and `RecursionError`."""
    if len(text) > MAX_JSON_CHARS:
        raise ValueError(f"more than {MAX_JSON_CHARS} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if (whole := closed(text)) is None:
            raise
        return json.loads(whole)


def check_texts(argument: str, where: str, value: Any) -> None:
    """Do `check_utf8` for every str in a plain value of JSON, keys included."""
    if isinstance(value, str):
        check_utf8(argument, where, value)
    elif isinstance(value, dict):
        for key, entry in value.items():
            check_utf8(argument, f"a key of {where}", key)
            check_texts(argument, f"{where}[{key!r}]", entry)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            check_texts(argument, f"{where}[{index}]", entry)


def check_utf8(argument: str, where: str, text: str) -> None:
    """Raise `InvalidPromptError` for text that can't be encoded: half of a surrogate pair."""
    if text.isascii():
        return
    for start in range(0, len(text), _PIECE_CHARS):  # other threads run between two of them
        try:
            text[start : start + _PIECE_CHARS].encode()
        except UnicodeEncodeError as error:
            raise InvalidPromptError(
                f"{where} can't be encoded as UTF-8: {text[start + error.start]!r} at "
                f"{start + error.start}: {error.reason}",
                argument=argument,
            ) from None
