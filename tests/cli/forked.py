"""The `aioserve` command in processes that have torch already: forks of one that imported it.

    python -m tests.cli.forked SOCKET [MODULE ...]

imports the modules, and forks for each connection to SOCKET, of which the first message is the
command as JSON, with its stdin, stdout and stderr. The fork runs the command and ends as it does;
the answer is the exit code. What is imported when a command begins, or how it starts, needs a
process of its own. A fork may run another module, and have directories of packages besides those of
the process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from aioserve_main import main
from tests.waits import block_until

__all__ = ["Forks", "forks"]

MOST_BYTES = 1 << 20
STREAMS = (0, 1, 2)


class Forks:
    """Asks the process that forks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def run(
        self, words: Sequence[str], *, stdin: str, environment: dict[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """One command to its end: its exit code, or the negative number of its signal."""
        with contextlib.ExitStack() as stack:
            given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in STREAMS)
            given.write(stdin.encode())
            given.seek(0)
            files = [file.fileno() for file in (given, out, err)]
            connection, child = self.begin(words, files, environment=environment)
            stack.enter_context(connection)
            connection.settimeout(seconds)
            try:
                code = int(connection.recv(64))
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(words), seconds) from None
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(
                list(words), code, out.read().decode(), err.read().decode()
            )

    def begin(
        self,
        words: Sequence[str],
        files: Sequence[int],
        *,
        environment: Mapping[str, str],
        module: str | None = None,
        sites: Iterable[Path] = (),
    ) -> tuple[socket.socket, int]:
        """Begin a command, or `python -m module` with these words, with descriptors for its stdin,
        stdout and stderr. Return where its exit code will come, and its process id.

        `sites` are directories of packages behind those that the process has.
        """
        asked = {"words": list(words), "environment": dict(environment), "folder": os.getcwd()}
        asked |= {"module": module, "sites": [os.fspath(place) for place in sites]}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(os.fspath(self._path))
        socket.send_fds(connection, [json.dumps(asked).encode()], list(files))
        return connection, int(connection.recv(64))


@contextlib.contextmanager
def forks(
    folder: Path,
    python: Path | str = sys.executable,
    imported: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Forks]:
    """Starts a process of `python` that forks, with modules that its forks have `imported`, and
    ends it. Its socket is in `folder`. None: it begins with the environment of this process."""
    path = folder / "forks"
    with subprocess.Popen(
        [python, "-m", "tests.cli.forked", str(path), *imported],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=subprocess.PIPE,  # it ends where this process does, however that comes
    ) as process:
        try:
            block_until(lambda: path.exists() or process.poll() is not None)
            assert process.poll() is None
            yield Forks(path)
        finally:
            process.kill()


def _serve(path: str, *imported: str) -> str | None:
    """Returns the module in each fork, with the command's words, streams, environment, folder and
    packages."""
    import torch  # noqa: F401

    import aioserve.cli  # noqa: F401

    for name in imported:
        importlib.import_module(name)
    early = "huggingface_hub", "transformers"
    assert not sys.modules.keys() & set(early), f"{early} read the environment when imported"
    wakes, woken = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(woken)
    handled = signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"{path}.new")
        listening.listen()
        os.rename(f"{path}.new", path)
        while True:
            ready, _, _ = select.select([listening, wakes, sys.stdin], [], [])
            if sys.stdin in ready:
                sys.exit()
            if wakes in ready:
                os.read(wakes, 4096)
                _tell_of_ends(running)
            if listening not in ready:
                continue
            connection, _ = listening.accept()
            message, files, _, _ = socket.recv_fds(connection, MOST_BYTES, len(STREAMS))
            child = os.fork()
            if child == 0:
                break
            running[child] = connection
            connection.send(b"%d" % child)
            for file in files:
                os.close(file)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, handled)
    for one in (connection, *running.values()):
        one.close()
    for file in (wakes, woken):
        os.close(file)
    for stream, file in zip(STREAMS, files, strict=True):
        os.dup2(file, stream)
        os.close(file)
    asked = json.loads(message)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv[1:] = asked["words"]
    for place in asked["sites"]:
        site.addsitedir(place)
    return asked["module"]


def _tell_of_ends(running: dict[int, socket.socket]) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        with running.pop(child) as connection, contextlib.suppress(OSError):
            connection.send(b"%d" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    if (module := _serve(*sys.argv[1:])) is None:
        main()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
