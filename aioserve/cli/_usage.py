"""What is said of words on the command line that no argument takes, and of arguments that have no
word."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from cyclopts import (
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from aioserve.arguments import shown

__all__ = ["explained"]


def explained(error: CycloptsError) -> str:
    """What is wrong with the words, and where that helps how the command is used."""
    if isinstance(error, UnusedCliTokensError):
        return _surplus(error)
    if isinstance(error, MissingArgumentError) and (missing := _missing_place(error)):
        return f"{missing} is missing; usage: {_usage(error)}"
    if isinstance(error, UnknownOptionError):
        return _unknown(error)
    return str(error)


def _unknown(error: UnknownOptionError) -> str:
    """The option; of what may be meant as a prompt, how it is written as one."""
    word = error.token.value or error.token.keyword or ""
    if word.partition("=")[0] == "--model" and "model" in _names(error.target):
        return f"the model comes first, without --model; usage: {_usage(error)}"
    if f"Did you mean {word}?" in str(error):
        return f"{shown(word)} is one word too many: options come before --"
    if error.command_chain == ("run",) and (not word.startswith("--") or " " in word):
        return (
            f"{error} A prompt that begins with a hyphen comes after --, as in: "
            "aioserve run MODEL -- PROMPT"
        )
    return str(error)


def _surplus(error: UnusedCliTokensError) -> str:
    """The words and how the command is used; of a command that has commands itself, which these
    are."""
    words = error.unused_tokens or []
    commands = [] if error.app is None else [name for name in error.app if name.isidentifier()]
    if commands:
        return str(UnknownCommandError(unused_tokens=words, app=error.app, verbose=False))
    many = "is one word" if len(words) == 1 else f"are {len(words)} words"
    has_places = bool(_places(error.target))
    quotes = " (what has spaces in it is written in quotes)" if has_places else ""
    return f"{' '.join(map(shown, words))} {many} too many; usage: {_usage(error)}{quotes}"


def _missing_place(error: MissingArgumentError) -> str | None:
    """The name of the argument, if it has none of an option and no word was there for it."""
    argument = error.argument
    if argument is None or argument.tokens or argument.name.startswith("-"):
        return None
    return argument.name


def _usage(error: CycloptsError) -> str:
    chain = ["aioserve", *(error.command_chain or ())]
    return " ".join([*chain, *_places(error.target), "[OPTIONS]"])


def _names(target: Callable[..., Any] | None) -> list[str]:
    return list(inspect.signature(target).parameters) if target else []


def _places(target: Callable[..., Any] | None) -> list[str]:
    """Arguments that the command takes, as `MODEL`, `[TRACE]` where it can do without, and options
    that it can't do without."""
    found: list[str] = []
    for name, one in inspect.signature(target).parameters.items() if target else ():
        if one.kind is one.POSITIONAL_ONLY:
            found.append(name.upper() if one.default is one.empty else f"[{name.upper()}]")
        elif one.default is one.empty:
            found.append(f"--{name.replace('_', '-')} {name.upper()}")
    return found
