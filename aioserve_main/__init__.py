"""Where the `aioserve` command begins: Ctrl-C ends it at once while `aioserve.cli` is imported.

That import takes a third of a second, in which no module of `aioserve` can handle a signal yet:
Python runs `aioserve/__init__` before any of them. This package imports next to nothing, so that
the handler is there a few milliseconds after Python itself is. It knows nothing of `aioserve` but
the name of the command's `main`.
"""

from __future__ import annotations

import atexit
import os
import signal

__all__ = ["leave_at_once", "leave_at_once_on", "main"]


def main() -> None:
    """Run one command and leave with its exit code; with 130 where Ctrl-C comes before it runs."""
    before = leave_at_once_on(signal.SIGINT)
    # The first to be registered is the last to run. Behind it Python gives up its handlers, and
    # Ctrl-C would end a process by the signal that has done its work and said so.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from aioserve.cli import main as run

    try:
        signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:  # before `run` handles it, or behind
        leave_at_once()


def leave_at_once_on(signum: int) -> signal._HANDLER:
    """Have a signal end the process on the spot, unless the process ignores it, as those do that a
    script starts with `&`. The return value is the handler that was there before."""
    before = signal.getsignal(signum)
    if before is not signal.SIG_IGN:
        signal.signal(signum, leave_at_once)
    return before


def leave_at_once(signum: int = signal.SIGINT, *_: object) -> None:
    """A signal's handler that ends the process on the spot, with the terminal's cursor shown. The
    exit code is 128 and the signal's number, as shells have it."""
    if os.isatty(2):  # not sys.stderr, which a bar has replaced
        os.write(2, b"\n\x1b[?25h")
    os._exit(128 + signum)
