"""GBNF: grammars that don't lead to themselves against Python's expressions, others by example."""

from __future__ import annotations

import json
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aioserve import InvalidSamplingError, StructuredOutput
from aioserve.grammars.gbnf import MAX_DEPTH, is_gbnf
from aioserve.grammars.grammar import CompiledGrammar, compile_grammar
from aioserve.grammars.schema import MAX_RULES
from aioserve.grammars.vocabulary import Vocabulary
from tests.grammars.walks import END, Walk, pyhelp, single_bytes
from tests.tiers import examples

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


# -- rules that lead to themselves, against a reader that tries every way

Tree = tuple[Any, ...]
"""("ref", rule), ("either" or "sequence", trees), ("times", tree, least, most) or ("chars", those)
of one character."""
NAMES = ("root", "one", "two")
FEW = "ab-"


def _gbnf(tree: Tree) -> str:
    kind, value, *more = tree
    if kind == "ref":
        return value
    if kind == "chars":
        return f'"{value}"' if len(value) == 1 else f"[{value.replace('-', chr(92) + '-')}]"
    if kind == "text":
        return f'"{value}"'
    if kind == "times":
        least, most = more
        return f"({_gbnf(value)}){{{least},{'' if most is None else most}}}"
    return f"({(' | ' if kind == 'either' else ' ').join(map(_gbnf, value))})"


def _ends(tree: Tree, text: str, start: int, known: dict[tuple[str, int], set[int]]) -> set[int]:
    """Return the places where a part of the text from `start` on may end, as far as it is known for
    rules."""
    kind, value, *more = tree
    if kind == "ref":
        return known.setdefault((value, start), set())
    if kind == "chars":
        return {start + 1} if text[start : start + 1] in [*value] else set()
    if kind == "text":
        return {start + len(value)} if text.startswith(value, start) else set()
    if kind == "either":
        return set().union(*(_ends(one, text, start, known) for one in value))
    found, ends = {start}, {start}
    if kind == "sequence":
        for one in value:
            ends = set().union(*(_ends(one, text, at, known) for at in ends))
        return ends
    least, most = more
    found = set() if least else {start}
    for count in range(1, (most or least + len(text)) + 1):
        ends = set().union(*(_ends(value, text, at, known) for at in ends))
        found |= ends if count >= least else set()
    return found


def _takes(rules: dict[str, Tree], text: str) -> bool:
    known: dict[tuple[str, int], set[int]] = {("root", 0): set()}
    before = -1
    while before != (before := sum(map(len, known.values())) + len(known)):
        for name, start in list(known):
            known[name, start] = known[name, start] | _ends(rules[name], text, start, known)
    return len(text) in known["root", 0]


TREES = st.recursive(
    st.one_of(
        st.sampled_from(NAMES).map(lambda name: ("ref", name)),
        st.sampled_from(["a", "b", "ab", "b-", "-"]).map(lambda chars: ("chars", chars)),
        st.sampled_from(["ab", "aa", "-b", "ab-"]).map(lambda text: ("text", text)),
    ),
    lambda inner: st.one_of(
        st.tuples(st.just("times"), inner, st.integers(0, 1), st.sampled_from([None, 1, 2])),
        st.tuples(st.just("sequence"), st.lists(inner, max_size=3)),
        st.tuples(st.just("either"), st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@pytest.mark.more
def test_what_leads_to_itself_is_matched_exactly(tmp_path: Path) -> None:
    _, vocabulary = single_bytes(tmp_path)
    texts = ["".join(chars) for n in range(6) for chars in product(FEW, repeat=n)]
    num_taken = num_refused = 0

    @settings(max_examples=examples(150))
    @given(st.tuples(TREES, TREES, TREES), st.sampled_from(["root", "one"]))
    def check(trees: tuple[Tree, Tree, Tree], inner: str) -> None:
        nonlocal num_taken, num_refused
        leads = ("either", [trees[0], ("sequence", [trees[1], ("ref", inner), trees[2]])])
        rules: dict[str, Tree] = dict(zip(NAMES, (leads, *trees[1:]), strict=True))
        grammar = "\n".join([f"{name} ::= {_gbnf(tree)}" for name, tree in rules.items()])
        try:
            kept = compiled(vocabulary, grammar)
        except InvalidSamplingError as error:
            endless = "always has itself within" in str(error)
            num_refused += 1
            assume(endless or "nothing that the tokenizer" in str(error))
            return
        for text in texts:
            assert follows(kept, text) == _takes(rules, text), (grammar, text)
            num_taken += follows(kept, text)

    check()
    assert num_taken


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
