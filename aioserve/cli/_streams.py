"""The three standard streams, in any state that a shell or another program leaves them in.

They may be closed, full, without a reader, or hold bytes that are no text.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioserve.cli._printable import printable
from aioserve.errors import ConfigError, InvalidPromptError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "answer_text",
    "check_output",
    "decoded",
    "discard_unwritten",
    "json_text",
    "one_line",
    "open_streams",
    "read_prompt",
    "table_console",
]

MAX_PROMPT_CHARS = 1 << 24
WIDTH_OF_FILES = 10_000
MAX_LINE_CHARS = 2000
"""Most characters of an error's line."""


def open_streams() -> bool:
    """Open missing standard streams on the null device; return True if stdout was there.

    Otherwise a file that the process opens would take their descriptors.
    """
    there = sys.stdout is not None
    # In this order: each takes the lowest descriptor that is free.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for good)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that can't show a character must not end the answer with a traceback.
            stream.reconfigure(errors="replace")
    return there


def discard_unwritten() -> None:
    """Flush, and discard what can't be written: Python flushes again on exit and must not fail
    then.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def read_prompt() -> str:
    """Return all of stdin. Raises `InvalidPromptError` if it is too long or no text."""
    if not isinstance(sys.stdin, io.TextIOWrapper):
        return sys.stdin.read()  # a program that calls `main` put it there
    encoding = sys.stdin.encoding
    # A character has at most four bytes in every encoding that a locale has.
    data = sys.stdin.buffer.read(4 * MAX_PROMPT_CHARS + 1)
    text = "" if len(data) > 4 * MAX_PROMPT_CHARS else decoded(data, encoding, "prompt")
    if len(data) > 4 * MAX_PROMPT_CHARS or len(text) > MAX_PROMPT_CHARS:
        raise InvalidPromptError(
            f"the prompt on stdin must have at most {MAX_PROMPT_CHARS} characters, got more"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as Python reads text


def decoded(data: bytes | bytearray, encoding: str, what: str) -> str:
    """Decode what was read. Raises `InvalidPromptError` if it is no text."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidPromptError(
            f"the {what} on stdin must be text in {encoding}, "
            f"got byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from error


def check_output(option: str, path: Path) -> None:
    """Raise `ConfigError` for a file that can't be written, before minutes of work for it.

    An existing file is left as it is.
    """
    try:
        if path.is_fifo():  # opening it waits for a reader
            return
        was_there = path.exists()
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: {path} can't be written: {error.strerror}") from error


def json_text(value: object, indent: int = 2) -> str:
    """Return JSON of dicts, lists and structs, in ASCII: file names need not be text.

    Infinite numbers, which JSON lacks, become null.
    """
    import msgspec

    return json.dumps(_finite(msgspec.to_builtins(value)), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table_console() -> Console:
    """Return a console on stdout for tables.

    A file has room for all columns. A narrow terminal shows all digits, on more lines.
    """
    from aioserve.cli._console import plain_console

    width = None if sys.stdout.isatty() else WIDTH_OF_FILES
    return plain_console(width=width, highlight=False)


def one_line(error: object) -> str:
    """Return an error's message in one line that a terminal can show."""
    text = str(error)
    if len(text) > MAX_LINE_CHARS:
        text = f"{text[: MAX_LINE_CHARS // 2]} ... {text[-MAX_LINE_CHARS // 2 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def answer_text(text: str) -> str:
    """Return a piece of an answer for stdout: unchanged for a file, `printable` for a terminal."""
    return printable(text) if sys.stdout.isatty() else text
