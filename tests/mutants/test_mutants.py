"""Every planted bug can still be planted, leaves valid Python and names tests that exist;
`make mutants` plants them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec.structs import replace

from tests.docs.test_guarantees import defined_in
from tests.mutants.mutant import ROOT, Mutant, StaleMutantError, load_mutants

MUTANTS = load_mutants()


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 20


def test_a_planted_bug_changes_one_place_and_names_tests_that_exist() -> None:
    wrong = {mutant.name: told for mutant in MUTANTS if (told := wrong_with(mutant))}
    assert wrong == {}


def wrong_with(mutant: Mutant) -> list[str]:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    try:
        planted = mutant.planted_in(source)
        if mutant.file.endswith(".py"):
            compile(planted, mutant.file, "exec", dont_inherit=True)
    except (StaleMutantError, SyntaxError) as error:
        return [str(error)]
    told = ["changes nothing"] if planted == source else []
    told += [f"has no {field}" for field in ("trap", "tests") if not getattr(mutant, field)]
    for test in mutant.tests:
        path, _, name = test.partition("::")
        if not (ROOT / path).is_file() or (name and name not in defined_in(path)):
            told.append(f"there is no {test}")
    return told


def test_what_is_wrong_with_a_planted_bug_is_told() -> None:
    good = MUTANTS[0]
    bad = replace(good, trap="", tests=("tests/test_none.py", "tests/test_house.py::test_none"))
    assert wrong_with(bad) == ["has no trap", *(f"there is no {test}" for test in bad.tests)]
    (told,) = wrong_with(replace(good, find="no such text"))
    assert "not once" in told
    assert wrong_with(replace(good, replace=good.find)) == ["changes nothing"]


@pytest.mark.parametrize("source", ["a = 1", "a = 2\na = 2"])
def test_text_that_is_missing_or_there_twice_is_refused(source: str) -> None:
    mutant = Mutant("a trap", "a.py", "a = 2", "a = 3", ("tests/test_a.py",), "stale")
    with pytest.raises(StaleMutantError, match=r"stale: a\.py has [02] times, not once"):
        mutant.planted_in(source)


@pytest.mark.slow
def test_a_bug_that_is_planted_is_found_and_the_repository_stays_as_it_was() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.file == "aioserve/text/stop.py")
    before = (ROOT / mutant.file).read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "--only", mutant.name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "found 1 of 1"
    assert (ROOT / mutant.file).read_bytes() == before
