"""Lines of text files that others wrote, plain or `.gz`: of whole files alone, and within bounds
that are checked before anything of that size is held in memory."""

from __future__ import annotations

import gzip
import itertools
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from aioserve.errors import TraceError
from aioserve.isolation import shown

__all__ = ["MAX_FILE_BYTES", "MAX_LINES", "MAX_LINE_BYTES", "Lines", "open_file", "short"]

MAX_FILE_BYTES = 1 << 30
"""Unpacked."""
MAX_LINE_BYTES = 64 << 20
MAX_LINES = 1 << 22
MAX_SHOWN_CHARS = 500


def short(text: object) -> str:
    """Text of an error or a path: the beginning, where it is long."""
    whole = str(text)
    return whole if len(whole) <= MAX_SHOWN_CHARS else f"{whole[:MAX_SHOWN_CHARS]}..."


def open_file(path: Any) -> BinaryIO:
    """A regular file, for reading. Raises `TraceError` for anything else: what is read from a pipe
    or a device may never come, or never end."""
    if isinstance(path, str):
        path = Path(str.__str__(path))
    elif not isinstance(path, Path):
        raise TraceError(f"a trace must be a path, got {shown(path)}")
    try:
        # A pipe without a writer is opened at once, and refused.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise TraceError(f"{short(path)}: {error.strerror}") from error
    except ValueError as error:  # a character that no path has
        raise TraceError(f"{shown(str(path))}: {error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise TraceError(f"{short(path)}: not a regular file; a trace must be one")
    return file


class Lines:
    """The texts of the lines of a file, with their ends but without a byte order mark.

    It is opened once. To go on to the next line raises `TraceError` for a file that can't be read,
    a line of over `MAX_LINE_BYTES`, more than `MAX_LINES` lines, or over `MAX_FILE_BYTES` in all.
    """

    def __init__(self, path: Any) -> None:
        self.place: str = f"{short(path)}:1"
        """`file:line` of the one given last."""
        self._lines: Iterator[tuple[str, str]] = _lines_of(path)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.place, line = next(self._lines)
        return line

    def first(self) -> str:
        """The first line that isn't blank, without blanks around it. It is given once more."""
        for line in self:
            if line.strip():
                self._lines = itertools.chain([(self.place, line)], self._lines)
                return line.strip()
        return ""


def _lines_of(path: Any) -> Iterator[tuple[str, str]]:
    """`file:line` and the text of every line."""
    number = total = 0
    name = short(path)
    try:
        with open_file(path) as file, _unpacked(file, path) as lines:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                total += len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"{name}:{number}: a line of over {MAX_LINE_BYTES:,} bytes")
                if number > MAX_LINES:
                    raise TraceError(f"{name}: a file of over {MAX_LINES:,} lines")
                if total > MAX_FILE_BYTES:
                    raise TraceError(f"{name}:{number}: a file of over {MAX_FILE_BYTES:,} bytes")
                yield f"{name}:{number}", line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}:{number}: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{name}: not a whole gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"{name}: {error.strerror}") from error


def _unpacked(file: BinaryIO, path: Any) -> BinaryIO | gzip.GzipFile:
    return gzip.GzipFile(fileobj=file) if str(path).endswith(".gz") else file
