"""Stop strings against a character-by-character search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import InvariantError
from aioserve.text.stop import StopAutomaton, StopStrings

# Two letters make texts that overlap their own stops in every way.
letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple)


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the first stop to complete, and that stop; by trying every prefix."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held_back(text: str, stops: tuple[str, ...]) -> str:
    """The longest end of the text that begins, but doesn't complete, a stop."""
    for start in range(len(text) + 1):
        if any(len(stop) > len(text) - start and stop.startswith(text[start:]) for stop in stops):
            return text[start:]
    return ""


@given(chunks=st.lists(letters, max_size=8), stops=stop_lists)
def test_any_chunking_gives_the_text_before_the_first_stop(
    chunks: list[str], stops: tuple[str, ...]
) -> None:
    matcher = StopStrings(StopAutomaton(stops))
    given_out = ""
    taken = ""
    for chunk in chunks:
        given_out += matcher.push(chunk)
        taken += chunk
        if matcher.matched is not None:
            break
        assert given_out + held_back(taken, stops) == taken
    assert (given_out + matcher.flush(), matcher.matched) == cut("".join(chunks), stops)


@given(
    chunks=st.lists(st.tuples(letters, st.booleans()), max_size=8),
    stops=stop_lists,
    include=st.booleans(),
)
def test_stops_end_only_where_they_may_and_are_part_of_the_text_if_that_is_wanted(
    chunks: list[tuple[str, bool]], stops: tuple[str, ...], include: bool
) -> None:
    matcher = StopStrings(StopAutomaton(stops), include=include)
    given_out = ""
    taken = ""
    for chunk, may_end in chunks:
        given_out += matcher.push(chunk, may_end=may_end)
        ends = range(len(taken) + 1, len(taken) + len(chunk) + 1)
        taken += chunk
        found = [(end, s) for end in ends for s in stops if taken[:end].endswith(s) and may_end]
        if found:
            end, stop = min(found, key=lambda each: (each[0], -len(each[1])))
            assert matcher.matched == stop
            assert given_out == taken[: end if include else end - len(stop)]
            return
        assert matcher.matched is None
        assert given_out + ("" if include else held_back(taken, stops)) == taken
    assert given_out + matcher.flush() == taken


@given(text=st.text(max_size=200), stops=st.lists(st.text(min_size=1, max_size=8), min_size=1))
def test_any_text_and_stops_agree_with_a_plain_search(text: str, stops: list[str]) -> None:
    matcher = StopStrings(StopAutomaton(stops))
    given_out = "".join(matcher.push(char) for char in text if matcher.matched is None)
    assert (given_out + matcher.flush(), matcher.matched) == cut(text, tuple(stops))


def test_the_stop_that_completes_first_wins_over_one_that_began_earlier() -> None:
    matcher = StopStrings(StopAutomaton(["abcdef", "cd"]))
    assert matcher.push("xabcdef") == "xab"
    assert matcher.matched == "cd"


def test_of_stops_that_end_together_the_longest_wins() -> None:
    matcher = StopStrings(StopAutomaton(["d", "bcd", "cd"]))
    assert matcher.push("abcd") == "a"
    assert matcher.matched == "bcd"


def test_what_is_held_comes_out_at_the_end() -> None:
    matcher = StopStrings(StopAutomaton(["###"]))
    assert [matcher.push("a##"), matcher.push("#"[:0]), matcher.flush()] == ["a", "", "##"]
    assert matcher.flush() == ""


def test_nothing_may_follow_a_match() -> None:
    matcher = StopStrings(StopAutomaton(["."]))
    assert matcher.push("end. more") == "end"
    with pytest.raises(InvariantError, match="more"):
        matcher.push("more")
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_empty_stops_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvariantError, match="non-empty"):
        StopStrings(StopAutomaton(stops))
