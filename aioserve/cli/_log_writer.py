"""Writer of a server's lines to stderr, on a thread of its own.

The reader of stderr may be slow or stuck, and the event loop must not wait for it. Lines beyond a
bound are dropped, and their number is reported.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from contextlib import suppress

__all__ = ["LineHandler", "LogWriter"]

MAX_LINES = 4096
"""Most lines that wait to be written."""
CLOSE_SECONDS = 1.0
"""Time that the end of a server waits for the last lines to be written, in seconds."""


class LogWriter:
    """Queue of lines for stderr. `put` may be called by any thread, and never waits."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._num_lost = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write_on, name="aioserve-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Write a line soon. It is dropped if too many wait."""
        with self._lock:
            lost = f"aioserve: {self._num_lost} lines were lost, as nobody read stderr\n"
            try:
                if self._num_lost:
                    self._lines.put_nowait(lost)
                    self._num_lost = 0
                self._lines.put_nowait(f"{line}\n")
            except queue.Full:
                self._num_lost += 1

    def close(self) -> None:
        """Wait a while for the last lines to be written."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)

    def _write_on(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError, ValueError):  # a server goes on when nobody reads its output
                _write(line)


def _write(line: str) -> None:
    """Write past Python's buffer: a write that waits would keep its lock, which the exit needs."""
    stream = sys.stderr
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a program that calls `main` put it there
        stream.write(line)
        return
    data = line.encode(stream.encoding or "utf-8", "backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]


class LineHandler(logging.Handler):
    """Passes log records to a writer as lines."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record))
        except Exception:
            self.handleError(record)
