"""Tool calls between tags: values are what the schemas of tools say, whatever the pieces."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.parts import ToolCall, whole_calls
from aioserve.text.output_parsers.registry import TOOL_PARSERS
from tests.tiers import examples

STYLES = ("glm45", "qwen3_coder")
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}
TYPES |= {list: "array", type(None): "null"}

names = st.from_regex(r"[a-z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
words = st.text(st.characters(codec="utf-8"), max_size=6)
lures = st.sampled_from(
    [
        "5",
        "true",
        "null",
        '"a"',
        "{}",
        "</tool_call>",
        "<tool_call>",
        "</arg",
        "</para",
        "\n\n",
        '"\\',
    ]
)
closings = st.sampled_from(["</arg_value>", "\n</parameter>", '"]</arg_value>'])
"""Tags that a string can't have, and a value of JSON can."""
CUTTING = re.compile(r"</tool_call>\s*<tool_call>")
"""Texts of these lures that end a value without its tag."""
strings = st.lists(words | lures, max_size=3).map("".join).filter(lambda t: not CUTTING.search(t))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner | words | closings, max_size=2) | st.dictionaries(words, inner | words)
    ),
    max_leaves=4,
)
arguments = st.dictionaries(names, strings | values, max_size=3)
spaces = st.sampled_from(["", "\n", " \n"])


def written(style: str, name: str, members: Sequence[tuple[str, str]], gap: str) -> str:
    if style == "glm45":
        inner = [f"<arg_key>{k}</arg_key>{gap}<arg_value>{v}</arg_value>{gap}" for k, v in members]
        return f"<tool_call>{name}{gap}" + "".join(inner) + "</tool_call>"
    inner = [f"<parameter={key}>\n{value}\n</parameter>{gap}" for key, value in members]
    return f"<tool_call>{gap}<function={name}>{gap}{''.join(inner)}</function>{gap}</tool_call>"


def tool(name: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def read(
    style: str, pieces: Sequence[str], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, tuple[ToolCall, ...]]:
    counter = itertools.count()
    parser = TOOL_PARSERS[style](lambda: str(next(counter)), ArgumentTypes(tools))
    parts = [*(parser.push(piece) for piece in pieces), parser.finish()]
    deltas = [delta for part in parts for delta in part.tool_calls]
    return "".join(part.content for part in parts), whole_calls(deltas)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=examples(150))
@given(
    calls=st.lists(st.tuples(names, arguments), min_size=1, max_size=3),
    gap=spaces,
    around=st.tuples(st.sampled_from(["", "Well.", "a <tool"]), spaces, spaces),
    data=st.data(),
)
def test_values_come_back_as_they_were_sent(
    style: str,
    calls: list[tuple[str, dict[str, Any]]],
    gap: str,
    around: tuple[str, str, str],
    data: st.DataObject,
) -> None:
    calls = [(f"{name}{number}", value) for number, (name, value) in enumerate(calls)]
    tools = [
        tool(name, {key: {"type": TYPES[type(value)]} for key, value in given_.items()})
        for name, given_ in calls
    ]
    texts = [
        written(
            style,
            name,
            [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in given_.items()],
            gap,
        )
        for name, given_ in calls
    ]
    before, space, between = around
    text = before + space + between.join(texts) + between
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    cut = [text[a:b] for a, b in itertools.pairwise([0, *at, len(text)])]
    content, found = read(style, [text], tools)
    assert content == before
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert read(style, cut, tools) == read(style, list(text), tools) == (content, found)


