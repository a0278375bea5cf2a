"""`aioserve serve` in a process of its own, on a free port of 127.0.0.1."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from types import TracebackType

from tests.waits import LIMIT_SECONDS, block_until

__all__ = ["ServerProcess"]


class ServerProcess:
    """Use as a context manager: it has ended behind it, whatever happens."""

    def __init__(self, *arguments: object, module: str = "aioserve", **environment: str) -> None:
        """`module`: another one that is run with the arguments in its place."""
        port = () if "--uds" in arguments else ("--port", "0")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", *port, *map(str, arguments)],
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

    def expect(self, pattern: str) -> re.Match[str]:
        """Until stderr has said that."""

        def said() -> re.Match[str] | None:
            ended = self._process.poll() is not None and not self._reading.is_alive()
            found = re.search(pattern, self.errors)
            assert found or not ended, f"{pattern!r} never came; stderr is\n{self.errors}"
            return found

        return block_until(said, told=lambda: f"{pattern!r}; stderr is\n{self.errors}")

    @property
    def url(self) -> str:
        """Once it is ready."""
        return self.expect(r"served at (\S+?);?[ \n]")[1]

    def send(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def exit_code(self) -> int:
        code = self._process.wait(LIMIT_SECONDS)
        self._reading.join()
        return code
