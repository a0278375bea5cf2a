"""Calls without a mark beside a form: both are JSON, and how it begins says which it is."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from aioserve import InvalidSamplingError, StructuredOutput
from aioserve.grammars.call_rules import Style
from aioserve.grammars.calls import calls_output
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.text.output_parsers.completion_reader import CompletionReader
from aioserve.text.output_parsers.parts import Parts, joined, whole_calls
from aioserve.text.output_parsers.registry import TOOL_PARSERS
from tests.grammars.test_calls import END_ID, FREE, LURES, SCHEMAS, TOOLS, VOCABULARY, Drawn

STYLES = {"llama3_json": "parameters", "json": "arguments"}
NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"enum": [1, 2]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
"""A form that begins as a call does."""
LISTED = {"type": "array", "items": NAMED, "maxItems": 2}


def grammar_of(style: str, form: Any, max_whitespace: int | None = None) -> CompiledGrammar:
    output = calls_output(
        Style(tools=style),
        [*TOOLS, *FREE],
        {*SCHEMAS, "now"},
        one=False,
        max_whitespace=max_whitespace,
        form=StructuredOutput(json_schema=form, max_whitespace=max_whitespace),
    )
    return compile_grammar(VOCABULARY[1], output)


def told_of(style: str, texts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = CompletionReader(TOOL_PARSERS[style], None, alone=True)
    parts: Parts = joined([*(reader.push(text) for text in texts), reader.finish()])
    return parts.content, [(c.name, c.arguments) for c in whole_calls(parts.tool_calls)]


@pytest.mark.parametrize("form", [NAMED, LISTED], ids=["object", "list"])
@pytest.mark.parametrize("max_whitespace", [None, 0, 2])
@pytest.mark.parametrize("style", STYLES)
def test_whatever_is_drawn_is_calls_or_the_form(
    style: str, max_whitespace: int | None, form: Any
) -> None:
    grammar = grammar_of(style, form, max_whitespace)
    key, colon = STYLES[style], ":" if max_whitespace == 0 else ": "
    rng = random.Random(0)
    num_forms = num_calls = 0
    for seed in range(45):
        begun = ('{"name"', f'{{"name"{colon}"free"', "[", "")[seed % 4]
        lures = [*LURES, f'"{key}"{colon}{{}}', '"n"', "}", "]", "1"]
        if form is LISTED and begun.startswith("{") and style == "json":
            lures = [*lures, f',"{key}"']
        drawn = Drawn(grammar, VOCABULARY[0], seed, begun, lures)
        content, calls = told_of(style, [drawn.text])
        cuts = sorted(rng.choices(range(len(drawn.text) + 1), k=5))
        pieces = [drawn.text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert told_of(style, list(drawn.text)) == told_of(style, pieces) == (content, calls)
        assert not (content and calls), drawn.text
        if not drawn.has_ended:
            continue
        if not calls:
            jsonschema.validate(json.loads(content), form)
        num_forms += not calls
        num_calls += len(calls)
        for name, arguments in calls:
            none = {"type": "object", "maxProperties": 0 if name == "now" else 99}
            jsonschema.validate(json.loads(arguments), SCHEMAS.get(name, none))
    assert num_forms
    assert num_calls


@pytest.mark.parametrize("max_whitespace", [None, 0, 2])
@pytest.mark.parametrize("style", STYLES)
def test_either_is_written_as_models_write_it(style: str, max_whitespace: int | None) -> None:
    key = STYLES[style]
    grammar = grammar_of(style, NAMED, max_whitespace)
    call = f'{{"name": "free", "{key}": {{"a": "b"}}}}'
    texts = {
        call: ("", [("free", '{"a": "b"}')]),
        '{"name": "free", "n": 1}': ('{"name": "free", "n": 1}', []),
        f'{{"name": "free", "n": 1, "{key}": {{}}}}': None,
        f'{{"name": "free", "{key}": {{}}, "n": 1}}': None,
        '{"name": "free"}': None,
        f"{call} There.": None,
        "": None,
    }
    for text, told in texts.items():
        written = text
        if max_whitespace == 0:
            written = text.replace(": ", ":").replace(", ", ",")
            told = told and (told[0].replace(": ", ":").replace(", ", ","), told[1])
        matcher = grammar.matcher({END_ID})
        taken = matcher.accept_all(written.encode()) and matcher.is_accepting
        assert taken == (told is not None), written
        if told is not None:
            content, calls = told_of(style, list(written))
            assert (content, [(name, json.loads(text)) for name, text in calls]) == (
                told[0],
                [(name, json.loads(text)) for name, text in told[1]],
            )


CALL: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "lists"),
    [
        (True, [False, True]),
        ({"type": "object"}, [False, True]),
        (CALL, [False, True]),
        ({"anyOf": [{"type": "null"}, CALL]}, [False, True]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [CALL, {}]}}}, [False, True]),
        ({"enum": [1, {"name": "f", "arguments": {}}]}, [False, True]),
        ({"type": "object", "properties": {"answer": {"type": "string"}}}, [False, True]),
        ({"type": "array", "items": CALL}, [True]),
        ({"type": "array"}, [True]),
        ({"const": [{"name": "f", "arguments": {}}]}, [True]),
        ({"type": "array", "items": CALL, "prefixItems": [NAMED]}, []),
        ({"type": "array", "items": {"type": "array", "items": CALL}}, []),
        (NAMED, []),
        ({"type": "integer"}, []),
        (CALL | {"properties": {"name": {"type": "string"}, "parameters": {"type": "null"}}}, []),
        (CALL | {"properties": {"name": {"type": "integer"}, "parameters": True}}, []),
        ({"allOf": [{"type": "object"}, NAMED]}, []),
        ({"enum": [1, {"name": "f"}]}, []),
    ],
)
def test_a_form_is_refused_where_it_takes_a_call(form: Any, lists: list[bool]) -> None:
    for style in STYLES:
        is_refused = TOOL_PARSERS[style].takes_lists in lists
        if is_refused:
            with pytest.raises(InvalidSamplingError, match="no object with a name") as refused:
                grammar_of(style, form)
            assert refused.value.argument == "json_schema"
        else:
            grammar_of(style, form)


@pytest.mark.parametrize("style", STYLES)
def test_the_start_of_a_text_that_tells_nothing_yet_is_held_and_given_out(style: str) -> None:
    for text in ("", " ", '{"name": "f', '[{"name"', '{"name": "f"', "{", " [", '["a"'):
        assert told_of(style, list(text)) == (text, [])