BOUND = re.compile(r"</tool_call>\s*$")
"""Texts that end a call where nothing else does."""


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=examples(150))
@given(
    value=(strings | values).filter(lambda value: not BOUND.search(str(value))),
    behind=strings | values,
    gap=spaces,
    missing=st.sets(st.sampled_from(["value", "last", "call", "tag"]), min_size=1),
    number=st.integers(1, 2),
    data=st.data(),
)
def test_tags_that_models_forget_are_in_no_value(
    style: str,
    value: Any,
    behind: Any,
    gap: str,
    missing: set[str],
    number: int,
    data: st.DataObject,
) -> None:
    given_ = {"a": value, "b": behind}
    tools = [tool("f", {key: {"type": TYPES[type(one)]} for key, one in given_.items()})]
    members = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in given_.items()]
    text = written(style, "f", members, gap)
    opens, closes = ("<arg_key>", "</arg_value>"), ("<parameter=", "\n</parameter>")
    next_one, tag = opens if style == "glm45" else closes
    if "value" in missing:
        line = "\n" if style == "qwen3_coder" else ""
        text = text.replace(f"{tag}{gap}{next_one}b", f"{line}{next_one}b", 1)
    if style == "qwen3_coder" and "call" in missing:
        before, _, after = text.rpartition("</function>")
        text = before + after
    if style == "qwen3_coder" and "tag" in missing and "call" not in missing:
        text = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    if "last" in missing:
        before, _, after = text.rpartition(tag)
        text = before + ("\n" if style == "qwen3_coder" else "") + after.lstrip()
    text = "\n".join([text] * number)
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    cut = [text[a:b] for a, b in itertools.pairwise([0, *at, len(text)])]
    content, found = read(style, [text], tools)
    assert read(style, cut, tools) == read(style, list(text), tools) == (content, found)
    assert content == ""
    assert [json.loads(call.arguments) for call in found] == [given_] * number


