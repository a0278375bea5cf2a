"""Ctrl-C where it can't be left to an exception, and other signals where they should be one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aioserve_main import leave_at_once_on

__all__ = ["EXIT_INTERRUPTED", "Ended", "cleaning_up_first", "leaving_at_once"]

EXIT_INTERRUPTED = 130
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal ended the command. The error goes wherever Ctrl-C does: past the guards of plugins,
    too."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.exit_code: int = 128 + signum


@contextmanager
def leaving_at_once(signum: signal.Signals = signal.SIGINT) -> Iterator[None]:
    """Ctrl-C, or another signal, ends the process on the spot: nothing can stop a thread that
    imports and loads, torch aborts where its import is interrupted, and there is nothing to clean
    up yet but the cursor. A program that ignores the signal goes on doing so."""
    before = leave_at_once_on(signum)
    try:
        yield
    finally:
        signal.signal(signum, before)


@contextmanager
def cleaning_up_first() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise `Ended`, so that what it has begun is cleaned up
    as at Ctrl-C. A program that handles or ignores one of them goes on doing so."""
    ours: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        ours = [one for one in ENDING if signal.getsignal(one) is signal.SIG_DFL]
    heard: list[int] = []

    def end(signum: int, _: object) -> None:
        heard.append(signum)
        if len(heard) == 1:
            raise Ended(signum)
        for one in ours:  # `timeout` sends two; the third ends what hangs
            signal.signal(one, signal.SIG_DFL)

    try:
        for one in ours:
            signal.signal(one, end)
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)
