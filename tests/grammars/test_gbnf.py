"""GBNF: grammars that don't lead to themselves against Python's expressions, others by example."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import InvalidSamplingError, StructuredOutput
from aioserve.grammars.gbnf import MAX_DEPTH, is_gbnf
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.grammars.schema import MAX_RULES
from aioserve.grammars.vocabulary import Vocabulary
from tests.grammars.walks import END, Walk, pyhelp, single_bytes

LAST = 299
CHARS = 'ab"]\\é-'
Both = tuple[str, str]
"""The same in GBNF and as Python's expression."""


def compiled(vocabulary: Vocabulary, grammar: str) -> CompiledGrammar:
    return compile_grammar(vocabulary, StructuredOutput(grammar=grammar))


def follows(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher({LAST})
    taken = all(matcher.accept(byte) for byte in text.encode())
    assert matcher.error is None
    return taken and matcher.is_accepting


def _literal(text: str) -> Both:
    return json.dumps(text, ensure_ascii="a" in text), f"(?:{re.escape(text)})"


def _class(chars: str, negated: bool) -> Both:
    sign = "^" if negated else ""
    gbnf = "".join([rf"\x{ord(char):02x}" if char in '"]' else _in_class(char) for char in chars])
    return f"[{sign}{gbnf}]", f"[{sign}{''.join(map(re.escape, chars))}]"


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "\\-" else char


def _times(one: Both, times: str) -> Both:
    return f"({one[0]}){times}", f"(?:{one[1]}){times}"


def _sequence(several: list[Both]) -> Both:
    return " ".join([one[0] for one in several]), "".join([one[1] for one in several])


def _either(several: list[Both]) -> Both:
    choices = "|".join([one[1] for one in several])
    return f"({' | '.join([one[0] for one in several])})", f"(?:{choices})"


ATOMS = st.one_of(
    st.text(CHARS, max_size=3).map(_literal),
    st.builds(_class, st.text(CHARS, min_size=1, max_size=3), st.booleans()),
    st.just((".", r"[\s\S]")),
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(_times, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}"])),
        st.lists(inner, min_size=1, max_size=3).map(_sequence),
        st.lists(inner, min_size=1, max_size=3).map(_either),
    ),
    max_leaves=8,
)


def test_what_leads_not_to_itself_is_matched_exactly(tmp_path: Path) -> None:
    _, vocabulary = single_bytes(tmp_path)

    @given(EXPRESSIONS, EXPRESSIONS, st.lists(st.text(CHARS, max_size=6), max_size=20))
    def check(first: Both, second: Both, texts: list[str]) -> None:
        rules = f'root ::= part "," part # twice "\n| ""\npart\n::= {first[0]} |\n {second[0]}\n'
        part = f"(?:{first[1]}|{second[1]})"
        expected = re.compile(f"(?:{part},{part})?")
        grammar = compiled(vocabulary, rules)
        for text in [*texts, *map(",".join, pairwise(texts))]:
            assert follows(grammar, text) == bool(expected.fullmatch(text)), (rules, text)

    check()


ARITHMETIC = """
root ::= sum "\\n"   # a comment with "::="
sum ::= product ([-+] product)*
product ::= number | "(" sum ")"
number ::= [0-9]{1,3} ("." [0-9]+)?
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("rules", "yes", "no"),
    [
        ('root ::= "a" root "b" |', ["", "ab", "aaabbb"], ["a", "aab", "ba"]),
        ('root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+ | root', ["[1,[22]]"], ["[]", "[1"]),
        ('root ::= [a-z]+ "x" (" " root)?', ["abx", "xx cx"], ["x", "ab"]),
        (ARITHMETIC, ["1+(22-3.50)\n"], ["1+\n", "1", "(1\n"]),
        (JSON, ['{"a": [1, "\\n"],\n "b": {}}'], ['{"a": 01}', "[]"]),
    ],
)
def test_rules_may_lead_to_themselves(
    tmp_path: Path, rules: str, yes: list[str], no: list[str]
) -> None:
    _, vocabulary = single_bytes(tmp_path)
    grammar = compiled(vocabulary, rules)
    assert [follows(grammar, text) for text in [*yes, *no]] == [True] * len(yes) + [False] * len(no)


def test_all_that_is_drawn_of_a_grammar_for_json_is_json() -> None:
    tokenizer, vocabulary = pyhelp()
    grammar = compiled(vocabulary, JSON)
    ended = 0
    for seed in range(20):
        walk = Walk(grammar, {END}, seed, most=100)
        if walk.matcher.has_ended:
            ended += 1
            json.loads(tokenizer.decode(walk.ids[:-1]))
    assert ended > 3


WRONG: dict[str, tuple[str, str]] = {
    "no root": ('a ::= "a"', "a rule of the name root"),
    "an unknown rule": ("root ::= a-b", "no rule has the name 'a-b'"),
    "a rule twice": ('root ::= "a"\nroot ::= "b"', "a rule of another name was expected"),
    "an open bracket": ('root ::= ("a"', "a closing bracket was expected at the end"),
    "a closed one": ('root ::= "a")', "was expected at"),
    "nothing to repeat": ("root ::= *", "was expected at"),
    "an open text": ('root ::= "a', "no part of GBNF begins with"),
    "a look-ahead": ('root ::= "a" (?= "b")', "was expected at '\\?= "),
    "an empty class": ("root ::= []", "must not be empty"),
    "a range backwards": ("root ::= [z-a]", "ends before it begins"),
    "an escape": (r'root ::= "\d"', "no escape of GBNF"),
    "half a character": (r'root ::= "\ud800"', "no character is"),
    "brackets": (f"root ::= {'(' * (MAX_DEPTH + 1)}", "nested more than"),
    "repetitions": (f'root ::= "a"{"*" * 30_000}', "more than 8 repeats stand in a row"),
    "rules": ("\n".join(f"r{n} ::= root" for n in range(MAX_RULES + 1)), "more than 1000 rules"),
    "nothing": (r"root ::= root", "no text of the rule .root. ends"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(tmp_path: Path, case: str) -> None:
    rules, message = WRONG[case]
    _, vocabulary = single_bytes(tmp_path)
    with pytest.raises(InvalidSamplingError, match=f"grammar must be one.*{message}"):
        compiled(vocabulary, rules)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('root ::= "a"', True),
        ('# first\n\nx-1\n ::= "a"', True),
        ('start: "a"', False),
        ("// ::=\nstart: /a/", False),
        ('%llguidance {}\nstart: "::="', False),
        ("", False),
    ],
)
def test_it_is_told_from_lark_by_its_first_rule(grammar: Any, expected: bool) -> None:
    assert is_gbnf(grammar) == expected
