"""Writes a line for each simulated request, as CSV or JSON, to make other figures of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.simulation.csv_text import to_csv
from aioserve.simulation.metrics import e2e_seconds, queue_seconds, tpot_seconds, ttft_seconds
from aioserve.simulation.records import RequestRecord
from aioserve.simulation.whole_file import whole_file

__all__ = ["COLUMNS", "RequestFile", "check_requests_file", "is_same_file", "lines_of", "row_of"]

SUFFIXES = (".csv", ".jsonl")


def row_of(record: RequestRecord) -> dict[str, Any]:
    """Row of a request; None where there was nothing to measure."""
    request = record.request
    return {
        "request": request.number,
        "client": request.client,
        "session": request.session,
        "priority": request.priority,
        "follows": request.follows,
        "arrival_seconds": request.arrival_seconds,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "recorded_output_tokens": request.output_tokens,
        "max_tokens": request.max_tokens,
        "predicted_output_tokens": request.predicted_output_tokens,
        "ending": None if record.ending is None else record.ending.value,
        "queue_seconds": queue_seconds(record),
        "ttft_seconds": ttft_seconds(record),
        "tpot_seconds": tpot_seconds(record),
        "max_gap_seconds": record.max_gap_seconds,
        "e2e_seconds": e2e_seconds(record),
        "wait_tokens": record.wait_tokens,
    }


COLUMNS = (
    "request",
    "client",
    "session",
    "priority",
    "follows",
    "arrival_seconds",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "recorded_output_tokens",
    "max_tokens",
    "predicted_output_tokens",
    "ending",
    "queue_seconds",
    "ttft_seconds",
    "tpot_seconds",
    "max_gap_seconds",
    "e2e_seconds",
    "wait_tokens",
)
"""Columns of `row_of`."""


def check_requests_file(path: Any) -> Path:
    """`path`, where its name says what to write. Raises `ConfigError`."""
    if isinstance(path, str):
        path = Path(str.__str__(path))
    if not isinstance(path, Path) or path.suffix not in SUFFIXES:
        raise ConfigError(f"requests must be a file named *.csv or *.jsonl, got {shown(str(path))}")
    return path


def is_same_file(path: Path, other: Path) -> bool:
    """Whether both names are of one regular file, which need not be there."""
    try:
        if path.exists() and other.exists():
            return path.is_file() and path.samefile(other)
        return path.resolve() == other.resolve()
    except (OSError, RuntimeError):  # links in a circle, a name that is too long
        return False


def lines_of(
    path: Path, records: Iterable[RequestRecord], labels: Mapping[str, Any] | None = None
) -> str:
    """Lines of these requests, in the format that the path's name says. `labels` stand first in
    each: they name the run."""
    rows = ({**(labels or {}), **row_of(record)} for record in records)
    if path.suffix == ".csv":
        return to_csv(row.values() for row in rows)
    return "".join(json.dumps(row) + "\n" for row in rows)


class RequestFile:
    """File of requests that is being written, run by run. Use it as a context manager: it takes the
    place of what was there when that ends without an exception."""

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
