"""Reads lines from a person without blocking the event loop.

Each read has a thread of its own, a daemon: nothing can wake a thread that waits for a key, and it
must not keep the program from ending. With a terminal on both sides the line can be edited
(readline); otherwise bytes are read unbuffered, because a thread inside a buffered stdin would
abort the interpreter's shutdown.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aioserve.cli._streams import decoded
from aioserve.errors import InvalidPromptError

try:
    import termios
except ImportError:  # not a POSIX system: there are no terminal settings to restore
    termios = None

__all__ = ["LinePrompt"]

MAX_LINE_BYTES = 1 << 20


class LinePrompt:
    """Lines typed by a person; as a context manager it restores the terminal's settings."""

    def __init__(self) -> None:
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._settings: list[Any] | None = None

    def __enter__(self) -> LinePrompt:
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (importing it gives input() line editing)
            if termios is not None:
                self._settings = termios.tcgetattr(sys.stdin)
        return self

    def __exit__(self, *exc_info: object) -> None:
        # A read that was abandoned by Ctrl-C leaves the terminal in readline's raw mode.
        if self._settings is not None and termios is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)

    async def read(self, prompt: str) -> str | None:
        """The next line without its end; None at the end of input (Ctrl-D).

        Raises `InvalidPromptError` for a line that is too long or no text.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[str | None] = loop.create_future()

        def deliver(line: str | None, error: BaseException | None) -> None:
            if result.done():
                return
            if error is None:
                result.set_result(line)
            else:
                result.set_exception(error)

        def work() -> None:
            line, error = None, None
            try:
                line = self._read(prompt)
            except BaseException as caught:
                error = caught
            _call_in(loop, deliver, line, error)

        threading.Thread(target=work, name="aioserve-prompt", daemon=True).start()
        try:
            return await result
        except asyncio.CancelledError:
            print(file=sys.stderr)
            raise

    def _read(self, prompt: str) -> str | None:
        if not self._interactive:
            return _read_unbuffered(sys.stdin.fileno())
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None
        except UnicodeDecodeError as error:
            return decoded(error.object, error.encoding, "line")  # raises the named error


def _read_unbuffered(descriptor: int) -> str | None:
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
        if len(line) > MAX_LINE_BYTES:
            raise InvalidPromptError(
                f"the line on stdin must have at most {MAX_LINE_BYTES} bytes, got more"
            )
    return None if not line and not byte else decoded(line, sys.stdin.encoding, "line")


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    with suppress(RuntimeError):  # the loop closed while the person was typing
        loop.call_soon_threadsafe(function, *args)
