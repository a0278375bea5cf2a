"""The `aioserve` command: one file per verb, loaded when its verb is used.

This module knows the verbs' names and turns errors into exit codes. It must stay cheap: help and
usage errors import no torch.

Exit codes: 0 done; 1 the engine failed, stdout is closed or full, or what was measured or checked
came out badly; 2 the command line, the prompt, the model name or the trace is wrong; 130
interrupted (Ctrl-C); 141 the reader of stdout went away; 143 and 129 ended by SIGTERM and SIGHUP,
where something is cleaned up first. An error is one line on stderr.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from importlib import metadata

from cyclopts import App, CycloptsError

from aioserve.cli._interrupts import EXIT_INTERRUPTED, Ended, leave_at_once
from aioserve.cli._numbers import check_numbers
from aioserve.cli._streams import discard_unwritten, one_line, open_streams
from aioserve.cli._usage import explained
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
    config=check_numbers,
)
app.command(
    "aioserve.cli.run:run",
    name="run",
    help="Stream one completion to stdout; without a prompt, talk to the model in turns.",
    usage="Usage: aioserve run MODEL [PROMPT] [OPTIONS]",
    sort_key=1,
)
app.command(
    "aioserve.cli.chat:chat",
    name="chat",
    help="Talk to a model in turns.",
    usage="Usage: aioserve chat [MODEL] [OPTIONS]",
    sort_key=2,
)
app.command("aioserve.cli.bench:app", name="bench", help="Measure the engine.", sort_key=3)
app.command(
    "aioserve.cli.doctor:doctor",
    name="doctor",
    help="Show what was found.",
    usage="Usage: aioserve doctor [MODEL] [OPTIONS]",
    sort_key=4,
)
app.command(
    "aioserve.cli.plan:plan",
    name="plan",
    help="Show how many requests fit.",
    usage="Usage: aioserve plan MODEL [OPTIONS]",
    sort_key=5,
)
app.command(
    "aioserve.cli.simulate:simulate", name="simulate", help="Try policies on a trace.", sort_key=6
)
app.command(
    "aioserve.cli.sweep:sweep", name="sweep", help="Try policies at many rates.", sort_key=6
)
app.command(
    "aioserve.cli.calibrate:calibrate",
    name="calibrate",
    help="Measure what steps take here.",
    usage="Usage: aioserve calibrate [MODEL] --output FILE [OPTIONS]",
    sort_key=7,
)
app.command(
    "aioserve.cli.plugins:app", name="plugins", help="List, check and begin plugins.", sort_key=8
)
app.command(
    "aioserve.cli.serve:serve",
    name="serve",
    help="""Serve a model over HTTP.

    Each setting is also an environment variable (--page-size is AIOSERVE_PAGE_SIZE) and a key of
    the TOML file (page_size in its table [engine]). A flag goes before a variable, and that before
    the file. SIGTERM and Ctrl-C let the answers that have begun end; the second one ends at once.
    """,
    usage="Usage: aioserve serve [MODEL] [OPTIONS]",
    sort_key=3,
)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and leave with its exit code."""
    if open_streams():
        code = _run(sys.argv[1:] if arguments is None else arguments)
    else:
        code = _report("stdout is closed", EXIT_FAILED)
    if arguments is None:
        # Nothing is left to do but to end, which an interrupt must not turn into a traceback.
        signal.signal(signal.SIGINT, leave_at_once)
    discard_unwritten()
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    try:
        app(_stdin_prompt_last(arguments), print_error=False, exit_on_error=False)
        sys.stdout.flush()
    except Ended as ended:
        return ended.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # rich found it
            return EXIT_BROKEN_PIPE
        raise
    except CycloptsError as error:
        return _report(explained(error), EXIT_USAGE)
    except (
        InvalidRequestError,
        ConfigError,
        ModelNotFoundError,
        TraceError,
    ) as error:
        return _report(error, EXIT_USAGE)
    except (AioserveError, OSError) as error:  # OSError: a file, a full disk
        return _report(error, EXIT_FAILED)
    return 0


def _stdin_prompt_last(arguments: list[str]) -> list[str]:
    """`run -` means "the prompt is on stdin", but the parser takes a lone hyphen for an option."""
    if arguments[:1] == ["run"] and "-" in arguments and "--" not in arguments:
        return [argument for argument in arguments if argument != "-"] + ["--", "-"]
    return arguments


def _report(error: object, code: int) -> int:
    with suppress(OSError):  # nobody to tell
        sys.stdout.flush()
    with suppress(OSError):
        print(f"aioserve: {one_line(error)}", file=sys.stderr, flush=True)
    return code
