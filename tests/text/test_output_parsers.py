"""Reasoning and tool calls: the same whatever the pieces, nothing lost, no mark shown."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aioserve.errors import InvalidRequestError
from aioserve.text.output_parsers.completion_reader import CompletionReader
from aioserve.text.output_parsers.families import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
)
from aioserve.text.output_parsers.json_machine import JsonMachine, Place
from aioserve.text.output_parsers.parts import Parts, ToolCallDelta, short_id, whole_calls
from aioserve.text.output_parsers.reasoning import ReasoningReader
from aioserve.text.output_parsers.registry import (
    REASONING_TAGS,
    TOOL_PARSERS,
    reasoning_format_named,
    tool_parser_named,
)
from aioserve.text.output_parsers.tool_parser import ToolParser
from tests.tiers import examples
from tests.timing import seconds_computing

PARSERS: dict[str, Callable[[Callable[[], str]], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
}
"""Parsers of forms with arguments as JSON behind a mark. For others, see `test_tagged_calls` and
`test_json_calls`."""
MARKS = {name: form.marks for name, form in TOOL_PARSERS.items()}
INLINE = [name for name in TOOL_PARSERS if name != "harmony"]
"""Forms whose calls stand in the content; for the other, see `test_harmony`."""


def numbers() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"id{next(counter)}"


def parsed(style: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]], list[Parts]]:
    """Content, name and arguments of each call, and all deltas."""
    parser = TOOL_PARSERS[style](numbers())
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    deltas = [delta for part in parts for delta in part.tool_calls]
    calls = whole_calls(deltas)
    begun: set[int] = set()
    for delta in deltas:  # in order, each begins once, with its id and its name
        assert (delta.index in begun) == (delta.name is None) == (delta.id is None)
        assert delta.index in (len(begun), len(begun) - 1)
        begun.add(delta.index)
    assert len({call.id for call in calls}) == len(calls)
    content = "".join(part.content for part in parts)
    return content, [(call.name, call.arguments) for call in calls], parts


def whole(style: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    content, calls, _ = parsed(style, [text])
    return content, calls


# -- texts

names = st.from_regex(r"[a-z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
words = st.text(st.characters(codec="utf-8"), max_size=6)
arguments = st.dictionaries(
    st.one_of(words, st.sampled_from(["name", "arguments", "</tool_call>", "[TOOL_CALLS]"])),
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            words,
            st.sampled_from(["</tool_call>", "<tool_call>", '"}]', "\\", '\\"', "[ARGS]{", "😀"]),
        ),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
).flatmap(
    lambda value: st.sampled_from(
        [
            json.dumps(value),
            json.dumps(value, ensure_ascii=False),
            json.dumps(value, indent=1),
            json.dumps(value, separators=(",", ":")),
        ]
    )
)
calls_of = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)
spaces = st.sampled_from(["", " ", "\n", "\n\n"])
further_values = st.lists(arguments | st.sampled_from(['"</tool_call>"', "[[1]]"]), max_size=2)


@st.composite
def objects(draw: st.DrawFn, name: str, arguments: str, key: str) -> str:
    members = [f'"name": {json.dumps(name)}', f'"{key}": {arguments}']
    members += draw(st.sampled_from([[], ['"type": "function"'], ['"id": "x}"']]))
    further = [f'"x{index}": {value}' for index, value in enumerate(draw(further_values))]
    gap = draw(spaces)
    return "{" + gap + f",{gap}".join(draw(st.permutations(members)) + further) + gap + "}"


@st.composite
def well_formed(draw: st.DrawFn, style: str) -> tuple[str, str, list[tuple[str, str]]]:
    """A text, and its content and calls."""
    calls = draw(calls_of)
    before = draw(st.sampled_from(["", "Let me see.", "a <tool", "[TOOL", "x\n\ny", "<|python_"]))
    if style == "llama3_json" and not draw(st.booleans()):
        before, text = "", draw(spaces)
    else:
        text = before + draw(spaces) + MARKS[style][0]
    if style == "hermes":
        pieces = []
        for name, value in calls:
            inner = draw(objects(name, value, "arguments"))
            closing = draw(st.sampled_from(["</tool_call>", "\n</tool_call>", "\n"]))
            pieces.append(draw(spaces) + inner + closing + draw(spaces))
        text += MARKS[style][0].join(pieces)
    elif style.startswith("deepseek"):
        call, begin, sep, end, ends = MARKS[style]
        fenced = style == "deepseek_v3"
        pieces = []
        for name, value in calls:
            fence = ("```json\n", "\n```") if fenced and draw(st.booleans()) else ("", "")
            head = f"function{sep}{name}\n" if fenced else f"{name}{sep}"
            pieces.append(head + fence[0] + value + fence[1] + draw(spaces) + end + draw(spaces))
        text += call.join(pieces) + draw(st.sampled_from(["", ends, f"{ends}\n"]))
        if draw(st.booleans()):
            text = text.replace(call, begin + draw(spaces) + call, 1)
    elif style == "llama3_json":
        between = draw(st.sampled_from(["; ", ";", "\n", ", ", ""]))
        text += between.join([draw(objects(*call, "parameters")) for call in calls])
    elif draw(st.booleans()):
        inner = f",{draw(spaces)}".join([draw(objects(*call, "arguments")) for call in calls])
        text += f"{draw(spaces)}[{draw(spaces)}{inner}{draw(spaces)}]"
    else:
        text += MARKS[style][0].join(
            [
                draw(st.sampled_from([f"{name}[ARGS]", name, f"{name}[CALL_ID]a1[ARGS]"])) + value
                for name, value in calls
            ]
        )
    return text, before, calls


def confusing(style: str) -> st.SearchStrategy[str]:
    """Marks, parts of marks, and JSON that may or may not be a call."""
    parts = [part for mark in MARKS[style] for part in (mark, mark[:-1], mark[1:])]
    json_parts = [
        *'{}[]",:;\\ \n',
        '{"name": "f", ',
        '"arguments": {',
        '"parameters": {}}',
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "arguments": {"a": tru}}',
        '"\\u12',
        "12e",
        "f[ARGS]{",
        "f",
        "function",
        "```json",
        "```",
        "f>",
        "a</arg_key>",
        "<parameter=a>",
        "\n</parameter>",
        "true",
        "text",
    ]
    return st.lists(st.sampled_from(parts + json_parts), max_size=12).map("".join)


def cuts(draw: Any, text: str) -> list[str]:
    at = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in itertools.pairwise([0, *at, len(text)])]


# -- properties


@pytest.mark.parametrize("style", PARSERS)
def test_calls_are_found_and_content_is_what_is_around_them(style: str) -> None:
    @settings(max_examples=examples(100))
    @given(well_formed(style), st.data())
    def check(made: tuple[str, str, list[tuple[str, str]]], data: st.DataObject) -> None:
        text, content, calls = made
        assert whole(style, text) == (content, calls)
        assert parsed(style, cuts(data.draw, text))[:2] == (content, calls)
        assert parsed(style, list(text))[:2] == (content, calls)
        assert not any(mark in content for mark in MARKS[style])

    check()


@pytest.mark.parametrize("style", INLINE)
def test_pieces_make_no_difference_and_nothing_is_lost(style: str) -> None:
    @settings(max_examples=examples(200))
    @given(confusing(style), st.data())
    def check(text: str, data: st.DataObject) -> None:
        content, calls = whole(style, text)
        assert parsed(style, cuts(data.draw, text))[:2] == (content, calls)
        assert parsed(style, list(text))[:2] == (content, calls)
        if not calls:
            assert content == text
        # Every letter is somewhere: only marks, white space and the brackets of calls go.
        given_ = content + "".join(name + value for name, value in calls)
        for letters in ("text", "tru"):
            assert given_.count(letters) == text.count(letters)

    check()


broken = st.sampled_from(
    [
        ', "x": tru!',
        ', "x" 2}',
        ', "x": "</tool',
        ", x",
        ": 1}]",
        '"',
        "; x",
        ', "x": [1}',
        ', "x": {"name": "f", "arguments": {}}, 5',
    ]
)


@pytest.mark.parametrize("style", ["hermes", "llama3_json", "mistral"])
def test_what_is_no_json_behind_arguments_is_content_as_it_stands(style: str) -> None:
    @settings(max_examples=examples(100))
    @given(names, arguments, st.booleans(), broken, st.data())
    def check(name: str, value: str, is_closed: bool, rest: str, data: st.DataObject) -> None:
        text = f'{MARKS[style][0]}{{"name": "{name}", "arguments": {value}'
        if is_closed:
            text += "}"
            rest = data.draw(st.sampled_from([rest, "}"]))
        between, after = data.draw(spaces), data.draw(st.sampled_from(["", " and more\n", "x"]))
        if style == "hermes":
            text += f"{rest}{between}</tool_call>{after}"
            content = rest + after
        else:
            text += rest + between + after
            content = rest + between + after
        if style == "mistral" and data.draw(st.booleans()):
            text = text.replace("[TOOL_CALLS]", "[TOOL_CALLS] [", 1)
        assert whole(style, text) == (content, [(name, value)])
        assert parsed(style, cuts(data.draw, text))[:2] == (content, [(name, value)])
        assert parsed(style, list(text))[:2] == (content, [(name, value)])

    check()


@pytest.mark.parametrize("style", INLINE)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40), data=st.data())
def test_text_without_a_call_is_content(style: str, text: str, data: st.DataObject) -> None:
    content, calls, parts = parsed(style, cuts(data.draw, text))
    assert (content, calls) == (text, [])
    assert all(not part.tool_calls for part in parts)


@given(arguments, st.data())
def test_the_machine_takes_json_and_ends_where_it_ends(text: str, data: st.DataObject) -> None:
    machine, at = JsonMachine(), 0
    whole_text = text + data.draw(st.sampled_from(["", "x", "}", " "]))
    while machine.place is not Place.DONE:
        at = machine.read(whole_text[: data.draw(st.integers(at + 1, len(whole_text)))], at)
        assert at > 0
    assert whole_text[:at] == text


@given(arguments, st.data())
@example('{"a": [01]}', None)
@example('{"a": -}', None)
@example('{"a": 1.}', None)
@example('{"a": "\n"}', None)
@example('{"a" 1}', None)
@example('{"a": 1,}', None)
@example('{"a": [1,]}', None)
@example('{"a": nul}', None)
@example('{"a": "\\x"}', None)
@example("{1: 2}", None)
@example('{"a": 1]', None)
def test_the_machine_refuses_what_no_json_starts_with(text: str, data: Any) -> None:
    if data is not None:
        at = data.draw(st.integers(0, len(text) - 1))
        char = data.draw(st.sampled_from('{}[]",:\\ 019.eE+-truefalsn\n\x00x'))
        text = text[:at] + char + text[at + data.draw(st.integers(0, 1)) :]
    machine, at = JsonMachine(), 0
    while at < len(text) and machine.place is not Place.DONE:
        if (end := machine.read(text, at)) < 0:
            break
        at = end
    is_json = machine.place is Place.DONE and not text[at:].strip(" \t\r\n")
    try:
        json.loads(text)
        assert is_json
    except ValueError:
        assert not is_json


RUNS = st.lists(st.sampled_from(["0", "1", "9" * 3, "0" * 4, "7" * 600, ".", "e", "E+", "-"]))


@given(RUNS.map("".join), st.sampled_from(["", "[", "x", "-"]))
@example("7" * 600, "")
@example("1." + "0" * 600, "")
@example("0" * 600, "")
@example("1e" + "0" * 600, "")
@example("-" + "7" * 600 + ".", "")
def test_a_number_is_one_however_long_it_is(number: str, behind: str) -> None:
    machine, at, text = JsonMachine(), 0, f"[{number}{behind}]"
    while at < len(text) and machine.place is not Place.DONE:
        if (end := machine.read(text, at)) < 0:
            break
        at = end
    is_json = re.fullmatch(r"(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?)?", number)
    assert (machine.place is Place.DONE) == (is_json is not None and not behind)


# -- reasoning


@pytest.mark.parametrize("is_open", [False, True])
@given(
    st.text(st.sampled_from("ab\n <>/think"), max_size=30),
    st.text(st.sampled_from("ab\n <>/think"), max_size=30),
    st.booleans(),
    spaces,
    st.data(),
)
def test_reasoning_is_what_is_between_the_tags(
    is_open: bool, reasoning: str, content: str, tagged: bool, space: str, data: st.DataObject
) -> None:
    text = f"{space}<think>{space}{reasoning}{space}</think>{space}{content}"
    if not tagged:
        text = f"{space}{reasoning}</think>{content}" if is_open else f"{space}x{content}"

    def split(pieces: list[str]) -> tuple[str, str]:
        reader = ReasoningReader("<think>", "</think>", is_open=is_open)
        parts = [reader.push(piece) for piece in pieces] + [reader.finish()]
        return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)

    found = split([text])
    assert split(cuts(data.draw, text)) == split(list(text)) == found
    if "</think>" in reasoning + content or reasoning.lstrip().startswith("<think>"):
        return
    if not tagged and not is_open:
        assert found == ("", text)
    else:
        assert found == (reasoning.strip(), content.lstrip())


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\n\n</think>\n\nHi", False, "", "Hi"),
        ("<think>cut off", False, "cut off", ""),
        ("<think>cut off</thi", False, "cut off</thi", ""),
        ("cut off ", True, "cut off ", ""),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("a</think><think>b</think>", True, "a", "<think>b</think>"),
        ("\n<thin", False, "", "\n<thin"),
        ("", True, "", ""),
    ],
)
def test_tags_count_where_an_answer_begins(
    text: str, is_open: bool, reasoning: str, content: str
) -> None:
    reader = ReasoningReader("<think>", "</think>", is_open=is_open)
    pieces = [reader.push(char) for char in text] + [reader.finish()]
    assert "".join(piece.reasoning for piece in pieces) == reasoning
    assert "".join(piece.content for piece in pieces) == content


# -- one by one

CALL = '{"name": "f", "arguments": {"a": 1}}'
F = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call> and more", " and more", [F]),
        ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>", "", [F]),
        ("hermes", f"<tool_call>{CALL}}}</tool_call>", "}", [F]),
        ("hermes", f'<tool_call>{CALL[:-1]}, "x": "y"}}</tool_call>!', "!", [F]),
        ("hermes", f"<tool_call>{CALL[:-1]}, <tool_call>{CALL}", ",", [F, F]),
        ("hermes", f"<tool_call>{CALL}}}<tool_call>[1]</tool_call>",
         "}<tool_call>[1]</tool_call>", [F]),
        ("llama3_json", f'{CALL[:-1]}, "x": 1}}', "", [F]),
        ("llama3_json", f'{CALL[:-1]}, "x" 2}} trailing', ', "x" 2} trailing', [F]),
        ("mistral", f'[TOOL_CALLS] [{CALL[:-1]}, "x": 1}}]', "", [F]),
        ("mistral", f"[TOOL_CALLS] [{CALL[:-1]}, {CALL[:-1]}]", "", [F, F]),
        ("hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("hermes", ' <tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "id": "1"}\n</tool_call>!', "!", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}, {"name": "g"}]', "", [("f", "{}"), ("g", "{}")]),
        ("llama3_json", '{"name": "f"}', '{"name": "f"}', []),
        ("json", '{"name": "f"}', '{"name": "f"}', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}', None, []),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}', None, []),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}', None, []),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}', None, []),
        ("hermes", '<tool_call>{"name": "f", "x": 1, "arguments": {}}', None, []),
        ("hermes", f"<tool_call>{{x<tool_call>{CALL}", "<tool_call>{x", [F]),
        ("hermes", f'<tool_call>{CALL[:-2]}, "b": tru}}}}</tool_call>!', "!",
         [("f", '{"a": 1, "b": tru}}')]),
        ("hermes", f"<tool_call>{CALL[:-3]}", "", [("f", '{"a": ')]),
        ("hermes", "<tool_call>\n", "<tool_call>\n", []),
        ("llama3_json", CALL, "", [F]),
        ("llama3_json", f"<|python_tag|>{CALL}; {CALL}", "", [F, F]),
        ("llama3_json", f"Sure. <|python_tag|>{CALL}", "Sure.", [F]),
        ("llama3_json", f"Sure. {CALL}", f"Sure. {CALL}", []),
        ("llama3_json", '<|python_tag|>f.call(a="b")', '<|python_tag|>f.call(a="b")', []),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3_json", f"{CALL}; done", "; done", [F]),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [F, F]),
        ("mistral", f"[TOOL_CALLS]{CALL}", "", [F]),
        ("mistral", "Hm. [TOOL_CALLS]f[ARGS]" + F[1], "Hm.", [F]),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{F[1]} [TOOL_CALLS]f{F[1]}\n", "", [F, F]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{x[TOOL_CALLS]f[ARGS]" + F[1], "", [("f", "{x"), F]),
        ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
        ("mistral", "[TOOL_CALLS]f(a)", "[TOOL_CALLS]f(a)", []),
        ("mistral", f"[TOOL_CALLS] [{CALL} oops", " oops", [F]),
    ],
)  # fmt: skip
def test_what_becomes_of_a_text(
    style: str, text: str, content: str | None, calls: list[tuple[str, str]] | None
) -> None:
    if calls is None:
        calls, content = [], text
    assert whole(style, text) == (text if content is None else content, calls)


def test_content_and_arguments_are_given_out_as_they_come() -> None:
    parser = HermesParser(numbers())
    pieces = [
        "Hi ",
        "<to",
        "ol_call>",
        '{"name": "f", ',
        '"arguments": {"a',
        '": 1}',
        "}",
        "</tool",
    ]
    parts = [parser.push(piece) for piece in pieces]
    assert parts == [
        Parts("Hi"),
        Parts(),
        Parts(),
        Parts(),
        Parts(tool_calls=(ToolCallDelta(0, "id0", "f", '{"a'),)),
        Parts(tool_calls=(ToolCallDelta(0, arguments='": 1}'),)),
        Parts(),
        Parts(),
    ]
    assert parser.push("_call>") == parser.finish() == Parts()


@pytest.mark.more
@pytest.mark.parametrize(
    ("form", "start"),
    [
        ("hermes", "a"),
        ("hermes", f"<tool_call>{CALL}}}"),
        ("hermes", '<tool_call>{"name": "f", '),
        ("hermes", f"<tool_call>{CALL[:-1]}"),
        ("llama3_json", ""),
        ("mistral", "[TOOL_CALLS] ["),
        ("reasoning", ""),
        ("reasoning", "<think>a"),
        ("reasoning", "<think>a</think>"),
    ],
)
def test_white_space_takes_time_in_proportion(form: str, start: str) -> None:
    def seconds(count: int) -> float:
        def once() -> float:
            if form == "reasoning":
                push = ReasoningReader("<think>", "</think>", is_open=False).push
            else:
                push = PARSERS[form](numbers()).push
            push(start)
            return seconds_computing(lambda: [push(" " * 500) for _ in range(count)])

        return min(once() for _ in range(3))

    assert seconds(3200) < 24 * seconds(400)  # eight times as much: 64 times if all is read anew


def test_an_object_that_is_no_call_is_given_out_when_its_first_key_shows_it() -> None:
    parser = Llama3JsonParser()
    assert parser.push('{"answer').content == ""
    assert parser.push('": 4').content == '{"answer": 4'


def test_ids_are_as_the_models_templates_take_them() -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", short_id())
    (delta,) = MistralParser().push("[TOOL_CALLS]f[CALL_ID]abc[ARGS]{").tool_calls
    assert delta.id == "abc"
    (delta,) = HermesParser().push(f"<tool_call>{CALL}").tool_calls
    assert re.fullmatch("call_[0-9a-f]{24}", delta.id or "")


def test_reasoning_comes_before_calls_and_calls_in_it_are_none() -> None:
    text = f"<think>a<tool_call>{CALL}</tool_call></think>\n\nb\n<tool_call>{CALL}</tool_call>"
    for is_open, given_ in ((False, text), (True, text.removeprefix("<think>"))):
        for pieces in ([given_], list(given_)):
            reader = CompletionReader(
                TOOL_PARSERS["hermes"], REASONING_TAGS["qwen3"], opened="<think>" * is_open
            )
            parts = [reader.push(piece) for piece in pieces] + [reader.finish()]
            assert "".join(p.reasoning for p in parts) == f"a<tool_call>{CALL}</tool_call>"
            assert "".join(p.content for p in parts) == "b"
            (call,) = whole_calls(d for p in parts for d in p.tool_calls)
            assert (call.name, call.arguments) == F


def test_a_reader_without_forms_gives_the_text() -> None:
    reader = CompletionReader(None, None, opened="<think>")
    assert [reader.push("<think>"), reader.push(""), reader.finish()] == [
        Parts("<think>"),
        Parts(),
        Parts(),
    ]


# -- which form

SOURCES = {
    "hermes": "{{ '<tool_call>' ~ call | tojson ~ '</tool_call>' }}",
    "llama3_json": "{{ '<|start_header_id|>' }}{{ '{\"name\": f, \"parameters\": x}' }}",
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "glm45": "{{ '<tool_call>' ~ name ~ '\n<arg_key>' ~ key ~ '</arg_key>' }}",
    "qwen3_coder": "{{ '<tool_call>\n<function=' ~ name ~ '>\n<parameter=' ~ key ~ '>' }}",
}


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS.keys() & SOURCES.keys()))
def test_the_form_of_tool_calls_is_named_or_the_templates(name: str) -> None:
    form = TOOL_PARSERS[name]
    assert tool_parser_named("auto", SOURCES[name], has_tools=True) is form
    assert tool_parser_named("auto", SOURCES[name], has_tools=False) is None
    assert tool_parser_named(name, "", has_tools=False) is form
    assert tool_parser_named("none", SOURCES[name], has_tools=True) is None


@pytest.mark.parametrize("source", ["{{ tools }}", "<tool_call><function="])
def test_where_no_form_is_known_one_must_be_named(source: str) -> None:
    with pytest.raises(
        InvalidRequestError, match="tool_parser must be named, one of hermes"
    ) as got:
        tool_parser_named("auto", source, has_tools=True)
    assert got.value.argument == "tool_parser"


def test_the_form_of_reasoning_is_named_or_the_templates() -> None:
    assert reasoning_format_named("auto", "{{ x.split('</think>') }}") is REASONING_TAGS["qwen3"]
    assert reasoning_format_named("auto", "[THINK][/THINK]") is REASONING_TAGS["mistral"]
    assert reasoning_format_named("auto", "{{ 'assistant\n<think>' }}") is REASONING_TAGS["qwen3"]
    assert reasoning_format_named("auto", "plain") is None
    assert reasoning_format_named("deepseek_r1", "plain") is REASONING_TAGS["deepseek_r1"]
    assert reasoning_format_named("none", "</think>") is None


@pytest.mark.parametrize(
    ("name", "prompt_end", "begun", "is_open"),
    [
        ("qwen3", "assistant\n", "", False),
        ("qwen3", "assistant\n<think>\n", "", True),
        ("qwen3", "what is <think> for?", "", False),
        ("qwen3", "<think>\nLet me", "<think>\nLet me", True),
        ("qwen3", "me", "\n<think>Let me", True),
        ("qwen3", "me", "<think>" + "x" * 2**21, True),
        ("qwen3", "<think>a</think>b", "<think>a</think>b", False),
        ("qwen3", "the tag <think> is", "the tag <think> is", False),
        ("qwen3", "a <think>", "a <think>", True),
        ("mistral", "[THINK]a", "[THINK]a", True),
        ("deepseek_r1", "assistant", "", True),
        ("deepseek_r1", "a", "a", True),
        ("deepseek_r1", "a</think>b", "a</think>b", False),
    ],
)
def test_reasoning_is_open_where_the_prompt_or_the_message_that_goes_on_leaves_it_open(
    name: str, prompt_end: str, begun: str, is_open: bool
) -> None:
    assert REASONING_TAGS[name].is_open_after(prompt_end, begun) is is_open


def test_names_of_forms_may_be_of_any_class_of_str() -> None:
    class Name(StrEnum):
        AUTO = "auto"
        NONE = "none"
        HERMES = "hermes"
        QWEN3 = "qwen3"

    assert tool_parser_named(Name.HERMES, "", has_tools=True) is TOOL_PARSERS["hermes"]
    assert (
        tool_parser_named(Name.AUTO, SOURCES["mistral"], has_tools=True) is TOOL_PARSERS["mistral"]
    )
    assert tool_parser_named(Name.NONE, SOURCES["mistral"], has_tools=True) is None
    assert reasoning_format_named(np.str_("qwen3"), "") is REASONING_TAGS["qwen3"]
    assert reasoning_format_named(Name.NONE, "</think>") is None


@pytest.mark.parametrize("value", ["Hermes", None, 5, ["hermes"], np.array(["hermes", "none"])])
def test_unknown_forms_are_refused_by_name(value: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match="tool_parser must be one of 'auto', 'none', 'hermes'"
    ):
        tool_parser_named(value, "", has_tools=True)
    with pytest.raises(
        InvalidRequestError, match="reasoning_parser must be one of 'auto', 'none', 'qw"
    ):
        reasoning_format_named(value, "")
