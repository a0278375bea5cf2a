"""The llguidance library, imported when it is first needed: that takes a fifth of a second."""

from __future__ import annotations

from types import ModuleType

__all__ = ["limits", "llguidance"]

MAX_ITEMS_IN_ROW = 2000
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_LEXER_STATES = 50_000
"""Most states of the lexer: a kilobyte or two each, in every matcher that comes to have so many."""
MAX_GRAMMAR_SIZE = 100_000


def llguidance() -> ModuleType:
    """Import the library. To be called on a thread."""
    import llguidance

    return llguidance


def limits() -> object:
    """Limits of one grammar's cost, in units of the library: some 20 ms of its lexer to compile,
    some 15 ms for a token."""
    return llguidance().LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
