"""Answers to names that a door doesn't have: the name here, or that there is none.

A door is a constructor, a call or a command. One table (`of_engines`, `of_requests`,
`of_commands`, `families`) has the answers, and each door writes names of ours in its own way.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Final

from aioserve.other_engines import of_commands, of_engines, of_requests
from aioserve.other_engines.families import FAMILIES, SHORT
from aioserve.other_engines.rows import DOORS, SETTINGS, Home, Row

__all__ = ["ROWS", "named_in", "on_command_line", "own_names", "unknown_in_python"]

ROWS: Final[tuple[Row, ...]] = (*of_engines.ROWS, *of_requests.ROWS, *of_commands.ROWS)

_NAME = re.compile(r"\{(?P<off>!?)(?P<name>\w+)(=(?P<value>[^}]+))?\}")
_BEGINNING = 6
"""Characters that a name must have for others to begin with it, as argparse takes them."""
_LIKE = 0.6
_NEARLY = 0.85
_SPECULATION = re.compile(r"speculation_(?P<field>max_tokens|max_branches|acceptance)")
_OFF = {"chat": "--raw"}
"""Flags that turn an option off, where that isn't `--no-` and its name."""


def unknown_in_python(call: str, name: str, known: Collection[str]) -> str:
    """The answer to an argument that a call, or a class, doesn't have. `known` are those that it
    has. Other engines have nothing like the classes that are no door."""
    word = _plain(name)
    if (home := _HOMES.get(call) or (Home.CALL if call.islower() else None)) is not None:
        row, own = _row(word, known, lambda row: row.home in (home, Home.ANY))
        if row is not None:
            answer = _in_python(row, home, known)
        else:
            answer = own and f"it is {_place(own, home, known)}"
        if answer is not None:
            return f"{call}() takes no {name!r}: {answer}"
    near = difflib.get_close_matches(word, known, 1, _LIKE)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{call}() got an unexpected keyword argument {name!r}{meant}"


def on_command_line(option: str, known: Collection[str]) -> str | None:
    """The answer to an option that a command doesn't have; None where there is nothing to say but
    which of its own it may be like. `known` are these, as names in Python."""
    is_long = option.startswith("--")
    if not is_long and option not in SHORT:
        return None
    word = _plain(option if is_long else SHORT[option])
    no_option = f"{option} isn't an option here: "
    if word in known:
        return f"{no_option}it is {_flag(word)}"
    row, own = _row(word, known, lambda row: named_in(row.answer) <= set(known))
    if row is not None:
        return no_option + _on_command_line(row, known)
    if own is not None:
        return f"{no_option}{word if own.is_python else _flag(word)} is {_place(own)}"
    return None


def named_in(answer: str) -> set[str]:
    """Names of ours in an answer."""
    return {found["name"] for found in _NAME.finditer(answer)}


_HOMES = {
    "Engine": Home.ENGINE,
    "EngineConfig": Home.ENGINE,
    "Speculation": Home.ENGINE,
    "SamplingParams": Home.SAMPLING,
    "StructuredOutput": Home.FORM,
}
_PLACES = {
    Home.ENGINE: "an argument of Engine, and an option of `aioserve serve`",
    Home.SAMPLING: "an argument of SamplingParams, and a field of requests",
    Home.CALL: "an argument of stream, generate and chat",
}


def _place(home: Home, door: Home | None = None, known: Collection[str] = ()) -> str:
    """The place of an option of ours, said at a door of Python, which has `known`, or on a command
    line."""
    if home is Home.SAMPLING and door is Home.CALL and "params" in known:
        return "an argument of SamplingParams, which goes into params"
    if home is door is Home.CALL:
        return "an argument of another call of the engine"
    if door is not None and home is Home.ENGINE:
        return "an argument of Engine"
    return _PLACES.get(home) or f"an {'argument' if home.is_python else 'option'} of {home.value}"


