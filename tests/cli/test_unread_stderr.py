"""A server answers even if nobody reads its messages."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from aioserve.cli import _log_writer
from aioserve.cli._log_writer import LogWriter
from tests.waits import LIMIT_SECONDS, block_until

BODY = {"model": "pyhelp", "prompt": "a", "max_tokens": 1}
F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", None)


@pytest.mark.skipif(F_SETPIPE_SZ is None, reason="pipes have the size that the system chooses")
def test_a_server_answers_and_ends_where_stderr_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    reading, writing = os.pipe()
    assert F_SETPIPE_SZ is not None
    fcntl.fcntl(writing, F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "aioserve", "serve", "--uds", str(path)]
    with subprocess.Popen(command, stderr=writing) as process:
        try:
            _await_listening(path, process)
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                for _ in range(60):  # 24 kB of lines
                    answer = client.post("/v1/completions", json=BODY, timeout=160)
                    assert answer.status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_SECONDS) == 0
        finally:
            process.kill()
            os.close(reading)
            os.close(writing)


def _await_listening(path: Path, process: subprocess.Popen[bytes]) -> None:
    def listens() -> bool:
        assert process.poll() is None
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) == 0

    block_until(listens)


def test_lines_beyond_the_bound_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, written = threading.Event(), []
    begun = threading.Event()

    def slowly(line: str) -> None:
        begun.set()
        assert gate.wait(LIMIT_SECONDS)
        written.append(line)

    monkeypatch.setattr(_log_writer, "_write", slowly)
    writer = LogWriter(max_lines=3)
    writer.put("first")
    assert begun.wait(LIMIT_SECONDS)
    for number in range(10):
        writer.put(str(number))
    gate.set()
    block_until(lambda: len(written) == 4)
    writer.put("after")
    writer.close()
    assert written == [
        *("first\n", "0\n", "1\n", "2\n"),
        "aioserve: 7 lines were lost, as nobody read stderr\n",
        "after\n",
    ]
