"""Ctrl-C in places where it can't be an exception, and other signals in places where they should be
one.
"""

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
    """A signal ended the command. Like Ctrl-C, this error passes the guards of plugins."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.exit_code: int = 128 + signum


@contextmanager
def leaving_at_once(signum: signal.Signals = signal.SIGINT) -> Iterator[None]:
    """End the process at once at Ctrl-C or another signal, during the block.

    A thread that imports and loads can't be stopped, and torch aborts if its import is interrupted.
    Only the cursor has to be restored. A signal that the program ignores stays ignored.
    """
    before = leave_at_once_on(signum)
    try:
        yield
    finally:
        signal.signal(signum, before)


@contextmanager
def cleaning_up_first() -> Iterator[None]:
    """Raise `Ended` at SIGTERM and SIGHUP during the block, so that it is cleaned up as at Ctrl-C.

    A signal that the program handles or ignores is left alone.
    """
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
