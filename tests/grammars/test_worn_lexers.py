"""Completions with one structured output share a lexer, and none of them wears it out."""

from __future__ import annotations

import ctypes
import gc
import random
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.grammars import grammar as grammars
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.structured_output import StructuredOutput
from tests.grammars.walks import END, Walk, ids_in, pyhelp

FORMS: list[dict[str, Any]] = [
    {"regex": "[a-z]{1,60}( [0-9]{1,9}){0,4}"},
    {"choice": [f"{letter}{'xyz' * 9}{letter}" for letter in string.ascii_letters]},
    {
        "json_schema": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "maxLength": 30},
                "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    },
]


def compiled(form: dict[str, Any], *, shared: int | None = None) -> CompiledGrammar:
    """A grammar whose completions share at most so many states."""
    with pytest.MonkeyPatch.context() as patch:
        if shared is not None:
            patch.setattr(grammars, "SHARED_LEXER_STATES", shared)
        compact: dict[str, Any] = {}
        if "json_schema" in form:
            compact["disable_any_whitespace"] = True
        made = compile_grammar(pyhelp()[1], StructuredOutput(**form, **compact))
        if shared is not None:
            made._max_shared = shared
            made._prototype = None
    return made


def test_long_choices_are_followed_as_often_as_anyone_asks() -> None:
    rng = random.Random(0)
    letters = string.ascii_letters + " "
    choice = ["".join(rng.choices(letters, k=8000)) for _ in range(16)]
    tokenizer = pyhelp()[0]
    grammar = compiled({"choice": choice})
    for text in choice * 2:
        matcher = grammar.matcher({END})
        for token_id in tokenizer.encode(text):
            assert matcher.accept(token_id), matcher.error
        assert matcher.is_accepting
        assert ids_in(matcher.allowed()) == [END]


@given(seeds=st.lists(st.integers(0, 10_000), min_size=2, max_size=4), form=st.sampled_from(FORMS))
def test_a_full_lexer_changes_nothing_of_what_is_allowed(
    seeds: list[int], form: dict[str, Any]
) -> None:
    roomy, narrow = compiled(form), compiled(form, shared=25)
    walks = [Walk(roomy, {END}, seed) for seed in seeds]
    followed = [narrow.matcher({END}) for _ in walks]
    for place in range(max(len(walk.ids) for walk in walks)):
        for walk, matcher in zip(walks, followed, strict=True):
            if place < len(walk.ids):
                again = roomy.matcher({END})
                assert again.accept_all(walk.ids[:place])
                assert np.array_equal(matcher.allowed(), again.allowed())
                assert matcher.forced() == again.forced()
                assert matcher.accept(walk.ids[place])
    for walk, matcher in zip(walks, followed, strict=True):
        assert matcher.has_ended == walk.matcher.has_ended
    assert any(not matcher._follower.shares for matcher in followed)  # one was full, at the least


def test_a_completion_with_a_lexer_of_its_own_tells_nothing_of_drafts() -> None:
    """Masks for draft tokens would use up the completion's room in the lexer, and end it too
    soon."""
    grammar = compiled(FORMS[0], shared=25)
    matcher = grammar.matcher({END})
    rng = random.Random(3)
    for _ in range(60):
        going_on = [i for i in ids_in(matcher.allowed()) if i != END]
        if not matcher._follower.shares:
            break
        assert matcher.accept(rng.choice(going_on)), matcher.error
    assert not matcher._follower.shares
    assert not matcher.behind([next(i for i in ids_in(matcher.allowed()) if i != END)])
    assert matcher.error is None


COUNTS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
"""Fields of `mallinfo2`, in its order."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in COUNTS.split()]


def allocated() -> int:
    """Bytes that this process has of its allocator, those of compiled code among them."""
    info = ctypes.CDLL(None)
    if not hasattr(info, "mallinfo2"):
        pytest.skip("the C library doesn't tell what is allocated")
    info.mallinfo2.restype = _Memory
    gc.collect()
    memory = info.mallinfo2()
    return memory.uordblks + memory.hblkhd


COSTLY: list[dict[str, Any]] = [
    {"regex": "a{49999}"},
    {"regex": r"(\p{L}{1,30} ){1,400}"},
    {"regex": ".*[ab].{200}[cd].{200}"},
    {"regex": "[a-z]{0,49000}"},
    {"choice": [letter * 8000 for letter in "abcdefghijklmnop"]},
    {"json_schema": {"enum": [f"value number {i}" for i in range(3000)]}},
    {
        "json_schema": {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^[a-z{i}]{{1,30}}-x{i}$"}
                for i in range(300)
            },
            "additionalProperties": False,
        }
    },
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", COSTLY, ids=[str(form)[:30] for form in COSTLY])
def test_a_kept_form_holds_no_more_memory_than_it_says(form: dict[str, Any]) -> None:
    compiled({"regex": "warm"})
    before = allocated()
    grammar = compiled(form)
    for seed in range(8):
        matcher = grammar.matcher({END})
        rng = random.Random(seed)
        for _ in range(300):
            allowed = ids_in(matcher.allowed())
            if not allowed or matcher.has_ended:
                break
            assert matcher.accept(rng.choice(allowed))
        del matcher
    assert allocated() - before <= grammar.num_bytes
