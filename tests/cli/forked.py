"""The `aioserve` command in processes that have imported torch already: forks of one process.

    python -m tests.cli.forked SOCKET [MODULE ...]

This process imports the modules, and forks for each connection to SOCKET. The first message of a
connection is the command as JSON, with its stdin, stdout and stderr. The fork runs the command and
exits like it; the answer is the exit code. Tests of imports and of starting need a new process
instead. A fork may run another module or a script, and have more directories of packages. Its
streams may be closed, or one terminal of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import io
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
from typing import Any

from aioserve_main import main
from tests.waits import block_until

__all__ = ["Forked", "Forks", "forks"]

MOST_BYTES = 1 << 20
STREAMS = (0, 1, 2)


class Forked:
    """Forked process. Its exit code comes over `connection`."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or the negative number of its signal; None while it runs."""
        if self._code is None and select.select([self._connection], [], [], 0)[0]:
            return self.wait(None)
        return self._code

    def wait(self, seconds: float | None) -> int:
        """Wait for its end; return the same as `poll`. Raises `subprocess.TimeoutExpired`."""
        if self._code is None:
            self._connection.settimeout(seconds)
            try:
                self._code = int(self._connection.recv(64))
            except TimeoutError:
                assert seconds is not None
                raise subprocess.TimeoutExpired(str(self.pid), seconds) from None
            self._connection.close()
        return self._code

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait(None)


class Forks:
    """Client of the process that forks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def run(
        self,
        words: Sequence[str],
        *,
        stdin: str = "",
        environment: Mapping[str, str],
        seconds: float,
        program: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end. For the parameters, see `begin`."""
        done = self.run_bytes(
            words, given=stdin.encode(), environment=environment, seconds=seconds, program=program
        )
        texts = done.stdout.decode(), done.stderr.decode()
        return subprocess.CompletedProcess(done.args, done.returncode, *texts)

    def run_bytes(
        self,
        words: Sequence[str],
        *,
        given: bytes = b"",
        environment: Mapping[str, str],
        seconds: float,
        program: str | Path | None = None,
        streams: Mapping[int, int] | None = None,
        closed: Sequence[int] = (),
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one command to its end. `streams` are descriptors, in place of files for `given` and
        for the output."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in STREAMS]
            files[0].write(given)
            files[0].seek(0)
            places = dict(zip(STREAMS, (file.fileno() for file in files), strict=True))
            child = self.begin(
                words,
                list((places | dict(streams or {})).values()),
                environment=environment,
                program=program,
                closed=closed,
            )
            try:
                code = child.wait(seconds)
            except BaseException:
                child.kill()
                raise
            for file in files[1:]:
                file.seek(0)
            return subprocess.CompletedProcess(list(words), code, files[1].read(), files[2].read())

    def begin(
        self,
        words: Sequence[str],
        files: Sequence[int],
        *,
        environment: Mapping[str, str],
        program: str | Path | None = None,
        sites: Iterable[Path] = (),
        closed: Sequence[int] = (),
        terminal: bool = False,
    ) -> Forked:
        """Begin a command, or a `program` with these words, with descriptors for its stdin, stdout
        and stderr. A program is a module's name or a script's path.

        `sites` are more directories of packages. `closed` are streams that are closed in the fork.
        With `terminal`, the descriptors are one terminal, which controls the fork.
        """
        asked = {"words": list(words), "environment": dict(environment), "folder": os.getcwd()}
        asked |= {"sites": [os.fspath(place) for place in sites]}
        asked |= {"closed": list(closed), "terminal": terminal}
        is_script = isinstance(program, Path)
        asked |= {"module": None if is_script else program}
        asked |= {"script": os.fspath(program) if is_script else None}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(os.fspath(self._path))
        socket.send_fds(connection, [json.dumps(asked).encode()], list(files))
        return Forked(connection, int(connection.recv(64)))


@contextlib.contextmanager
def forks(
    folder: Path,
    python: Path | str = sys.executable,
    imported: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Forks]:
    """Start a process of `python` that forks, and end it after the block.

    The forks have `imported` these modules. The socket is in `folder`. The process has this
    process's environment by default.
    """
    path = folder / "forks"
    with subprocess.Popen(
        [python, "-m", "tests.cli.forked", str(path), *imported],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=subprocess.PIPE,  # it ends when this process does, for any reason
    ) as process:
        try:
            block_until(lambda: path.exists() or process.poll() is not None)
            assert process.poll() is None
            yield Forks(path)
        finally:
            process.kill()


def _serve(path: str, *imported: str) -> dict[str, Any]:
    """Return in each fork, with the request. The fork then has the command's words, streams,
    environment, folder and packages."""
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
    _set_up_streams(asked["closed"], asked["terminal"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv[1:] = asked["words"]
    for place in asked["sites"]:
        site.addsitedir(place)
    return asked


def _set_up_streams(closed: Sequence[int], terminal: bool) -> None:
    """Set up the streams like Python does when it starts."""
    if terminal:
        os.login_tty(os.dup(0))
    for descriptor in closed:
        os.close(descriptor)
    for descriptor, name in zip(STREAMS, ("stdin", "stdout", "stderr"), strict=True):
        stream = None if descriptor in closed else _like(getattr(sys, name), descriptor)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _like(stream: io.TextIOWrapper, descriptor: int) -> io.TextIOWrapper:
    """Text stream like `stream`, for a descriptor that may lead elsewhere by now."""
    return io.TextIOWrapper(
        open(descriptor, "rb" if descriptor == 0 else "wb", closefd=False),
        encoding=stream.encoding,
        errors=stream.errors,
        newline=None if descriptor == 0 else "\n",
        line_buffering=descriptor == 2 or os.isatty(descriptor),
        write_through=stream.write_through,
    )


def _tell_of_ends(running: dict[int, socket.socket]) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        with running.pop(child) as connection, contextlib.suppress(OSError):
            connection.send(b"%d" % os.waitstatus_to_exitcode(status))


def _run(asked: dict[str, Any]) -> None:
    if (script := asked["script"]) is not None:
        sys.path[0] = str(Path(script).parent)
        sys.argv[0] = script
        runpy.run_path(script, run_name="__main__")
    elif (module := asked["module"]) is not None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        main()


if __name__ == "__main__":
    _run(_serve(*sys.argv[1:]))
