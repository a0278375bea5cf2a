"""Harmony's channels: reasoning is free, and the required form applies to the final channel or the
calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.call_rules import Style
from aioserve.grammars.calls import calls_output
from aioserve.grammars.channels import ChannelOutput, channel_frame
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.grammars.thinking import ThinkingBudget
from aioserve.request import SamplingParams
from aioserve.structured_output import StructuredOutput
from aioserve.text.assembler import TextAssembler
from aioserve.text.output_parsers.completion_reader import CompletionReader
from aioserve.text.output_parsers.harmony import HarmonyChannels, HarmonyParser
from aioserve.text.output_parsers.parts import joined, whole_calls
from tests.grammars.test_calls import END_ID, FREE, SCHEMAS, TOOLS, VOCABULARY, Drawn
from tests.text.test_harmony import AGAIN, ANALYSIS, CALL, CHANNEL, COMMENTARY, FINAL, MESSAGE, Told

TOKENIZER, WORDS = VOCABULARY
SPECIALS = {name: i for i, name in TOKENIZER.special_among(HarmonyParser.marks).items()}
FORM = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
OF_FORM = StructuredOutput(json_schema=FORM | {"additionalProperties": False})
HEAD = f"{CHANNEL}commentary to=functions.move{MESSAGE}"
LURES = (
    ANALYSIS,
    COMMENTARY,
    FINAL,
    AGAIN,
    "Hm.",
    HEAD,
    '{"to": "north"}',
    CALL,
    "<|end|>",
    '{"n": 1}',
)


def calls_grammar(
    *,
    one: bool = False,
    form: StructuredOutput | None = None,
    opened: str = "",
    specials: Mapping[str, int] = SPECIALS,
    exact: bool = True,
) -> CompiledGrammar:
    style = Style(
        tools="harmony", opened=opened, specials=specials, exact=specials.keys() if exact else set()
    )
    output = calls_output(style, [*TOOLS, *FREE], {*SCHEMAS, "now"}, one=one, form=form)
    return compile_grammar(WORDS, output)


def framed(form: StructuredOutput, opened: str = "") -> CompiledGrammar:
    frame = channel_frame(SPECIALS, opened)
    return compile_grammar(WORDS, ChannelOutput(grammar=frame, form=form))


def takes(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher({END_ID})
    return matcher.accept_all(TOKENIZER.encode(text)) and matcher.is_accepting


def read(ids: Sequence[int], *, opened: str = "", exact: bool = True) -> Told:
    """Return reasoning, content and calls of a completion of these tokens. Marks are `exact`, or
    may be typed."""
    reader = CompletionReader(
        HarmonyParser, HarmonyChannels(), opened=opened, exact=SPECIALS if exact else ()
    )
    texts = TextAssembler(TOKENIZER, SamplingParams(), {i: name for name, i in SPECIALS.items()})
    pieces = [*(texts.push(token_id)[0] for token_id in ids if token_id != END_ID), texts.finish()]
    parts = joined([*(reader.push(one, texts.marks_in(one)) for one in pieces), reader.finish()])
    calls = [(call.name, call.arguments) for call in whole_calls(parts.tool_calls)]
    return parts.reasoning, parts.content, calls


@pytest.mark.parametrize(("specials", "exact"), [(SPECIALS, True), (SPECIALS, False), ({}, False)])
@pytest.mark.parametrize("one", [True, False])
def test_calls_that_are_drawn_have_the_form_of_their_tools(
    one: bool, specials: Mapping[str, int], exact: bool
) -> None:
    grammar = calls_grammar(one=one, specials=specials, exact=exact)
    most = 0
    for seed in range(24):
        drawn = Drawn(grammar, TOKENIZER, seed, "", LURES)
        calls = read(drawn.ids, exact=exact)[2]
        assert not one or len(calls) < 2, drawn.text
        if not drawn.has_ended:
            calls = calls[:-1]
        for name, arguments in calls:
            schema = SCHEMAS.get(name, {"type": "object"})
            jsonschema.validate(json.loads(arguments), schema)
        most = max(most, len(calls))
    assert most


MOVE = f'{HEAD}{{"to": "north"}}'


def test_marks_that_are_typed_are_free() -> None:
    matcher = _strict().matcher({END_ID})
    typed = f'{AGAIN}{HEAD}{{"to": "east"}}{CALL}'
    ids = [*TOKENIZER.encode(ANALYSIS), *typed.encode(), *TOKENIZER.encode(f"{AGAIN}{FINAL}")]
    ids += typed.encode()
    assert matcher.accept_all(ids)
    assert matcher.is_accepting
    assert read(ids) == (typed, typed, [])
    head = TOKENIZER.encode(HEAD)
    assert not _strict().matcher({END_ID}).accept_all([*head[:-1], *MESSAGE.encode()])


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (f"{FINAL}Hi", True),
        (f"{ANALYSIS}Hm{AGAIN}{FINAL}Hi", True),
        (f"{ANALYSIS}Hm{AGAIN}{COMMENTARY}Let me see.{AGAIN}{MOVE}", True),
        (f"{MOVE}{CALL}", True),
        (f"{MOVE}{AGAIN}{MOVE}", True),
        (f' to=functions.move{CHANNEL}commentary json{MESSAGE}{{"to": "north"}}', True),
        (
            f'{CHANNEL}commentary to=functions.move <|constrain|>json{MESSAGE}{{"to": "north"}}',
            True,
        ),
        (f'{HEAD}{{"to": "east"}}', False),
        (f"{CHANNEL}commentary to=functions.other{MESSAGE}{{}}", False),
        (f"{ANALYSIS}Hm", False),
        ("Hi", False),
    ],
)
def test_strict_calls_in_each_way_of_writing_them(text: str, is_taken: bool) -> None:
    grammar = _strict()
    assert takes(grammar, text) is is_taken


_KEPT: dict[str, CompiledGrammar] = {}


def _strict() -> CompiledGrammar:
    if "strict" not in _KEPT:
        _KEPT["strict"] = calls_grammar()
    return _KEPT["strict"]


def test_beside_calls_an_answer_has_the_form() -> None:
    grammar = calls_grammar(form=OF_FORM)
    assert takes(grammar, f'{ANALYSIS}Hm{AGAIN}{FINAL}{{"n": 1}}')
    assert takes(grammar, MOVE)
    assert not takes(grammar, f"{FINAL}Hi")
    assert not takes(grammar, f'{COMMENTARY}Hm{AGAIN}{FINAL}{{"n": 1}}')


FORMS: list[tuple[StructuredOutput, str, str]] = [
    (OF_FORM, '{"n": 2}', '{"n": 3}'),
    (StructuredOutput(json_object=True), '{"any": []}', "[]"),
    (StructuredOutput(regex="[ab]+/x"), "abba/x", "abc/x"),
    (StructuredOutput(choice=["yes", "no"]), "yes", "maybe"),
    (StructuredOutput(grammar='start: "a" b\nb: "b"+'), "abbb", "a"),
    (StructuredOutput(grammar='root ::= "a" [0-9]+'), "a12", "b"),
    (
        StructuredOutput(
            structural_tag={
                "structures": [{"begin": "<f>", "schema": FORM, "end": "</f>"}],
                "triggers": ["<f>"],
            }
        ),
        'Well. <f>{"n": 1}</f>',
        'Well. <f>{"n": 3}</f>',
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), FORMS)
def test_an_answer_of_any_form_is_in_its_channel(form: Any, good: str, bad: str) -> None:
    grammar = framed(form)
    assert takes(grammar, f"{FINAL}{good}")
    assert takes(grammar, f"{ANALYSIS}Hm, {{}} <f>?{AGAIN}{ANALYSIS}b{AGAIN}{FINAL}{good}")
    for text in (f"{FINAL}{bad}", f"{ANALYSIS}{good}", f"{COMMENTARY}a{AGAIN}{FINAL}{good}", good):
        assert not takes(grammar, text), text


def test_a_message_that_the_prompt_has_begun_goes_on() -> None:
    assert takes(framed(OF_FORM, FINAL), '{"n": 1}')
    assert takes(framed(OF_FORM, ANALYSIS), f'Hm{AGAIN}{FINAL}{{"n": 1}}')
    with pytest.raises(InvalidSamplingError, match="within the head"):
        framed(OF_FORM, f"{CHANNEL}final")


def test_a_form_that_cannot_be_kept_is_told_by_its_own_name() -> None:
    with pytest.raises(InvalidSamplingError, match=r"^regex must"):
        framed(StructuredOutput(regex="("))


@pytest.mark.parametrize("most", [0, 3])
def test_reasoning_ends_in_time_and_the_answer_still_has_its_form(most: int) -> None:
    budget = ThinkingBudget(
        num_tokens=most,
        reasoning=HarmonyChannels(),
        opened="",
        shown={i: name for name, i in SPECIALS.items()},
        tokenizer=TOKENIZER,
        num_logits=WORDS.num_logits,
        grammar=framed(OF_FORM),
    )
    matcher = budget.matcher({END_ID})
    assert matcher.accept_all(TOKENIZER.encode(ANALYSIS))
    for token in b"abc"[:most]:
        assert matcher.accept(token)
    assert not matcher.accept(ord("d"))
    closing = TOKENIZER.encode(f"{AGAIN}{FINAL}")
    assert matcher.forced() == tuple(closing)
    assert matcher.accept_all([*closing, *b'{"n": 1}', END_ID])
    assert matcher.has_ended
