"""What is said of words on the command line that no argument takes."""

from __future__ import annotations

import inspect

from cyclopts import UnknownCommandError, UnusedCliTokensError

from aioserve.arguments import shown

__all__ = ["surplus"]


def surplus(error: UnusedCliTokensError) -> str:
    """The words and how the command is used; of a command that has commands itself, which these
    are."""
    words = error.unused_tokens or []
    chain = " ".join(["aioserve", *(error.command_chain or ())])
    commands = [] if error.app is None else [name for name in error.app if name.isidentifier()]
    if commands:
        return str(UnknownCommandError(unused_tokens=words, app=error.app, verbose=False))
    places = _places(error)
    usage = " ".join([chain, *places, "[OPTIONS]"])
    many = "is one word" if len(words) == 1 else f"are {len(words)} words"
    quotes = " (what has spaces in it is written in quotes)" if places else ""
    return f"{' '.join(map(shown, words))} {many} too many; usage: {usage}{quotes}"


def _places(error: UnusedCliTokensError) -> list[str]:
    """Of what the command takes, as `MODEL`, `[TRACE]` where it can do without, and options that it
    can't do without."""
    found: list[str] = []
    for name, one in inspect.signature(error.target).parameters.items() if error.target else ():
        if one.kind is one.POSITIONAL_ONLY:
            found.append(name.upper() if one.default is one.empty else f"[{name.upper()}]")
        elif one.default is one.empty:
            found.append(f"--{name.replace('_', '-')} {name.upper()}")
    return found
