"""Words on the command line that no argument takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from cyclopts import App

from aioserve.cli import app
from tests.cli.command import Run


def commands(of: App = app, chain: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    for name in of:
        if not name.startswith("-"):
            found = of[name]
            yield (*chain, name), found
            yield from commands(found, (*chain, name))


SINGLE = [(chain, one) for chain, one in commands() if not any(name.isidentifier() for name in one)]
GROUPS = [chain for chain, _ in commands() if chain not in [known for known, _ in SINGLE]]


def test_the_commands_are_those_that_there_are() -> None:
    assert {("run",), ("simulate",), ("plugins", "check"), ("bench", "latency")} <= {
        chain for chain, _ in SINGLE
    }
    assert GROUPS == [("bench",), ("plugins",)]


@pytest.mark.parametrize(("chain", "one"), SINGLE, ids=[" ".join(chain) for chain, _ in SINGLE])
def test_they_are_named_with_the_commands_usage(
    chain: tuple[str, ...], one: App, aioserve_here: Run
) -> None:
    assert one.default_command is not None
    taken = [
        name
        for name, parameter in inspect.signature(one.default_command).parameters.items()
        if parameter.kind is parameter.POSITIONAL_ONLY
    ]
    words = [f"word-{n}" for n in range(len(taken))]
    needed = {
        "calibrate": ["--output", "table.json"],
        "evaluate": ["--text", "text.txt"],
        "quantize": ["--method", "int8"],
    }
    done = aioserve_here(*chain, *words, "big", "world", *needed.get(chain[0], []))
    assert (done.returncode, done.stdout) == (2, "")
    usage = f"usage: aioserve {' '.join(chain)} "
    assert done.stderr.startswith(f"aioserve: 'big' 'world' are 2 words too many; {usage}")
    assert all(name.upper() in done.stderr for name in taken)
    assert done.stderr.count("\n") == 1


def test_what_a_command_needs_and_what_it_may_have_are_told_apart(aioserve_here: Run) -> None:
    done = aioserve_here("run", "pyhelp", "hello", "world")
    assert done.stderr == (
        "aioserve: 'world' is one word too many; usage: aioserve run MODEL [PROMPT] [OPTIONS] "
        "(what has spaces in it is written in quotes)\n"
    )
    done = aioserve_here("calibrate", "pyhelp", "b", "-o", "table.json")
    assert "calibrate [MODEL] --output OUTPUT [OPTIONS] (" in done.stderr
    assert aioserve_here("plugins", "b", "c").stderr.startswith("aioserve: Unknown command")


def test_of_a_command_that_has_commands_those_are_told(aioserve_here: Run) -> None:
    done = aioserve_here("plugins", "chek", "fcfs")
    assert done.returncode == 2
    assert done.stderr == (
        'aioserve: Unknown command "chek". Did you mean "check"? Available commands: check, new.\n'
    )


@pytest.mark.parametrize("word", ["frobnicate", "serv"])
def test_an_unknown_command_is_told_all_that_there_are(word: str, aioserve_here: Run) -> None:
    done = aioserve_here(word)
    assert done.returncode == 2
    told = done.stderr.partition("Available commands: ")[2]
    assert told.endswith(".\n")
    assert set(told.removesuffix(".\n").split(", ")) == {chain[0] for chain, _ in commands()}
    assert ('Did you mean "serve"?' in done.stderr) is (word == "serv")
