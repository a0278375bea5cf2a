"""Text of files, servers and models never acts on a terminal."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from aioserve.assets import model_path
from aioserve.cli import _streams
from aioserve.cli._console import plain_console
from aioserve.cli._printable import printable
from aioserve.cli._streams import answer_text
from tests.cli.command import Run
from tests.cli.http_load.misbehaving import answering

ESCAPE = "\x1b]0;mine\x07\x1b[2J\x9b31m"
CLI = Path(__file__).resolve().parents[2] / "aioserve/cli"


def acts(text: str) -> list[str]:
    """Characters that make a terminal do more than show text."""
    return [char for char in text if not char.isprintable() and char not in "\n\t"]


@given(st.text() | st.sampled_from([ESCAPE, "\u202e", "\u2066"]))
def test_printable_text_has_its_lines_and_acts_on_nothing(text: str) -> None:
    shown = printable(text)
    assert not acts(shown)
    assert shown.count("\n") == text.count("\n")
    assert printable(shown) == shown


def test_tables_and_lines_show_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    console = plain_console()
    table = Table(ESCAPE, "b")
    table.add_row(ESCAPE, "[bold]b")
    console.print(table)
    console.print(ESCAPE, soft_wrap=True)
    shown = capsys.readouterr().out
    assert not acts(shown)
    assert shown.count("\\x1b[2J\\x9b31m") >= 1
    assert "[bold]b" in shown


def test_all_tables_of_commands_come_by_that_console() -> None:
    for file in CLI.rglob("*.py"):
        if file.name == "_console.py":
            continue
        for made in re.findall(r"\bConsole\([^)]*\)", file.read_text(encoding="utf-8")):
            assert made == "Console(stderr=True)", file  # bars, with our own words


def test_an_answer_is_written_to_a_file_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer_text(ESCAPE) == ESCAPE
    monkeypatch.setattr(_streams.sys.stdout, "isatty", lambda: True)
    assert answer_text(f"a\n\t{ESCAPE}") == f"a\n\t{printable(ESCAPE)}"


@pytest.mark.parametrize("verb", ["doctor", "plan"])
def test_names_of_files_are_shown(
    aioserve_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    model = tmp_path / f"model{ESCAPE}"
    shutil.copytree(model_path("pyhelp") or "", model)
    done = aioserve_here(verb, model)
    assert done.returncode == 0, done.stderr
    assert not acts(done.stdout)
    assert "\\x1b[2J\\x9b31m" in done.stdout


@pytest.mark.asyncio
async def test_bench_serve_shows_what_a_server_says(aioserve: Run) -> None:
    import asyncio
    import json

    body = json.dumps({"error": {"message": f"no {ESCAPE}", "code": ESCAPE}}).encode()
    async with answering(body, status=500, content_type="application/json") as (url, _):
        done = await asyncio.to_thread(
            *(aioserve, "bench", "serve", url, "--model", "m", "--vocab-size", 99),
            *("--num-requests", 2, "--num-warmups", 0),
        )
    assert not acts(done.stdout + done.stderr)
    assert "x1b" in done.stdout + done.stderr
