"""Completions that are either calls of tools or JSON of a form. Nothing else is drawn, and a reader
takes them for what they are, whatever the strings of the form hold."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import InvalidSamplingError
from aioserve.grammars.call_rules import Style
from aioserve.grammars.calls import calls_output
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.structured_output import StructuredOutput
from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.completion_reader import CompletionReader
from aioserve.text.output_parsers.parts import Parts, joined, whole_calls
from aioserve.text.output_parsers.reasoning import ReasoningTags
from aioserve.text.output_parsers.registry import TOOL_PARSERS
from tests.grammars.test_calls import (
    END_ID,
    FREE,
    LURES,
    MARKS,
    QWEN,
    SCHEMAS,
    TOOLS,
    VOCABULARY,
    WAYS,
    Drawn,
    call_in,
)

STYLES = [name for name, parser in TOOL_PARSERS.items() if parser.opens and name != "harmony"]
TAGS = {mark for parser in TOOL_PARSERS.values() for mark in parser.marks} | {*QWEN.marks}
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "n": {"enum": [1, 2]}},
    "required": ["text", "n"],
    "additionalProperties": False,
}
OF_FORM = StructuredOutput(json_schema=FORM)
SAID = '{"text": "'
_COMPILED: dict[tuple[Any, ...], CompiledGrammar] = {}


def grammar_of(
    name: str,
    form: StructuredOutput = OF_FORM,
    reasoning: ReasoningTags | None = None,
    *,
    is_open: bool = False,
    one: bool = False,
) -> CompiledGrammar:
    names = VOCABULARY[0].special_names
    style = Style(
        tools=name,
        reasoning=None if reasoning is None else (reasoning.opens, reasoning.closes),
        is_open=is_open,
        specials={text: i for i, text in names.items() if text in TOOL_PARSERS[name].marks},
    )
    output = calls_output(style, [*TOOLS, *FREE], {*SCHEMAS, "now"}, one=one, form=form)
    return compile_grammar(VOCABULARY[1], output)


def kept_grammar(name: str) -> CompiledGrammar:
    if (name,) not in _COMPILED:
        _COMPILED[name,] = grammar_of(name)
    return _COMPILED[name,]


def read(name: str, reasoning: ReasoningTags | None, is_open: bool, texts: list[str]) -> Parts:
    types = ArgumentTypes([*TOOLS, *FREE])
    parser = TOOL_PARSERS[name]
    reader = CompletionReader(
        parser, reasoning, opened="<think>" * is_open, types=types, alone=True
    )
    return joined([*(reader.push(text) for text in texts), reader.finish()])


def told_of(parts: Parts) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for call in whole_calls(parts.tool_calls)]
    return parts.content, parts.reasoning, calls


def takes(name: str, text: str, grammar: CompiledGrammar | None = None) -> bool:
    """Return true if the grammar allows this text, which a model writes with its special tokens."""
    matcher = (grammar or kept_grammar(name)).matcher({END_ID})
    written = all(matcher.accept(token_id) for token_id in VOCABULARY[0].encode(text))
    return written and matcher.is_accepting


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize(("reasoning", "is_open"), WAYS)
@pytest.mark.parametrize("name", STYLES)
def test_whatever_is_drawn_is_calls_or_the_form(
    name: str, reasoning: ReasoningTags | None, is_open: bool, one: bool
) -> None:
    grammar = grammar_of(name, reasoning=reasoning, is_open=is_open, one=one)
    rng = random.Random(0)
    num_forms = num_calls = 0
    for seed in range(45):
        begun = ("hm</think>\n\n" if is_open else "") + ("", SAID, MARKS[name])[seed % 3]
        if reasoning is not None and not is_open and seed % 2:
            begun = f"<think>hm</think>\n\n{begun}"
        drawn = Drawn(grammar, VOCABULARY[0], seed, begun, [*LURES, SAID, '", "n": 1}'])
        content, _, calls = told_of(read(name, reasoning, is_open, [drawn.text]))
        cuts = sorted(rng.choices(range(len(drawn.text) + 1), k=5))
        pieces = [drawn.text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        for texts in (list(drawn.text), pieces):
            assert told_of(read(name, reasoning, is_open, texts)) == told_of(
                read(name, reasoning, is_open, [drawn.text])
            )
        assert not (content and calls), drawn.text
        assert not one or len(calls) < 2, drawn.text
        if not drawn.has_ended:
            continue
        if not calls:
            jsonschema.validate(json.loads(content), FORM)
        num_forms += not calls
        num_calls += len(calls)
        for called, arguments in calls:
            none = {"type": "object", "maxProperties": 0 if called == "now" else 99}
            jsonschema.validate(json.loads(arguments), SCHEMAS.get(called, none))
    assert num_forms
    assert num_calls


TEXTS = st.text(st.characters(exclude_characters="\x7f", codec="utf-8"), max_size=8)
"""Texts without the one character that grammars of JSON allow in strings only as an escape."""


@given(
    name=st.sampled_from(STYLES),
    parts=st.lists(st.sampled_from([*LURES, *sorted(TAGS)]) | TEXTS, max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_marks_in_strings_of_the_form_are_text(
    name: str, parts: list[str], cuts: list[int]
) -> None:
    text = json.dumps({"text": "".join(parts), "n": 1}, ensure_ascii=False)
    matcher = kept_grammar(name).matcher({END_ID})
    assert all(matcher.accept(token_id) for token_id in text.encode())
    assert matcher.is_accepting
    places = [0, *sorted([min(cut, len(text)) for cut in cuts]), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert told_of(read(name, None, False, pieces)) == (text, "", [])
    behind = read(name, QWEN, False, ["<think>hm</think>", *pieces])
    assert told_of(behind) == (text, "hm", [])


def written(name: str) -> str:
    """A call, without text before it."""
    ids = call_in(name, "free", '{"a": "b"}')
    return VOCABULARY[0].decode(ids, skip_special_tokens=False).removeprefix("Let me see.")


@pytest.mark.parametrize("name", STYLES)
def test_there_is_no_text_beside_calls_nor_beside_the_form(name: str) -> None:
    call, form = written(name), '{"text": "", "n": 2}'
    for taken in (call, f"{call}{call}", f"{call}\n{call}", form):
        assert takes(name, taken), taken
    for not_taken in (
        *("", "Rain.", f"Let me see. {call}", f"Let me see. {form}", f"{call} There."),
        *(f"{call}{form}", f"{form}{call}", f"{form}\n{call}", f"{form} There.", '{"n": 2}'),
    ):
        assert not takes(name, not_taken), not_taken
    parts = told_of(read(name, None, False, [f"{call}\n{call}"]))
    assert parts == ("", "", [("free", '{"a": "b"}')] * 2)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", STYLES)
def test_reasoning_alone_is_no_answer(name: str, is_open: bool) -> None:
    grammar = grammar_of(name, reasoning=QWEN, is_open=is_open)
    opens = "" if is_open else "<think>"
    assert not takes(name, f"{opens}hm", grammar)
    assert not takes(name, f"{opens}hm</think>", grammar)
    assert not takes(name, f"{opens}hm</think>Rain.", grammar)
    for answer in ('{"text": "", "n": 2}', written(name)):
        assert takes(name, f"{opens}hm</think>\n\n{answer}", grammar)
        assert takes(name, answer, grammar) is not is_open


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31", "qwen3_coder"])
def test_marks_around_calls_may_be_there(name: str) -> None:
    calls, calls_end = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
    inner = written(name).removesuffix(calls_end)
    if name == "qwen3_coder":
        calls, calls_end = "<tool_call>\n", "\n</tool_call>"
        inner = inner.removeprefix(calls).removesuffix(calls_end)
    for text in (inner, f"{calls}{inner}", f"{inner}{calls_end}", f"{calls}{inner}{calls_end}"):
        assert takes(name, text), text
        assert told_of(read(name, None, False, list(text)))[2] == [("free", '{"a": "b"}')]


@pytest.mark.parametrize("name", STYLES)
def test_a_call_that_is_cut_off_is_no_content(name: str) -> None:
    call = f"\n{written(name)}"
    for end in range(len(call)):
        content, _, calls = told_of(read(name, None, False, [call[:end]]))
        assert content == "", call[:end]
        assert len(calls) < 2


@pytest.mark.parametrize(
    ("form", "argument", "why"),
    [
        (StructuredOutput(json_schema={"unevaluatedItems": False}), "json_schema", "unevaluated"),
        (StructuredOutput(json_schema=False), "json_schema", "false"),
        (
            StructuredOutput(json_schema={"$ref": "https://a.example/b"}),
            "json_schema",
            "refers to",
        ),
    ],
)
def test_a_form_that_cannot_be_kept_is_refused_by_its_own_name(
    form: StructuredOutput, argument: str, why: str
) -> None:
    with pytest.raises(InvalidSamplingError, match=why) as told:
        grammar_of("hermes", form)
    assert told.value.argument == argument


@pytest.mark.parametrize(
    ("max_whitespace", "taken"), [(0, ["{}"]), (None, ["{}", '{"a": 1}']), (2, ["{}", '{"a": 1}'])]
)
def test_white_space_of_the_form_is_its_own(max_whitespace: int, taken: list[str]) -> None:
    form = StructuredOutput(json_object=True, max_whitespace=max_whitespace)
    grammar = grammar_of("hermes", form)
    texts = ["{}", '{"a": 1}', "[]"]
    assert [text for text in texts if takes("hermes", text, grammar)] == taken
