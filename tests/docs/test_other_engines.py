"""The page for users of other engines gives the answers of the command."""

from __future__ import annotations

import pytest

from tests.docs.engines_table import OPTIONS, PAGE, inside, rewritten, table


@pytest.mark.parametrize("engine", OPTIONS)
def test_the_table_is_what_the_command_answers(engine: str) -> None:
    found = inside(PAGE.read_text(encoding="utf-8"), engine)
    assert found == table(engine), "write it anew: python -m tests.docs.engines_table"


def test_tables_are_written_between_their_marks() -> None:
    text = PAGE.read_text(encoding="utf-8")
    emptied = text
    for engine in OPTIONS:
        emptied = emptied.replace(table(engine), "")
    assert emptied != text
    assert rewritten(emptied) == text
