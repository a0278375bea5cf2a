"""`aioserve serve` in a process of its own, on a free port of 127.0.0.1."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType

__all__ = ["ServerProcess"]


class ServerProcess:
    """Use as a context manager: it has ended behind it, whatever happens."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        port = () if "--uds" in arguments else ("--port", "0")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aioserve", "serve", *port, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.errors = ""
        """What stderr said so far."""
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
        self._process.wait()
        self._reading.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.errors += line

    def expect(self, pattern: str, seconds: float = 45) -> re.Match[str]:
        """Until stderr has said that."""
        until = time.monotonic() + seconds
        while True:
            ended = self._process.poll() is not None and not self._reading.is_alive()
            if (found := re.search(pattern, self.errors)) is not None:
                return found
            if ended or time.monotonic() > until:
                raise AssertionError(f"{pattern!r} never came; stderr is\n{self.errors}")
            time.sleep(0.01)

    @property
    def url(self) -> str:
        """Once it is ready."""
        return self.expect(r"served at (\S+?);?[ \n]")[1]

    def send(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def exit_code(self, seconds: float = 30) -> int:
        code = self._process.wait(seconds)
        self._reading.join()
        return code