@pytest.mark.parametrize(
    ("schema", "value", "arguments"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "string"}, ' a"b ', '" a\\"b "'),
        ({"type": "integer"}, "5", "5"),
        ({"type": "integer"}, "7" * 5000, "7" * 5000),
        ({"type": "number"}, " 5.0\n", "5.0"),
        ({"type": "number"}, "five", '"five"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "", '""'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "array"}, '["a", 1]', '["a", 1]'),
        ({"type": "array"}, '["a", 1', '"[\\"a\\", 1"'),
        ({"type": "array"}, "['a', True, None,]", '["a", true, null]'),
        ({"type": "array"}, "('a', (1, 2))", '["a", [1, 2]]'),
        (
            {"type": "object"},
            "{'a': {'b': [1, -2.5]}, 'c': False}",
            '{"a": {"b": [1, -2.5]}, "c": false}',
        ),
        (
            {"type": "object"},
            "{'it\\'s': \"a 'b' (True)\", '\\n\\x41\\u00e9\\d': '\"'}",
            '{"it\'s": "a \'b\' (True)", "\\nA\u00e9\\\\d": "\\""}',
        ),
        ({"type": "object"}, "{'a': 1 + 1}", "\"{'a': 1 + 1}\""),
        ({"type": "object"}, "{1: 2}", '"{1: 2}"'),
        ({"type": "object"}, "{1, 2}", '"{1, 2}"'),
        ({"type": "array"}, "[" * 3000, '"' + "[" * 3000 + '"'),
        ({"type": "array"}, "['" + "\\'" * 9000, "\"['" + "\\\\'" * 9000 + '"'),
        ({"type": "null"}, "None", "null"),
        ({}, "['a', None]", '["a", null]'),
        ({}, "(see 'above')", "\"(see 'above')\""),
        ({}, "None of these", '"None of these"'),
        ({"type": "string"}, "['a']", "\"['a']\""),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5 or 6", '"5 or 6"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"const": "null"}, "null", '"null"'),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "1", '"1"'),
        ({"$ref": "#/$defs/word"}, "1", '"1"'),
        ({"$ref": "#/$defs/loop"}, "1", "1"),
        ({}, "1", "1"),
        ({}, "one", '"one"'),
        ({}, '"one"', '"\\"one\\""'),
        (True, "{}", "{}"),
        ({"type": "text"}, "1", "1"),
        (None, "1", "1"),
    ],
)
@pytest.mark.parametrize("style", STYLES)
def test_a_value_is_what_its_schema_says(
    style: str, schema: Any, value: str, arguments: str
) -> None:
    told = tool("f", {} if schema is None else {"a": schema})
    told["function"]["parameters"]["$defs"] = {
        "word": {"type": "string"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]},
    }
    text = written(style, "f", [("a", value)], "\n")
    if style == "qwen3_coder" or not value.endswith("\n"):
        _, (call,) = read(style, list(text), [told])
        assert call.arguments == f'{{"a": {arguments}}}'


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        ("glm45", "<tool_call>f</tool_call> and more", " and more", [("f", "{}")]),
        ("glm45", "<tool_call>f and more", "<tool_call>f and more", []),
        ("glm45", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x", "", [("f", '{"a": x')]),
        ("glm45", "<tool_call>f<arg_key>a</tool_call>!", "!", [("f", "{<arg_key>a")]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key>x</tool_call>!", "!",
         [("f", "{<arg_key>a</arg_key>x")]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>!", "!",
         [("f", '{"a": 1x')]),
        ("qwen3_coder", "<function=f>\n</function>", "", [("f", "{}")]),
        ("qwen3_coder", "Hm.\n<function=f></function><function=g></function>\n</tool_call>!",
         "Hm.!", [("f", "{}"), ("g", "{}")]),
        ("qwen3_coder", "<tool_call><function=f<parameter=a>",
         "<tool_call><function=f<parameter=a>", []),
        ("qwen3_coder", "<tool_call>f</tool_call>", "<tool_call>f</tool_call>", []),
        ("qwen3_coder", "<function=f><parameter=a>x</parameter></function>", "",
         [("f", '{"a": "x"}')]),
        ("qwen3_coder", "<function=f><parameter=a>\n\nx\n\n</parameter></function>", "",
         [("f", '{"a": "\\nx\\n"}')]),
        ("qwen3_coder", "<function=f><parameter=a></function>!", "",
         [("f", '{"a": </function>!')]),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call> ok",
         " ok", [("f", '{"a": "x"}')]),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</tool_call>", "",
         [("f", '{"a": "x"}')]),
        ("qwen3_coder", "<function=f>\n<parameter=a>\nx\n<parameter=b>\n1\n</function>", "",
         [("f", '{"a": "x", "b": 1}')]),
        ("qwen3_coder",
         "<function=f>\n<parameter=a>\nx\n</parameter>\n<function=g>\n</function>", "",
         [("f", '{"a": "x"}'), ("g", "{}")]),
        ("qwen3_coder", "<function=f><parameter=a>\nx <parameter=b> </function> y\n</parameter>"
         "</function>", "", [("f", '{"a": "x <parameter=b> </function> y"}')]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>", "",
         [("f", '{"a": "x"}')]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>y"
         "</arg_value></tool_call>", "", [("f", '{"a": 1, "b": "y"}')]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>\n<tool_call>g"
         "</tool_call>!", "!", [("f", '{"a": 1}'), ("g", "{}")]),
    ],
)  # fmt: skip
def test_what_becomes_of_a_text(
    style: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        told, found = read(style, pieces)
        assert (told, [(call.name, call.arguments) for call in found]) == (content, calls)


def test_strings_are_given_out_as_they_come_and_other_values_when_they_are_whole() -> None:
    parser = TOOL_PARSERS["glm45"](None, ArgumentTypes([tool("f", {"a": {"type": "string"}})]))
    start = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"
    more = ['One "', "two", "</arg_value><arg_key>b</arg_key><arg_value>[1", ", 2]</arg_value>"]
    given_ = [parser.push(piece).tool_calls for piece in (start, *more, "</tool_call>")]
    assert ["".join(delta.arguments for delta in deltas) for deltas in given_] == [
        '{"a": "',
        'One \\"',
        "two",
        '", "b": ',
        "[1, 2]",
        "}",
    ]
