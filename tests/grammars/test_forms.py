"""Expressions, choices and grammars, against Python's own idea of them."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from aioserve import InvalidSamplingError
from aioserve.grammars.grammar import compile_grammar
from aioserve.grammars.schema import MAX_RULES, check_ends, sound_lark
from aioserve.structured_output import MAX_CHARS, MAX_CHOICES, StructuredOutput
from tests.grammars.walks import END, Walk, pyhelp
from tests.timing import computing_at_most

WALKS = 20

REGEXES = (
    "[a-c]{3,5}(xyz|qrs)",
    r"\d{4}-(0[1-9]|1[0-2])",
    r"(ab|a)*b?",
    r"[^\n\"]{0,8}",
    "yes|no|maybe",
    r"-?(0|[1-9][0-9]*)(\.[0-9]{1,3})?",
    "[\u00e4-\u00fc\u4e00-\u4e10]+",
    r"\{\"k\": (true|false)\}",
    "(?i)hello, world",
    " leading and trailing ",
    r"<\|im_end\|>{1,2}",
)


@pytest.mark.parametrize("regex", REGEXES)
def test_all_that_is_drawn_matches_the_expression(regex: str) -> None:
    tokenizer, vocabulary = pyhelp()
    grammar = compile_grammar(vocabulary, StructuredOutput(regex=regex))
    ended = 0
    for seed in range(WALKS):
        walk = Walk(grammar, {END}, seed, most=100)
        if walk.matcher.has_ended:
            ended += 1
            text = tokenizer.decode(walk.ids[:-1])
            assert re.fullmatch(regex, text), text
    assert ended > WALKS / 2


def test_an_answer_is_one_of_the_choices_and_each_may_be_drawn() -> None:
    tokenizer, vocabulary = pyhelp()
    choices = (
        "yes",
        "yes and no",
        '"quoted\\"',
        "line\nbreak\t\x01",
        "<|im_end|>",
        "\u00dcn\u00ef 😀",
        "%json",
    )
    grammar = compile_grammar(vocabulary, StructuredOutput(choice=choices))
    drawn = set()
    for seed in range(200):
        walk = Walk(grammar, {END}, seed)
        assert walk.matcher.has_ended
        drawn.add(tokenizer.decode(walk.ids[:-1]))
    assert drawn == set(choices)


@pytest.mark.parametrize("begin", ["", "the same begin of each, "])
def test_an_answer_is_one_of_as_many_choices_as_there_may_be(begin: str) -> None:
    tokenizer, vocabulary = pyhelp()
    choices = [f"{begin}{number}" for number in range(MAX_CHOICES)]
    grammar = compile_grammar(vocabulary, StructuredOutput(choice=choices))
    drawn = set()
    for seed in range(WALKS):
        walk = Walk(grammar, {END}, seed)
        assert walk.matcher.has_ended
        drawn.add(tokenizer.decode(walk.ids[:-1]))
    assert len(drawn) > WALKS / 2
    assert drawn <= set(choices)


def test_an_answer_is_a_sentence_of_the_grammar() -> None:
    tokenizer, vocabulary = pyhelp()
    lark = """
        start: sum
        sum: product ("+" product)*
        product: value ("*" value)*
        value: NUMBER | "(" sum ")"
        NUMBER: /[1-9][0-9]{0,2}/
    """
    grammar = compile_grammar(vocabulary, StructuredOutput(grammar=lark))
    ended = 0
    for seed in range(WALKS):
        walk = Walk(grammar, {END}, seed, most=100)
        if walk.matcher.has_ended:
            ended += 1
            text = tokenizer.decode(walk.ids[:-1])
            assert re.fullmatch(r"[0-9+*()]+", text)
            assert isinstance(eval(text), int)
    assert ended > WALKS / 2


def test_a_grammar_may_have_special_tokens_and_schemas() -> None:
    tokenizer, vocabulary = pyhelp()
    lark = 'start: <|im_start|> %json {"type": "object", "maxProperties": 0}'
    walk = Walk(compile_grammar(vocabulary, StructuredOutput(grammar=lark)), {END}, 1)
    assert walk.matcher.has_ended
    assert walk.ids[0] == 1
    assert json.loads(tokenizer.decode(walk.ids)) == {}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"grammar": "start: a"}, 'unknown name: "a"'),
        ({"grammar": "start: a\na: b\nb: a"}, "no text of the rule 'start' ends"),
        ({"grammar": "start: A\nA: /a/ & /b/"}, "nothing that the tokenizer can write"),
        (
            {"grammar": 'start: %json {"type": "object", "minProperties": 3}'},
            "names may come twice",
        ),
        ({"grammar": "start: A\nA: " + " & ".join(f"/.*a{i}.*/" for i in range(9))}, "by &"),
        ({"grammar": 'start: %json {"not": {}}'}, "not"),
    ],
)
def test_a_form_that_can_not_be_kept_is_refused_with_a_reason(
    form: dict[str, str], reason: str
) -> None:
    _, vocabulary = pyhelp()
    with pytest.raises(InvalidSamplingError) as refused:
        compile_grammar(vocabulary, StructuredOutput(**form))  # pyright: ignore[reportArgumentType]
    assert refused.value.argument == next(iter(form))
    assert reason in str(refused.value)


def chain(num_rules: int, body: str = "{}") -> str:
    """Each leads into the next."""
    names = [f"a{i}" for i in range(num_rules)]
    rules = [f"{name}: {body.format(then)}" for name, then in itertools.pairwise(names)]
    return "\n".join(["start: a0", *rules, f'{names[-1]}: "z"'])


@pytest.mark.parametrize(
    ("grammar", "num"),
    [
        (chain(MAX_RULES), MAX_RULES + 1),
        (chain(MAX_RULES // 2 + 1, "({})"), 1 + 2 * (MAX_RULES // 2) + 1),
        (chain(20_000).replace(" ", "")[:MAX_CHARS], 10_950),
    ],
)
def test_a_grammar_of_more_rules_than_a_stack_has_room_for_is_refused(
    grammar: str, num: int
) -> None:
    with pytest.raises(InvalidSamplingError, match=f"{num} rules and .* {MAX_RULES} .* at most"):
        sound_lark(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        chain(MAX_RULES - 1),
        chain(MAX_RULES // 2, "({})"),
        chain(MAX_RULES // 6, "((((({})))))"),
        "start: " + " ".join(['"([{:"'] * MAX_RULES) + "// ([{:",
        f"start: %json {json.dumps({'enum': [[i] for i in range(MAX_RULES)]})}",
    ],
)
def test_a_grammar_with_as_many_rules_as_are_taken_is_compiled(grammar: str) -> None:
    _, vocabulary = pyhelp()
    compile_grammar(vocabulary, StructuredOutput(grammar=grammar))


@pytest.mark.clock
@pytest.mark.parametrize("begin", ['"', "/"])
def test_a_quote_without_an_end_is_read_in_no_time(begin: str) -> None:
    grammar = "start: " + begin + ("\\" + begin) * 60_000
    with computing_at_most(5.0):
        check_ends(grammar, {2: "<|im_end|>"}, {2})
        assert sound_lark(grammar) == grammar