def _plain(name: str) -> str:
    """A name with underscores and in small letters."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))
    return words.replace("-", "_").lower()


# -- rows


def _row(
    word: str, known: Collection[str], is_here: Callable[[Row], bool]
) -> tuple[Row | None, Home | None]:
    """The row that answers a name, or where one of our own names is; neither where the name is
    nearly one of `known`."""
    # From what is surely meant to what only may be.
    if word in known:
        return None, None
    table = _by_name()
    rows = table.get(word, ())
    own = _own_home(word)
    if own is not None and word not in known and not any(map(is_here, rows)):
        return None, own
    if rows := rows or table.get(word.removeprefix("no_"), ()):
        return _chosen(rows, is_here), None
    if difflib.get_close_matches(word, known, 1, _NEARLY):
        return None, None
    if rows := _beginning_with(word):
        return _chosen(rows, is_here), None
    if (row := _family(word)) is not None:
        return row, None
    near = difflib.get_close_matches(word, table, 1, _NEARLY)
    return (_chosen(table[near[0]], is_here) if near else None), None


def _beginning_with(word: str) -> Sequence[Row]:
    """Rows of names that begin so, where all of these mean the same: what argparse would take."""
    if len(word) < _BEGINNING:
        return ()
    longer = [rows for name, rows in _by_name().items() if name.startswith(word)]
    return longer[0] if longer and all(rows[0] is longer[0][0] for rows in longer) else ()


def _chosen(rows: Sequence[Row], is_here: Callable[[Row], bool]) -> Row:
    """The first row that is here, or else the first of all."""
    return next(filter(is_here, rows), rows[0])


def _family(word: str) -> Row | None:
    for row in FAMILIES:
        if any(f"_{part}_" in f"_{word}_" for part in row.names.split()):
            return row
    return None


@cache
def _by_name() -> dict[str, list[Row]]:
    table: dict[str, list[Row]] = {}
    for row in ROWS:
        for name in row.names.split():
            table.setdefault(name, []).append(row)
    return table


def _own_home(word: str) -> Home | None:
    """The door where one of our own names is an option."""
    return next((home for home in (*DOORS, Home.SERVE) if word in own_names(home)), None)


@cache
def own_names(home: Home) -> frozenset[str]:
    """Our own names at a door of Python, as its signature shows them, or the settings of a
    server."""
    if home is Home.SERVE:
        return frozenset(SETTINGS.split())
    # Looked up by name when an answer is wanted: the doors themselves ask for answers.
    doors = [pkgutil.resolve_name(f"aioserve:{name}") for name in DOORS[home]]
    names = [name for door in doors for name in inspect.signature(door).parameters]
    return frozenset(names) - {"self"}


# -- answers as they are written at a door


def _in_python(row: Row, door: Home, known: Collection[str]) -> str:
    if not row.home.is_python:
        answer = _NAME.sub(_written_as_flag, row.answer)
    else:
        answer = _NAME.sub(_written_as_argument, row.answer)
    named = {name for name in named_in(row.answer) if not _SPECULATION.fullmatch(name)}
    if row.home is Home.ANY or (row.home is door and named <= set(known)):
        return answer
    return f"{answer} ({_place(row.home, door, known)})"


def _on_command_line(row: Row, known: Collection[str]) -> str:
    if (
        row.home.is_python
        and row.home is not Home.ENGINE
        and not named_in(row.answer) <= set(known)
    ):
        return f"{_NAME.sub(_written_as_argument, row.answer)} ({_place(row.home)})"
    answer = _NAME.sub(_written_as_flag, row.answer)
    if named_in(row.answer) <= set(known):
        return answer
    return f"{answer} ({_place(row.home)})"


def _written_as_argument(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if (of := _SPECULATION.fullmatch(name)) is not None:
        return f"{of['field']} of Speculation"
    if found["off"]:
        return f"{name}=False"
    if value is None:
        return name
    return f"{name}={value}" if value.isdigit() else f'{name}="{value}"'


def _written_as_flag(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if found["off"]:
        return _OFF.get(name) or f"--no-{_flag(name)[2:]}"
    return _flag(name) if value is None else f"{_flag(name)} {value}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
