"""Ctrl-C where it can't be left to an exception."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["EXIT_INTERRUPTED", "leave_at_once", "leaving_at_once"]

EXIT_INTERRUPTED = 130


def leave_at_once(signum: int = signal.SIGINT, *_: object) -> None:
    """A signal's handler that ends the process on the spot, with the terminal's cursor shown. The
    exit code is 128 and the signal's number, as shells have it."""
    if os.isatty(2):  # not sys.stderr, which a bar has replaced
        os.write(2, b"\n\x1b[?25h")
    os._exit(128 + signum)


@contextmanager
def leaving_at_once(signum: signal.Signals = signal.SIGINT) -> Iterator[None]:
    """Ctrl-C, or another signal, ends the process on the spot: nothing can stop a thread that
    imports and loads, torch aborts where its import is interrupted, and there is nothing to clean
    up yet but the cursor."""
    before = signal.signal(signum, leave_at_once)
    try:
        yield
    finally:
        signal.signal(signum, before)
