"""Calls as plain JSON are told from content, whatever the pieces in which they come."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.text.output_parsers.families import JsonCallsParser
from aioserve.text.output_parsers.parts import whole_calls
from aioserve.text.output_parsers.registry import tool_parser_named

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["weather", "move"]), st.dictionaries(st.text(max_size=3), JSON)),
    min_size=1,
    max_size=3,
)


def read(text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]], list[str]]:
    parser, parts = JsonCallsParser(), []
    places = sorted({0, len(text), *[cut % (len(text) + 1) for cut in cuts]})
    for start, end in pairwise(places):
        parts.append(parser.push(text[start:end]))
    parts.append(parser.finish())
    calls = whole_calls(call for part in parts for call in part.tool_calls)
    content = "".join([part.content for part in parts])
    return content, [(call.name, call.arguments) for call in calls], [call.id for call in calls]


@given(CALLS, st.lists(st.integers(0)), st.booleans(), st.sampled_from([None, 1]))
def test_a_list_of_calls_or_one_is_read(
    calls: list[Any], cuts: list[int], alone: bool, indent: int | None
) -> None:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if alone:
        calls = calls[:1]
    text = json.dumps(objects[0] if alone else objects, indent=indent)
    content, found, ids = read(text, cuts)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert len(set(ids)) == len(calls)
    assert all(len(each) == 9 and each.isalnum() for each in ids)


@given(CALLS, st.integers(0), st.lists(st.integers(0)))
def test_of_a_list_that_is_cut_off_nothing_is_made_up(
    calls: list[Any], end: int, cuts: list[int]
) -> None:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    text = json.dumps(objects)
    text = text[: end % (len(text) + 1)]
    _, found, _ = read(text, cuts)
    for (name, arguments), (expected, whole) in zip(found, calls, strict=False):
        assert name == expected
        assert json.dumps(whole).startswith(arguments)
    assert all(
        json.loads(arguments) == whole
        for (_, arguments), (_, whole) in zip(found[:-1], calls, strict=False)
    )


@given(st.text(), st.lists(st.integers(0)))
def test_whatever_comes_no_piece_matters(text: str, cuts: list[int]) -> None:
    assert read(text, cuts)[:2] == read(text, [])[:2]


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        ("Rain.", "Rain.", 0),
        (" [] ", " [] ", 0),
        ('[{"name": "a", "arguments": {}}] bye', " bye", 1),
        ('[{"name": "a", "arguments": {}} bye', " bye", 1),
        ('[{"name": "a", "arguments": {}}, 5]', ", 5]", 1),
        ('{"arguments": 5}', '{"arguments": 5}', 0),
        ("", "", 0),
    ],
)
def test_what_is_no_call_is_content(text: str, content: str, count: int) -> None:
    found = read(text, list(range(len(text))))
    assert found == read(text, []) or count
    assert (found[0], len(found[1])) == (content, count)


def test_no_template_is_taken_for_one_that_writes_plain_json() -> None:
    form = tool_parser_named("json", "", has_tools=False)
    assert form is not None
    assert not form.reads('{"name": "arguments"}')
