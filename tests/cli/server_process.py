"""`aioserve serve` in its own process, on a free port of 127.0.0.1."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import IO

from tests.cli.forked import Forked, Forks
from tests.waits import LIMIT_SECONDS, block_until

__all__ = ["ServerProcess"]


class ServerProcess:
    """Context manager for a server, which has ended after the block in any case. Without `forks`, a
    new Python starts."""

    def __init__(
        self,
        *arguments: object,
        forks: Forks | None = None,
        module: str = "aioserve",
        **environment: str,
    ) -> None:
        """`module` is run with the arguments, in place of `aioserve`."""
        port = () if "--uds" in arguments else ("--port", "0")
        words = ["serve", *port, *map(str, arguments)]
        reading, writing = os.pipe()
        self._stderr: IO[str] = os.fdopen(reading)
        self._process = _begun(module, words, writing, os.environ | environment, forks)
        os.close(writing)
        self.errors = ""
        """Text on stderr so far."""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait(None)
        self._reading.join()
        self._stderr.close()

    def _read(self) -> None:
        for line in self._stderr:
            self.errors += line

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until stderr matches `pattern`, and return the match."""

        def said() -> re.Match[str] | None:
            ended = self._process.poll() is not None and not self._reading.is_alive()
            found = re.search(pattern, self.errors)
            assert found or not ended, f"{pattern!r} never came; stderr is\n{self.errors}"
            return found

        return block_until(said, told=lambda: f"{pattern!r}; stderr is\n{self.errors}")

    @property
    def url(self) -> str:
        """URL of the server. Waits until it is ready."""
        return self.expect(r"served at (\S+?);?[ \n]")[1]

    def send(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def exit_code(self) -> int:
        code = self._process.wait(LIMIT_SECONDS)
        self._reading.join()
        return code


def _begun(
    module: str, words: list[str], stderr: int, environment: dict[str, str], forks: Forks | None
) -> subprocess.Popen[bytes] | Forked:
    with open(os.devnull, "r+b") as null:
        if forks is None:
            command = [sys.executable, "-m", module, *words]
            return subprocess.Popen(command, stdout=null, stderr=stderr, env=environment)
        files = (null.fileno(), null.fileno(), stderr)
        return forks.begin(words, files, environment=environment, program=module)
