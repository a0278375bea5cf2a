"""The command line as careless shells and hostile scripts use it. Any command ends with a
documented code and at most one line, never a traceback, whatever its words and streams are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, BinaryIO

import pytest

from tests.cli.forked import Forks

SHORT = ("--num-prompts", "2", "--input-len", "4", "--output-len", "2")
VERBS = {
    "help": ("--help",),
    "version": ("--version",),
    "help of a verb": ("simulate", "--help"),
    "run": ("run", "pyhelp", "hello", "--max-tokens", "2"),
    "chat": ("chat", "--max-tokens", "2"),
    "doctor": ("doctor",),
    "plan": ("plan", "llama-3-8b"),
    "simulate": ("simulate", "--synthetic", "bursts", "--num-requests", "3"),
    "plugins": ("plugins",),
    "bench": ("bench", "throughput", "pyhelp", *SHORT),
}
IMPORT_TORCH = ("run", "chat", "doctor", "bench")
STREAMS = ("stdin", "stdout", "stderr")


def every_verb(first: int) -> pytest.MarkDecorator:
    """All verbs. Every second one is quick, from the `first` on: each meets two of four streams."""
    verbs = [
        pytest.param(words, id=name, marks=() if (i + first) % 2 == 0 else pytest.mark.slow)
        for i, (name, words) in enumerate(VERBS.items())
    ]
    return pytest.mark.parametrize("words", verbs)


def run_anew(
    words: Sequence[str | bytes], *, closed: Sequence[int] = (), **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """`aioserve` with these words, from the start of Python on; `closed` are the descriptors that
    it finds closed."""

    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if "input" not in options:
        streams["stdin"] = subprocess.PIPE
    return subprocess.run(
        [sys.executable, "-m", "aioserve", *words],
        preexec_fn=close if closed else None,
        timeout=200,
        check=False,
        **streams | options,
    )


Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def run(forking: Forks) -> Run:
    """`run_anew` for verbs that import torch, which forks have already."""

    def run(
        words: Sequence[str], *, closed: Sequence[int] = (), input: bytes = b"", **streams: IO[Any]
    ) -> subprocess.CompletedProcess[bytes]:
        if words[0] not in IMPORT_TORCH:
            given = streams if "stdin" in streams else streams | {"input": input}
            return run_anew(words, closed=closed, **given)
        return forking.run_bytes(
            words,
            given=input,
            environment=os.environ,
            seconds=200,
            streams={STREAMS.index(name): file.fileno() for name, file in streams.items()},
            closed=closed,
        )

    return run


@pytest.fixture
def nobody_reads() -> Iterator[BinaryIO]:
    """The end of a pipe whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as pipe:
        yield pipe


# -- where the streams lead


@pytest.mark.sampled(1)
@every_verb(0)
def test_closed_stdin_and_stderr_are_no_matter(run: Run, words: tuple[str, ...]) -> None:
    done = run(words, closed=(0, 2))
    assert done.returncode == 0
    assert b"Traceback" not in done.stdout
    assert b" \xc2\xb7 first token" not in done.stdout  # counts belong to stderr
    if words[0] != "chat":  # it ends as with Ctrl-D
        assert done.stdout


@pytest.mark.sampled(1)
@every_verb(1)
def test_closed_stdout_is_an_error_of_one_line(run: Run, words: tuple[str, ...]) -> None:
    done = run(words, closed=(1,))
    assert done.returncode == 1
    assert done.stderr == b"aioserve: stdout is closed\n"


@pytest.mark.more
def test_nothing_is_printed_where_everything_is_closed(run: Run) -> None:
    assert run(VERBS["plan"], closed=(0, 1, 2)).returncode == 1


@pytest.mark.sampled(1)
@every_verb(3)
def test_a_reader_that_went_away_ends_a_command_quietly(
    run: Run, words: tuple[str, ...], nobody_reads: BinaryIO
) -> None:
    done = run(words, stdout=nobody_reads, input=b"hello\n")
    assert done.returncode == 141
    if words[0] not in ("run", "chat"):  # these may have told what they counted
        assert done.stderr == b""
    assert b"Traceback" not in done.stderr


@pytest.mark.sampled(1)
@every_verb(2)
def test_a_full_disk_is_one_line(run: Run, words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = run(words, stdout=full, input=b"hello\n")
    assert done.returncode == 1
    assert done.stderr == b"aioserve: [Errno 28] No space left on device\n"


@pytest.mark.more
@pytest.mark.parametrize("words", [VERBS["run"], ("run", "pyhelp", "")], ids=["counts", "an error"])
def test_what_stderr_cannot_take_is_no_traceback(run: Run, words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = run(words, stderr=full)
    assert done.returncode == (2 if words[-1] == "" else 1)
    assert b"Traceback" not in done.stdout


@pytest.mark.more
def test_a_prompt_that_is_no_text_is_refused(run: Run) -> None:
    done = run(("run", "pyhelp", "-", "--max-tokens", "1"), input=b"caf\xe9\n")
    assert done.returncode == 2
    assert done.stderr == (
        b"aioserve: the prompt on stdin must be text in utf-8, got byte 0xe9 at offset 3\n"
    )


@pytest.mark.more
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_line_that_is_no_text_is_refused(locale: str) -> None:
    environment = os.environ | {"LC_ALL": locale}
    done = run_anew(("chat", "--max-tokens", "1"), input=b"hello\ncaf\xe9\n", env=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        b"aioserve: the line on stdin must be text in utf-8, got byte 0xe9 at offset 3"
    )


@pytest.mark.more
def test_a_prompt_without_an_end_is_refused(run: Run) -> None:
    with open("/dev/zero", "rb") as endless:
        done = run(("run", "pyhelp", "-"), stdin=endless)
        assert done.returncode == 2
        assert b"at most 16777216 characters" in done.stderr
        done = run(("chat",), stdin=endless)
        assert done.returncode == 2
        assert b"at most 1048576 bytes" in done.stderr


@pytest.mark.more
def test_words_that_are_no_text_are_an_error_of_one_line() -> None:
    done = run_anew((b"run", b"caf\xe9\n\x1b[31m", b"hello"))
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"\x1b" not in done.stderr
    assert b"caf\\udce9" in done.stderr


# -- signals


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", [VERBS["run"], VERBS["simulate"], VERBS["doctor"]])
@pytest.mark.parametrize("wait", [0.3, 1.0])
def test_an_interrupt_at_any_time_leaves_without_a_traceback(
    words: tuple[str, ...], wait: float
) -> None:
    # What comes before the command's own first line is Python's.
    code = "import aioserve.cli, sys; print('begun', file=sys.stderr, flush=True)"
    command = [sys.executable, "-c", f"{code}; aioserve.cli.main()", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline() == b"begun\n"
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    assert process.returncode in (0, 130, -signal.SIGINT)  # it may have been done, or nearly
    assert b"Traceback" not in errors


@pytest.mark.more
def test_a_request_to_terminate_ends_a_command() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "aioserve", "chat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(2)
    process.terminate()
    _, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (-signal.SIGTERM, b"")
