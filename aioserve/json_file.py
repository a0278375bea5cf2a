"""Files of a model directory, bounded before they are read: anybody may have written them.

Called from a loading thread, while an event loop runs in another one. The GIL is released again
and again, for any file.
"""

from __future__ import annotations

import json
import os
import stat
from json import scanner
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path
from typing import Any

from aioserve.errors import ModelError

__all__ = ["read_file", "read_json_list", "read_json_object"]

MAX_VALUES = 250_000
"""Most values in one file; brackets and commas within strings count too. The largest index has
92,000.
"""
_DIGITS = 1000
_PIECE_BYTES = 1 << 20


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of the regular file `path`.

    Raises `ModelError` naming the file, its size and the limit. Nothing beyond `max_bytes` is kept,
    even if the file grows meanwhile.
    """
    try:
        # A pipe without a writer would keep a plain `open` waiting.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path}: not a regular file")
            size, content = status.st_size, bytearray()
            while size <= max_bytes and (piece := os.read(file, _PIECE_BYTES)):
                content += piece
                size = max(size, len(content))
        finally:
            os.close(file)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{str(path)!r}: not a path: {error}") from error
    if size > max_bytes:
        raise ModelError(f"{path}: has {size} bytes, must have at most {max_bytes}")
    return bytes(content)


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in `path`, in UTF-8.

    The last of equal keys counts. NaN and Infinity become floats. Integers may have up to 1000
    digits. All text can be encoded as UTF-8.

    Raises `ModelError` naming the file if it is unreadable, larger than `max_bytes`, or no valid
    JSON object.
    """
    value = _read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_json_list(path: Path, max_bytes: int) -> list[Any]:
    """Return the JSON list in `path`, read as `read_json_object` reads an object."""
    value = _read_json(path, max_bytes)
    if not isinstance(value, list):
        raise ModelError(f"{path}: expected a JSON list, got {type(value).__name__}")
    return value


def _read_json(path: Path, max_bytes: int) -> Any:
    content = read_file(path, max_bytes)
    try:
        return _parsed(content.decode("utf-8"))
    except RecursionError:
        raise ModelError(f"{path}: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error


class _Decoder(json.JSONDecoder):
    """Decoder in Python, except for strings.

    The scanner in C holds the GIL from the first byte to the last: 30 ms for a large index.
    """

    def __init__(self) -> None:
        super().__init__(object_hook=_with_utf8_keys)
        self.parse_string: Any = _utf8_string
        self.scan_once: Any = scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue]


def _utf8_string(text: str, at: int, strict: bool = True) -> tuple[str, int]:
    """Decode a string, and refuse half of a surrogate pair: JSON can escape it, but it can't be
    printed.
    """
    found = scanstring(text, at, strict)
    found[0].encode()
    return found


def _with_utf8_keys(value: dict[str, Any]) -> dict[str, Any]:
    "".join(value).encode()
    return value


def _parsed(text: str) -> Any:
    pieces = range(0, len(text) - _DIGITS + 1, _DIGITS)
    if any(text[at : at + _DIGITS].isdigit() for at in pieces):
        raise ValueError(f"it has a number of more than {_DIGITS} digits")
    if (values := sum(map(text.count, "[{,"))) > MAX_VALUES:
        raise ValueError(f"it has about {values} values, must have at most {MAX_VALUES}")
    return json.loads(text, cls=_Decoder)
