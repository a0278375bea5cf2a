"""Examples of `make test` depend on nothing but the test; finds of `make explore` are told."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import explore

ROOT = Path(__file__).parent.parent


def drawn() -> list[int]:
    numbers: list[int] = []

    @settings(max_examples=300, database=None, derandomize=True)
    @given(st.integers())
    def collect(number: int) -> None:
        numbers.append(number)

    collect()
    return numbers


def test_examples_are_the_same_whatever_was_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = drawn()
    assert len({*before}) > 100
    # A module of the project, as far as hypothesis can tell.
    told = random.Random(1)
    text = "\n".join(f"N{i} = {told.randrange(10**9, 10**10)}" for i in range(100))
    place = tmp_path / "imported_just_now.py"
    place.write_text(text)
    monkeypatch.setattr(
        "hypothesis.internal.constants_ast.is_local_module_file", lambda path: path == str(place)
    )
    monkeypatch.setattr(
        "hypothesis.internal.conjecture.providers.is_local_module_file",
        lambda path: path == str(place),
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("imported_just_now")
    try:
        assert drawn() == before
    finally:
        del sys.modules["imported_just_now"]


SEEDED = """
    from hypothesis import given
    from hypothesis import strategies as st

    @given(st.integers(0, 10**6))
    def test_small(number: int) -> None:
        print("more than a pipe holds" * 400)
        assert number < {limit}

    def test_example() -> None:
        raise RuntimeError("not a property")
"""


def explored(place: Path, limit: int, *options: str) -> tuple[int, str]:
    path = place / "test_numbers.py"
    path.write_text(textwrap.dedent(SEEDED.format(limit=limit)))
    command = [sys.executable, "-m", "tests.explore", "--jobs", "1", *options]
    told = subprocess.run(
        [*command, "-p", "tests.conftest", str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert not told.stderr
    return told.returncode, told.stdout


@pytest.mark.more
def test_a_find_ends_all_and_is_told_with_the_line_that_repeats_it(tmp_path: Path) -> None:
    code, told = explored(tmp_path, 1000, "--max-seconds", "60")
    assert code == 1, told
    seed = re.findall(r"^seed (\d+)$", told, re.MULTILINE)[-1]
    (line,) = re.findall(r"^once more: (.*)$", told, re.MULTILINE)
    assert line.endswith(f"--hypothesis-profile explore --hypothesis-seed {seed}")
    assert "::test_small" in line
    assert "not a property" not in told


def test_without_a_find_it_ends_with_the_time(tmp_path: Path) -> None:
    code, told = explored(tmp_path, 10**7, "--max-seconds", "0")
    assert (code, told.splitlines()[-1]) == (0, "1 rounds, nothing found"), told


def test_no_process_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        explore.main(["--jobs", "0"])
    assert "--jobs must be at least 1, got 0" in capsys.readouterr().err
