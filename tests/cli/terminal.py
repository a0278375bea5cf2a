"""Command under its own pseudo-terminal, so that Ctrl-C is a real one."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time

from tests.cli.forked import Forks
from tests.waits import LIMIT_SECONDS

CTRL_C = "\x03"
CTRL_D = "\x04"


class Terminal:
    """Context manager for `aioserve` with stdin, stdout and stderr on one terminal.

    `module` is run with the arguments, in place of `aioserve`. Without `forks`, a new Python
    starts.
    """

    def __init__(
        self,
        *arguments: str,
        forks: Forks | None = None,
        module: str = "aioserve",
        term: str = "dumb",
        timeout_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._deadline = time.monotonic() + timeout_seconds
        self._master, slave = pty.openpty()
        environment = os.environ | {"TERM": term, "COLUMNS": "200"}
        if forks is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                # A session with this terminal: the kernel turns Ctrl-C into SIGINT.
                preexec_fn=lambda: os.login_tty(slave),
                close_fds=True,
                env=environment,
            )
        else:
            self._process = forks.begin(
                arguments,
                (slave, slave, slave),
                environment=environment,
                program=module,
                terminal=True,
            )
        os.close(slave)
        self.seen = ""
        self._searched = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait(None)
        os.close(self._master)

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str) -> str:
        """Wait for a match of `pattern` after the last one, and return its text."""
        while True:
            found = re.compile(pattern).search(self.seen, self._searched)
            if found:
                self._searched = found.end()
                return found.group()
            if not self._read():
                raise AssertionError(f"{pattern!r} never came; the terminal shows\n{self.seen}")

    def exit_code(self) -> int:
        """Wait for the command to end."""
        while self._read():
            pass
        return self._process.wait(max(0.1, self._deadline - time.monotonic()))

    def _read(self) -> bool:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0 or not select.select([self._master], [], [], remaining)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: every process has closed the other side
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)
