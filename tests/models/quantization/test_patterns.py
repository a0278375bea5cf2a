"""Regular expressions of files match like Python's engine, and never take long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import WeightsError
from aioserve.models.quantization import patterns
from aioserve.models.quantization.patterns import MAX_PATTERN_CHARS, Pattern

SINGLES = st.sampled_from(
    ["a", "b", "1", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[a-b1]", "^", "$"]
)
QUANTIFIERS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,}", "{0,2}", "*?", "+?"])


def extended(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.tuples(st.sampled_from(["(", "(?:", "(?!", "(?="]), inner).map(
        lambda pair: f"{pair[0]}{pair[1]})"
    )
    repeated = st.tuples(groups.filter(lambda g: g[1] != "?" or g[2] == ":"), QUANTIFIERS)
    some = st.lists(inner, min_size=1, max_size=3)
    return groups | repeated.map("".join) | some.map("".join) | some.map("|".join)


@given(
    st.recursive(
        st.tuples(SINGLES.filter(lambda s: s not in "^$"), QUANTIFIERS).map("".join) | SINGLES,
        extended,
        max_leaves=6,
    ),
    st.text("ab1.\n", max_size=6),
)
def test_the_same_texts_match(pattern: str, text: str):
    assert Pattern(pattern).matches(text) is (re.match(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "(.+)+!",
        "((a|.)*)*!",
        ".*" * 30 + "!",
        "(.?)" * 60 + "!",
        "((.{0,99}){0,99}){0,99}!",
        "(a|.)(.|e)" * 20,
    ],
)
def test_what_python_matches_for_ever_ends(pattern: str):
    assert not Pattern(pattern).matches("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a)",
        "[a",
        "*",
        "a**",
        "a{3,2}",
        "[b-a]",
        "\\",
        r"\p{L}",
        "(?R)",
        "[[a]--[b]]",
        "a{e<=1}",
        "x{",
        "a" * (MAX_PATTERN_CHARS + 1),
    ],
)
def test_what_is_not_known_is_refused_by_name(pattern: str):
    with pytest.raises(WeightsError, match=r"quantization_config: the expression '.*: "):
        Pattern(pattern)


SLOW = "(a|aa)+$", "a" * 60 + "b"


def test_an_expression_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patterns, "LIMIT_SECONDS", 0.01)
    with pytest.raises(WeightsError, match=r"takes more than 0.01 s to match"):
        Pattern(SLOW[0]).matches(SLOW[1])


def test_the_time_limit_is_one_for_all_texts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patterns, "LIMIT_SECONDS", 0.01)
    pattern = Pattern(SLOW[0])
    assert pattern.matches("aa")
    with pytest.raises(WeightsError):
        pattern.matches(SLOW[1])
    with pytest.raises(WeightsError):
        pattern.matches("aa")
