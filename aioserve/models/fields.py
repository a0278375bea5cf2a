"""Typed access to one JSON object of a model directory, with errors that name file and field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from aioserve.errors import ModelError, UnsupportedModelError

__all__ = ["Fields", "read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


class Fields:
    """One JSON object. A field that is null counts as absent, as in Hugging Face configs.

    `path` prefixes the names in messages: fields of a nested object read as "outer.inner".
    """

    __slots__ = ("path", "source", "values")

    def __init__(self, values: Mapping[str, Any], source: str, path: str = "") -> None:
        self.values: Mapping[str, Any] = values
        self.source: str = source
        self.path: str = path

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def nested(self, name: str) -> Fields:
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            self.invalid(name, "an object")
        return Fields(value, self.source, f"{self.path}{name}.")

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.invalid(name, f"an integer of at least {least}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > above:
            self.invalid(name, f"a number above {above:g}")
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

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(
            isinstance(item, int | float) and not isinstance(item, bool) for item in value
        ):
            self.invalid(name, "a list of numbers")
        return tuple(float(item) for item in value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids; absent: none."""
        value = self.values.get(name)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in items):
            self.invalid(name, "a token id or a list of token ids")
        return tuple(items)

    def invalid(self, name: str, expected: str) -> NoReturn:
        given = repr(self.values[name]) if name in self.values else "nothing"
        raise ModelError(f"{self.source}: {self.path}{name} must be {expected}, got {given}")

    def unsupported(self, name: str, why: str) -> NoReturn:
        value = self.values.get(name)
        raise UnsupportedModelError(
            f"{self.source}: {self.path}{name} = {value!r} is not supported: {why}"
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value
