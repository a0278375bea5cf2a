"""Answers to unknown option names: the equivalent name here, or that there is no equivalent.

A door is a constructor, a call or a command. One table (`of_engines`, `of_requests`, `of_commands`,
`families`) has the answers, and each door spells our names its own way.
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
"""Fewest characters of an abbreviation, which argparse would also take for a longer name."""
_LIKE = 0.6
_NEARLY = 0.85
_SPECULATION = re.compile(r"speculation_(?P<field>max_tokens|max_branches|acceptance)")
_OFF = {"chat": "--raw"}
"""Flags that turn an option off, unless the flag is `--no-` and the option's name."""


def unknown_in_python(call: str, name: str, known: Collection[str]) -> str:
    """Message for an argument that a function or class doesn't have.

    `call` is its name, and `known` holds the argument names it has. Classes without a place in the
    table only get a suggestion of a similar argument.
    """
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
    """Message for an option that a command doesn't have. None if the table has no answer.

    `known` holds the command's own options, spelled as Python names. The caller may still suggest a
    similar one.
    """
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
    """Our own names in an answer."""
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
    """Place of one of our options, in words.

    `door` is the Python place that asks, and `known` holds its argument names. Without a `door`,
    the command line asks.
    """
    if home is Home.SAMPLING and door is Home.CALL and "params" in known:
        return "an argument of SamplingParams, which goes into params"
    if home is door is Home.CALL:
        return "an argument of another call of the engine"
    if door is not None and home is Home.ENGINE:
        return "an argument of Engine"
    return _PLACES.get(home) or f"an {'argument' if home.is_python else 'option'} of {home.value}"


def _plain(name: str) -> str:
    """`name` in lower case, with underscores."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-"))
    return words.replace("-", "_").lower()


# -- rows


def _row(
    word: str, known: Collection[str], is_here: Callable[[Row], bool]
) -> tuple[Row | None, Home | None]:
    """Row that answers a name, or else the place where `word` is our own option.

    Both are None if `word` is in `known`, or close to a name in it.
    """
    # From the surest match to the vaguest.
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
    """Rows of the names that begin with `word`, as argparse would complete it. Empty if these names
    have different meanings."""
    if len(word) < _BEGINNING:
        return ()
    longer = [rows for name, rows in _by_name().items() if name.startswith(word)]
    return longer[0] if longer and all(rows[0] is longer[0][0] for rows in longer) else ()


def _chosen(rows: Sequence[Row], is_here: Callable[[Row], bool]) -> Row:
    """First row whose options are here, or else the first row."""
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
    """Place where `word` is our own option; None if nowhere."""
    return next((home for home in (*DOORS, Home.SERVE) if word in own_names(home)), None)


@cache
def own_names(home: Home) -> frozenset[str]:
    """Our own names at a Python place, read from its signatures, or the settings of a server."""
    if home is Home.SERVE:
        return frozenset(SETTINGS.split())
    # Resolved by name at call time: importing these classes here would be circular.
    doors = [pkgutil.resolve_name(f"aioserve:{name}") for name in DOORS[home]]
    names = [name for door in doors for name in inspect.signature(door).parameters]
    return frozenset(names) - {"self"}


# -- answers, spelled for Python or the command line


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
