"""The `aioserve` command: one file per verb, loaded when its verb is used.

This module knows the verbs' names and turns errors into exit codes. It must stay cheap: help and
usage errors import no torch.

Exit codes: 0 done; 1 the engine failed; 2 the command line, the prompt, the model name or the trace
is wrong; 130 interrupted (Ctrl-C); 141 the reader of stdout went away.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import metadata

from cyclopts import App

from aioserve.cli._engine import EXIT_INTERRUPTED
from aioserve.errors import (
    AioserveError,
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    TraceError,
)

__all__ = ["app", "main"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141

app: App = App(
    name="aioserve",
    help="LLM serving inside an asyncio program.",
    version=lambda: f"aioserve {metadata.version('aioserve')}",
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
app.command("aioserve.cli.run:run", name="run", help="Stream one answer to stdout.", sort_key=1)
app.command("aioserve.cli.chat:chat", name="chat", help="Talk to a model in turns.", sort_key=2)
app.command("aioserve.cli.bench:app", name="bench", help="Measure the engine.", sort_key=3)
app.command("aioserve.cli.doctor:doctor", name="doctor", help="Show what was found.", sort_key=4)
app.command("aioserve.cli.plan:plan", name="plan", help="Show how many requests fit.", sort_key=5)
app.command(
    "aioserve.cli.simulate:simulate", name="simulate", help="Try policies on a trace.", sort_key=6
)
app.command(
    "aioserve.cli.calibrate:calibrate",
    name="calibrate",
    help="Measure what steps take here.",
    sort_key=7,
)
app.command(
    "aioserve.cli.plugins:app", name="plugins", help="List, check and begin plugins.", sort_key=8
)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and leave with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that can't show a character must not end the answer with a traceback.
            stream.reconfigure(errors="replace")
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        app(_stdin_prompt_last(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _give_up_stdout()
        return EXIT_BROKEN_PIPE
    except (InvalidRequestError, ConfigError, ModelNotFoundError, TraceError) as error:
        return _report(error, EXIT_USAGE)
    except AioserveError as error:
        return _report(error, EXIT_FAILED)
    except OSError as error:  # a file that can't be read or written, a full disk
        _give_up_stdout()
        return _report(error, EXIT_FAILED)
    return 0


def _give_up_stdout() -> None:
    """Python flushes stdout once more on exit; what failed once must not fail a second time."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stdin_prompt_last(arguments: list[str]) -> list[str]:
    """`run -` means "the prompt is on stdin", but the parser takes a lone hyphen for an option."""
    if arguments[:1] == ["run"] and "-" in arguments and "--" not in arguments:
        return [argument for argument in arguments if argument != "-"] + ["--", "-"]
    return arguments


def _report(error: Exception, code: int) -> int:
    print(f"aioserve: {error}", file=sys.stderr)
    return code
