"""Required calls, as each family of models writes them. Every drawn completion holds at least one
call of a required tool, and nothing else beside reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsonschema
import pytest

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.call_rules import Style
from aioserve.grammars.calls import calls_output
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.request import SamplingParams
from aioserve.text.assembler import TextAssembler
from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.completion_reader import CompletionReader
from aioserve.text.output_parsers.harmony import HarmonyChannels, HarmonyParser
from aioserve.text.output_parsers.parts import Parts, joined, whole_calls
from aioserve.text.output_parsers.registry import REASONING_TAGS, TOOL_PARSERS
from tests.grammars.test_calls import END_ID, FREE, LURES, MARKS, SCHEMAS, TOOLS, VOCABULARY, Drawn
from tests.text import test_harmony as harmony

TOKENIZER, WORDS = VOCABULARY
NAMES = [name for name, parser in TOOL_PARSERS.items() if parser.opens]
THINKS = REASONING_TAGS["qwen3"]
REQUIRED = frozenset(["weather", "move"])
HEAD = f"{harmony.CHANNEL}commentary to=functions.move{harmony.MESSAGE}"
CALL = f'{HEAD}{{"to": "north"}}'
ANALYSIS, AGAIN, FINAL = harmony.ANALYSIS, harmony.AGAIN, harmony.FINAL
MORE = (ANALYSIS, AGAIN, FINAL, harmony.COMMENTARY, HEAD, harmony.CALL, '{"to": "north"}')


def grammar_of(
    name: str, *, required: frozenset[str] = REQUIRED, one: bool = False, opened: str = ""
) -> CompiledGrammar:
    ids = {mark: i for i, mark in TOKENIZER.special_among(TOOL_PARSERS[name].marks).items()}
    tags = None if name == "harmony" else (THINKS.opens, THINKS.closes)
    exact = frozenset() if TOOL_PARSERS[name].takes_typed_marks else frozenset(ids)
    style = Style(tools=name, reasoning=tags, opened=opened, specials=ids, exact=exact)
    # None of them is strict beside that.
    output = calls_output(style, [*TOOLS, *FREE], frozenset(), one=one, required=required)
    return compile_grammar(WORDS, output)


def read(name: str, ids: Sequence[int]) -> Parts:
    parser = TOOL_PARSERS[name]
    shown = TOKENIZER.special_among(parser.marks)
    reader = CompletionReader(
        parser,
        HarmonyChannels() if parser is HarmonyParser else THINKS,
        types=ArgumentTypes([*TOOLS, *FREE]),
        alone=True,
        exact=() if parser.takes_typed_marks else tuple(shown.values()),
    )
    texts = TextAssembler(TOKENIZER, SamplingParams(), shown)
    pieces = [*(texts.push(token_id)[0] for token_id in ids if token_id != END_ID), texts.finish()]
    return joined([*(reader.push(one, texts.marks_in(one)) for one in pieces), reader.finish()])


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_drawn_is_calls_of_required_tools(name: str, one: bool) -> None:
    grammar = grammar_of(name, one=one)
    most = 0
    for seed in range(40):
        begun = ("", "<think>hm</think>", MARKS.get(name, ""))[seed % 3]
        drawn = Drawn(grammar, TOKENIZER, seed, begun, [*LURES, *MORE])
        parts = read(name, drawn.ids)
        calls = whole_calls(parts.tool_calls)
        assert parts.content == "", drawn.text
        assert len(calls) < 2 or not one, drawn.text
        assert calls or not drawn.has_ended, drawn.text
        for call in calls if drawn.has_ended else calls[:-1]:
            assert call.name in REQUIRED
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        most = max(most, len(calls) if drawn.has_ended else len(calls[:-1]))
    assert most >= 1, "no whole call was drawn to say anything"


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (CALL, True),
        (f"{CALL}{harmony.CALL}", True),
        (f"{ANALYSIS}Hm{AGAIN}{CALL}{harmony.CALL}", True),
        (f"{CALL}{AGAIN}{CALL}", True),
        (f"{FINAL}Hi", False),
        (f"{ANALYSIS}Hm", False),
        (f"{harmony.COMMENTARY}Let me see.{AGAIN}{CALL}", False),
        (f"{harmony.CHANNEL}commentary to=functions.now{harmony.MESSAGE}{{}}", False),
        (f'{HEAD}{{"to": "east"}}', False),
        ("", False),
    ],
)
def test_harmony_calls_behind_its_reasoning(text: str, is_taken: bool) -> None:
    matcher = grammar_of("harmony").matcher({END_ID})
    taken = matcher.accept_all(TOKENIZER.encode(text))
    assert (taken and matcher.is_accepting) is is_taken


def test_a_message_that_the_prompt_has_begun_is_no_call() -> None:
    reasoning = grammar_of("harmony", opened=ANALYSIS).matcher({END_ID})
    assert reasoning.accept_all(TOKENIZER.encode(f"Hm{AGAIN}{CALL}"))
    assert reasoning.is_accepting
    with pytest.raises(InvalidSamplingError, match="required_tools must be empty where") as told:
        grammar_of("harmony", opened=FINAL)
    assert told.value.argument == "required_tools"
