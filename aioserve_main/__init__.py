"""Entry point of the `aioserve` command: Ctrl-C ends it at once while `aioserve.cli` is imported.

That import takes a third of a second. No module of `aioserve` can handle a signal meanwhile: Python
runs `aioserve/__init__` before any of them. This package imports next to nothing, so its handler is
there a few milliseconds after Python itself. It knows nothing of `aioserve` but the name of the
command's `main`.
"""

from __future__ import annotations

import atexit
import os
import signal

__all__ = ["leave_at_once", "leave_at_once_on", "main"]


def main() -> None:
    """Run one command and leave with its exit code, or with 130 if Ctrl-C comes before it runs."""
    before = leave_at_once_on(signal.SIGINT)
    # The handler that is registered first runs last. Python then restores the signals' defaults,
    # and Ctrl-C would kill a process that has already done its work and reported it.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from aioserve.cli import main as run

    try:
        signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:  # before `run` handles it, or afterwards
        leave_at_once()


def leave_at_once_on(signum: int) -> signal._HANDLER:
    """Let a signal end the process at once, and return the previous handler.

    A signal that the process ignores stays ignored: scripts start processes that way with `&`.
    """
    before = signal.getsignal(signum)
    if before is not signal.SIG_IGN:
        signal.signal(signum, leave_at_once)
    return before


def leave_at_once(signum: int = signal.SIGINT, *_: object) -> None:
    """Signal handler that ends the process at once and shows the terminal's cursor.

    The exit code is 128 plus the signal's number, as in shells.
    """
    if os.isatty(2):  # not sys.stderr, which a bar has replaced
        os.write(2, b"\n\x1b[?25h")
    os._exit(128 + signum)
