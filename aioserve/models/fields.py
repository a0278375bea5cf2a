"""Typed access to one JSON object of a model directory, with errors that name file and field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from aioserve.errors import ModelError, UnsupportedModelError
from aioserve.isolation import shown

__all__ = ["Fields", "asks_nothing"]

MOST_INTEGER = 2**31 - 1
"""Largest integer that the kernels take."""
LEAST_NUMBER, MOST_NUMBER = 1e-12, 1e15
"""Range of numbers that are read.

It contains all known epsilons of norms and bases of rotations, and keeps formulas of them within
float32."""
NO_TOKEN = -1
"""Id that some files write for a token that doesn't exist."""
_MOST_NAME_CHARS = 100


class Fields:
    """One JSON object. A null field counts as absent, as in Hugging Face configs.

    `path` prefixes names in messages, so that a field of a nested object is "outer.inner".
    """

    __slots__ = ("path", "source", "values")

    def __init__(self, values: Mapping[str, Any], source: str, path: str = "") -> None:
        self.values: Mapping[str, Any] = values
        self.source: str = source
        self.path: str = path

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def without_nothing(self, *names: str) -> Fields:
        """Return the object without fields of these names for which `asks_nothing` is true."""
        left = {
            name: value
            for name, value in self.values.items()
            if name not in names or not asks_nothing(value)
        }
        return Fields(left, self.source, self.path)

    def nested(self, name: str) -> Fields:
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            self.invalid(name, "an object")
        return Fields(value, self.source, f"{self.path}{name}.")

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST_INTEGER
    ) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.invalid(name, f"an integer in [{least}, {most}]")
        return value

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        least: float = LEAST_NUMBER,
        most: float = MOST_NUMBER,
    ) -> float:
        value = self._get(name, default)
        if not _is_number(value) or not least <= value <= most:
            self.invalid(name, f"a number in [{least:g}, {most:g}]")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.invalid(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            self.invalid(name, "a string")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        value = self._get(name, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(_is_number(item) and LEAST_NUMBER <= item <= MOST_NUMBER for item in value)
        ):
            limits = f"[{LEAST_NUMBER:g}, {MOST_NUMBER:g}]"
            self.invalid(name, f"a list of {count} numbers in {limits}")
        return tuple(float(item) for item in value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Read one id or a list of ids. Null and -1 are left out; an absent field is empty."""
        value = self.values.get(name)
        given = value if isinstance(value, list) else [value]
        items = [item for item in given if item is not None and item != NO_TOKEN]
        if not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MOST_INTEGER
            for item in items
        ):
            self.invalid(name, f"a token id in [0, {MOST_INTEGER}] or a list of token ids")
        return tuple(items)

    def invalid(self, name: str, expected: str) -> NoReturn:
        given = shown(self.values[name]) if name in self.values else "nothing"
        named = _named(name)
        raise ModelError(f"{self.source}: {self.path}{named} must be {expected}, got {given}")

    def unsupported(self, name: str, why: str) -> NoReturn:
        value = shown(self.values.get(name))
        raise UnsupportedModelError(
            f"{self.source}: {self.path}{_named(name)} = {value} is not supported: {why}"
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def asks_nothing(value: object) -> bool:
    """True if a value switches nothing on: null, false, zero or an empty text.

    A list or object that contains only values of this kind counts, too."""
    if isinstance(value, Mapping):
        return all(asks_nothing(item) for item in value.values())
    if isinstance(value, list):
        return all(asks_nothing(item) for item in value)
    return value is None or (isinstance(value, bool | int | float | str) and not value)


def _named(name: str) -> str:
    """Name of a field for messages, quoted if the file chose an unusual key."""
    is_plain = name.replace(".", "_").isidentifier() and len(name) <= _MOST_NAME_CHARS
    return name if is_plain else shown(name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
