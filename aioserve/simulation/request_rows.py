"""A line for each simulated request, as CSV or JSON, for other figures.

A file replaces another one only when it is complete: it is written beside it under a temporary
name, and renamed at the end. So a run that fails or is interrupted leaves the old file. A pipe or a
device is written to at once.

Spreadsheets take a cell that begins with one of `=+-@` for a formula. Names come from the maker of
the trace, so such names get an apostrophe in front, which spreadsheets don't show.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, Literal, TextIO

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.simulation.metrics import (
    e2e_seconds,
    met_targets,
    queue_seconds,
    tpot_seconds,
    ttft_seconds,
)
from aioserve.simulation.records import RequestRecord

__all__ = [
    "COLUMNS",
    "RequestFile",
    "check_requests_file",
    "is_same_file",
    "lines_of",
    "row_of",
    "to_csv",
    "whole_file",
]

SUFFIXES = (".csv", ".jsonl")
NUMBER = re.compile(r"[+-]?[0-9][0-9.,]*%?")
MOST_NAME_CHARS = 40
"""Most characters that the temporary file's name takes from the name: names have at most 255
bytes.
"""
COLUMNS: dict[str, Callable[[RequestRecord], Any]] = {
    "request": lambda record: record.request.number,
    "tenant": lambda record: record.request.tenant,
    "class": lambda record: record.request.request_class,
    "session": lambda record: record.request.session,
    "priority": lambda record: record.request.priority,
    "follows": lambda record: record.request.follows,
    "arrival_seconds": lambda record: record.request.arrival_seconds,
    "prompt_tokens": lambda record: record.request.prompt_tokens,
    "cached_tokens": lambda record: record.cached_tokens,
    "output_tokens": lambda record: record.output_tokens,
    "recorded_output_tokens": lambda record: record.request.output_tokens,
    "max_tokens": lambda record: record.request.max_tokens,
    "predicted_output_tokens": lambda record: record.request.predicted_output_tokens,
    "ttft_target_seconds": lambda record: record.request.ttft_target_seconds,
    "tpot_target_seconds": lambda record: record.request.tpot_target_seconds,
    "deadline_seconds": lambda record: record.request.deadline_seconds,
    "ending": lambda record: None if record.ending is None else record.ending.value,
    "queue_seconds": queue_seconds,
    "ttft_seconds": ttft_seconds,
    "tpot_seconds": tpot_seconds,
    "max_gap_seconds": lambda record: record.max_gap_seconds,
    "e2e_seconds": e2e_seconds,
    "wait_tokens": lambda record: record.wait_tokens,
    "met_targets": lambda record: met_targets(record) if record.request.has_target else None,
}
"""Columns of a request's row; None if there was nothing to measure."""


def row_of(record: RequestRecord) -> dict[str, Any]:
    return {name: value(record) for name, value in COLUMNS.items()}


def check_requests_file(path: Any) -> Path:
    """Return `path` if its name says what format to write. Raises `ConfigError` otherwise."""
    if isinstance(path, str):
        path = Path(str.__str__(path))
    if not isinstance(path, Path) or path.suffix not in SUFFIXES:
        raise ConfigError(f"requests must be a file named *.csv or *.jsonl, got {shown(str(path))}")
    return path


def is_same_file(path: Path, other: Path) -> bool:
    """True if both names are of one regular file, which need not be there."""
    try:
        if path.exists() and other.exists():
            return path.is_file() and path.samefile(other)
        return path.resolve() == other.resolve()
    except (OSError, RuntimeError):  # links in a circle, a name that is too long
        return False


def lines_of(
    path: Path, records: Iterable[RequestRecord], labels: Mapping[str, Any] | None = None
) -> str:
    """Return lines of these requests, in the format of the path's name.

    Each begins with `labels`, which name the run.
    """
    rows = ({**(labels or {}), **row_of(record)} for record in records)
    if path.suffix == ".csv":
        return to_csv(row.values() for row in rows)
    return "".join(json.dumps(row) + "\n" for row in rows)


class RequestFile:
    """File of requests that is written run by run; a context manager.

    It replaces the existing file when the context ends without an exception.
    """

    def __init__(self, path: str | Path, labels: Iterable[str] = ()) -> None:
        self.path: Path = check_requests_file(path)
        self._labels = tuple(labels)
        self._file: TextIO | None = None
        self._whole = ExitStack()

    def __enter__(self) -> RequestFile:
        self._file = self._whole.enter_context(whole_file("requests", self.path))
        if self.path.suffix == ".csv":
            self._file.write(",".join((*self._labels, *COLUMNS)) + "\n")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file = None
        self._whole.__exit__(kind, error, trace)

    def add(self, records: Iterable[RequestRecord], labels: Mapping[str, Any]) -> None:
        """Write the requests of one run, with the labels of that run."""
        self.write(lines_of(self.path, records, labels))

    def write(self, lines: str) -> None:
        """Write lines that `lines_of` made."""
        if self._file is None:
            raise ValueError(f"{self.path} isn't open")
        self._file.write(lines)


@contextmanager
def whole_file(option: str, path: Path) -> Iterator[TextIO]:
    """Open a text file for writing, which is at `path` once the block ends without an exception.

    Raises `ConfigError` if it can't be written; `option` names the option that asked for it.
    """
    place = Path(os.path.realpath(path))  # a link stays one
    beside = place.with_name(f"{place.name[:MOST_NAME_CHARS]}.{token_hex(4)}.part")
    try:
        # Ask the given path: the target of a link to an open pipe has no name.
        is_replaced = path.is_file() or not path.exists()
        file = _begun(place, beside) if is_replaced else _opened(path)
    except OSError as error:
        raise ConfigError(f"{option}: {path} can't be written: {error.strerror}") from error
    if not is_replaced:
        with file:
            yield file
        return
    try:
        with file:
            yield file
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    try:
        beside.replace(place)
    except OSError as error:  # everything that was written is kept
        raise ConfigError(
            f"{option}: {path} can't be replaced: {error.strerror}; what it would have is in "
            f"{beside}"
        ) from error


def _begun(place: Path, beside: Path) -> TextIO:
    """Open a file beside `place`, with the permissions of the file that it will replace.

    That file must be writable.
    """
    mode = None
    if place.exists():
        place.open("ab").close()
        mode = place.stat().st_mode & 0o777
    file = _opened(beside, "x")
    if mode is not None:
        beside.chmod(mode)
    return file


def _opened(path: Path, mode: Literal["w", "x"] = "w") -> TextIO:
    return path.open(mode, encoding="utf-8", errors="surrogateescape", newline="")


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Write rows as in RFC 4180, with line ends of one character. None is an empty cell."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([_cell(v) for v in row] for row in rows)
    return written.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    is_formula = value[:1] in ("=", "+", "-", "@", "\t", "\r") and not NUMBER.fullmatch(value)
    return f"'{value}" if is_formula and value != "-" else value
