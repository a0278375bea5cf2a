"""The reference names what is let through as the tables of hints do."""

from __future__ import annotations

from tests.docs.hints_table import PAGE, parts_of, table


def test_the_table_of_what_is_let_through_is_that_of_the_server() -> None:
    _, found, _ = parts_of(PAGE.read_text(encoding="utf-8"))
    assert found == table(), "write it anew: python -m tests.docs.hints_table"
