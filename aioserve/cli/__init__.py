"""The `aioserve` command: one file per verb, loaded when its verb is used.

This module knows the verbs' names and turns errors into exit codes. It must stay cheap: help and
usage errors import no torch.

Exit codes; an error is one line on stderr:

- 0: done
- 1: the engine failed, stdout is closed or full, or a measurement or check came out badly
- 2: the command line, the prompt, the model name or the trace is wrong
- 130: interrupted (Ctrl-C)
- 141: the reader of stdout went away
- 143 and 129: ended by SIGTERM and SIGHUP, by commands that clean up first
"""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib import metadata
from typing import Any, get_args

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from aioserve.arguments import shown
from aioserve.cli._interrupts import EXIT_INTERRUPTED, Ended
from aioserve.cli._numbers import check_numbers
from aioserve.cli._streams import discard_unwritten, one_line, open_streams
from aioserve.errors import (
    AioserveError,
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    TraceError,
)
from aioserve_main import leave_at_once_on

__all__ = ["app", "explained", "main", "option_names"]

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
    "aioserve.cli.evaluate:evaluate",
    name="evaluate",
    help="Measure perplexity on a text, and divergence from another model.",
    usage="Usage: aioserve evaluate MODEL --text FILE [OPTIONS]",
    sort_key=7,
)
app.command(
    "aioserve.cli.quantize:quantize",
    name="quantize",
    help="Write a copy of a model with weights of fewer bits.",
    usage="Usage: aioserve quantize MODEL OUT --method METHOD [OPTIONS]",
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
        # Nothing is left to do but to end. An interrupt must not turn that into a traceback.
        leave_at_once_on(signal.SIGINT)
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
        if isinstance(leaving.__context__, BrokenPipeError):  # rich raised SystemExit for it
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
    """Put the prompt `-` last: `run -` reads it from stdin, but the parser takes `-` for an
    option.
    """
    if arguments[:1] == ["run"] and "-" in arguments and "--" not in arguments:
        return [argument for argument in arguments if argument != "-"] + ["--", "-"]
    return arguments


def _report(error: object, code: int) -> int:
    with suppress(OSError):  # nobody reads it
        sys.stdout.flush()
    with suppress(OSError):
        print(f"aioserve: {one_line(error)}", file=sys.stderr, flush=True)
    return code


# -- errors of unknown words and missing arguments


def explained(error: CycloptsError) -> str:
    """Return the message of a usage error, with the command's usage if that helps."""
    if isinstance(error, UnusedCliTokensError):
        return _unknown_arguments(error)
    if isinstance(error, MissingArgumentError) and (missing := _missing_place(error)):
        return f"{missing} is missing; usage: {_usage(error)}"
    if isinstance(error, UnknownOptionError):
        return _unknown_option(error)
    if isinstance(error, UnknownCommandError):
        return _unknown_command(error)
    return str(error)


def _unknown_command(error: UnknownCommandError) -> str:
    """Return the message with the unknown command, a similar one, and all commands."""
    commands = [] if error.app is None else [name for name in error.app if name.isidentifier()]
    said, mark, _ = str(error).partition("Available commands: ")
    return f"{said}{mark}{', '.join(commands)}." if mark else said


def _unknown_option(error: UnknownOptionError) -> str:
    """Return the message of an unknown option. It says how to write a prompt that looks like
    one.
    """
    word = error.token.value or error.token.keyword or ""
    if word.partition("=")[0] == "--model" and "model" in _names(error.target):
        return f"the model comes first, without --model; usage: {_usage(error)}"
    if f"Did you mean {word}?" in str(error):
        return f"{shown(word)} is one word too many: options come before --"
    from aioserve.other_engines.answers import on_command_line

    if answer := on_command_line(word.partition("=")[0], option_names(error.target)):
        return answer
    if error.command_chain == ("run",) and (not word.startswith("--") or " " in word):
        return (
            f"{error} A prompt that begins with a hyphen comes after --, as in: "
            "aioserve run MODEL -- PROMPT"
        )
    return str(error)


def _unknown_arguments(error: UnusedCliTokensError) -> str:
    """Return the message of extra words, with the usage of the command.

    If the command has commands itself, the words are an unknown one of these.
    """
    words = error.unused_tokens or []
    commands = [] if error.app is None else [name for name in error.app if name.isidentifier()]
    if commands:
        unknown = UnknownCommandError(unused_tokens=words, app=error.app, verbose=False)
        return _unknown_command(unknown)
    many = "is one word" if len(words) == 1 else f"are {len(words)} words"
    has_places = bool(_places(error.target))
    quotes = " (what has spaces in it is written in quotes)" if has_places else ""
    return f"{' '.join(map(shown, words))} {many} too many; usage: {_usage(error)}{quotes}"


def _missing_place(error: MissingArgumentError) -> str | None:
    """Return the missing argument's name, if it is positional and was given no word."""
    argument = error.argument
    if argument is None or argument.tokens or argument.name.startswith("-"):
        return None
    return argument.name


def _usage(error: CycloptsError) -> str:
    chain = ["aioserve", *(error.command_chain or ())]
    return " ".join([*chain, *_places(error.target), "[OPTIONS]"])


def _names(target: Callable[..., Any] | None) -> list[str]:
    return list(inspect.signature(target).parameters) if target else []


def option_names(target: Callable[..., Any] | None) -> set[str]:
    """Names of a command's options, those of its groups included."""
    found: set[str] = set()
    for name, one in inspect.signature(target, eval_str=True).parameters.items() if target else ():
        kinds = [kind for kind in (one.annotation, *get_args(one.annotation)) if is_dataclass(kind)]
        if kinds:
            found.update(field.name for kind in kinds for field in fields(kind))
        elif one.kind is not one.POSITIONAL_ONLY:
            found.add(name)
    return found


def _places(target: Callable[..., Any] | None) -> list[str]:
    """Return the command's positional arguments and its required options as usage shows them.

    An argument is `MODEL`, or `[TRACE]` if it is optional.
    """
    found: list[str] = []
    for name, one in inspect.signature(target).parameters.items() if target else ():
        if one.kind is one.POSITIONAL_ONLY:
            found.append(name.upper() if one.default is one.empty else f"[{name.upper()}]")
        elif one.default is one.empty:
            found.append(f"--{name.replace('_', '-')} {name.upper()}")
    return found
