"""Bounds on what a grammar may force: nothing is looked ahead in without an end."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import InvalidSamplingError, StructuredOutput
from aioserve.grammars import sizes
from aioserve.grammars.gbnf import MAX_TIMES
from aioserve.grammars.grammar import compile_grammar
from aioserve.grammars.sizes import (
    MAX_ALTERNATIVES,
    MAX_FORCED_BYTES,
    MAX_TERMINAL_BYTES,
    expression_size,
)
from aioserve.grammars.vocabulary import Vocabulary
from tests.grammars.walks import ids_in, single_bytes

LAST = 299
HUGE = "((a{1000}){1000}){1000}"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return single_bytes(tmp_path_factory.mktemp("bytes"))[1]


ATOMS = [
    "a",
    "b",
    "é",
    r"\.",
    r"\x61",
    r"\{",
    r"\x{e9}",
    "[ab]",
    "[^]a]",
    r"[\]a]",
    "[[ab]c]",
    "[]-]",
]
TIMES = ["*", "+", "?", "{2}", "{3}", "{0,2}", "{2,5}", "{ 4 }", "{7,}", "{2}{3}", "{11}"]
expressions = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda ways: f"({'|'.join(ways)})"),
        st.tuples(inner, st.sampled_from(TIMES)).map(lambda both: f"(?:{both[0]}){both[1]}"),
        inner.map(lambda one: f"(?i:{one})"),
    ),
    max_leaves=8,
).filter(lambda text: expression_size(text) < 3000)


def longest_forced(vocabulary: Vocabulary, form: dict[str, Any], picks: list[int]) -> int:
    """Bytes that are forced at most along a way."""
    matcher = compile_grammar(vocabulary, StructuredOutput(**form)).matcher({LAST})
    longest = 0
    for pick in picks:
        forced = [token for token in matcher.forced() if token != LAST]
        longest = max(longest, len(forced))
        assert matcher.accept_all(forced)
        allowed = [token for token in ids_in(matcher.allowed()) if token != LAST]
        if not allowed:
            break
        assert matcher.accept(allowed[pick % len(allowed)])
    return longest


picks = st.lists(st.integers(0, 255), min_size=1, max_size=12)


@given(expression=expressions, picks=picks)
def test_an_expression_forces_no_more_than_its_size(
    vocabulary: Vocabulary, expression: str, picks: list[int]
) -> None:
    # A class is one character of up to three bytes here, whose first two may be forced.
    expression = f"(?P<name>{expression})"
    bound = expression_size(expression) + 3
    assert longest_forced(vocabulary, {"regex": expression}, picks) <= bound
    terminal = "/" + expression + "/"
    grammar = f'start: "x" T | T "y"\nT: (U "{{") | /q/i U\nU: {terminal} # "/\n'
    size = _lark(grammar)
    assert size.longest >= expression_size(expression) + 1
    assert longest_forced(vocabulary, {"grammar": grammar}, picks) <= size.forced + 3


def _lark(grammar: str) -> Any:
    return sizes._lark_size(grammar)


@given(
    counts=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    within=st.sampled_from(["a", "é", "(a|bb)", "a?bc", "[ab]", r"\pL", "x{2}"]),
)
def test_repeats_within_each_other_multiply(counts: list[int], within: str) -> None:
    size = expression_size(within)
    for count in counts:
        within = f"({within}){{{count}}}"
        size *= count
    assert expression_size(within) == min(size, 10**12)
    assert expression_size(f"x|({within})*|[{within}]") == min(size, 10**12)


@given(parts=st.lists(st.tuples(expressions, st.integers(1, 5)), min_size=1, max_size=5))
def test_what_follows_adds_up_and_of_alternatives_the_largest_counts(
    parts: list[tuple[str, int]],
) -> None:
    sizes = [count * expression_size(part) for part, count in parts]
    written = [f"({part}){{{count}}}" for part, count in parts]
    assert expression_size("".join(written)) == sum(sizes)
    assert expression_size("|".join(written)) == max(sizes)
    text = "é" + "a" * len(parts)
    assert expression_size(f"[{text}]{text}{{2}}") == len(parts) + 4


def test_parts_of_a_terminal_add_up() -> None:
    assert _lark('start: A\nA: "ab" "c" B~2 ["d" | "efg"]\nB: "h" "i"* /jk/').forced == 14


@given(expression=st.text(alphabet='ab()[]{}|*+?\\/"#~&:^-x1, \n', max_size=40))
def test_what_is_no_expression_has_a_size_or_is_refused(expression: str) -> None:
    assert expression_size(expression) >= 0
    with contextlib.suppress(ValueError):  # %json without any, a terminal that leads to itself
        assert _lark(expression).forced >= 0


def doubled(name: str, levels: int, last: str) -> str:
    lines = [f"{name}{i}: {name}{i + 1} {name}{i + 1}" for i in range(levels)]
    return "\n".join([f"start: {name}0", *lines, f"{name}{levels}: {last}"])


OBJECT = {"type": "object", "additionalProperties": False}
TOO_LARGE: dict[str, dict[str, Any]] = {
    "regex": {"regex": HUGE},
    "spaces": {"regex": "(a{ 1000 }){ 1000 , }"},
    "verbose": {"regex": "(?x)(a{ 1 000 }){1 0 0 0}"},
    "brackets in classes": {"regex": r"[(\]](((a{1000}){1000}[)]){1000})"},
    "braces in escapes": {"regex": r"\x{7b}((a{1000}\}){1000})"},
    "terminal": {"grammar": 'start: T\nT: (("a"{1000}){1000}){1000}'},
    "terminal with tildes": {"grammar": 'start: T\nT: (("a"~1000)~1000..2000)~1000'},
    "terminal's expression": {"grammar": f"start: T\nT: /{HUGE}/"},
    "flags": {"grammar": "start: /(a{1 000}){1000}/x"},
    "expression in a rule": {"grammar": f'start: "x" /{HUGE}/'},
    "behind a comment": {"grammar": f'start: T # "\n// /\nT: /{HUGE}/'},
    "behind an expression of two lines": {"grammar": f'start: /a\n"/ T\nT: /{HUGE}/'},
    "behind an alternative": {"grammar": f'start: "a"\n  | T\nT: "b"\n  | /{HUGE}/'},
    "terminals that double": {"grammar": doubled("T", 30, '"x"')},
    "joined": {"grammar": f"start: T\nT: /[a-z]*/ & /{HUGE}/"},
    "schema in a grammar": {"grammar": f'start: %json {{"type": "string", "pattern": "{HUGE}"}}'},
    "gbnf": {"grammar": 'root ::= (("a"{1000}){1000}){1000}'},
    "gbnf in rules": {"grammar": 'root ::= r{1000}\nr ::= s{1000}\ns ::= "a"{1000}'},
    "pattern": {"json_schema": {"type": "string", "pattern": HUGE}},
    "pattern within": {"json_schema": {"anyOf": [{"items": {"type": "string", "pattern": HUGE}}]}},
    "names": {"json_schema": {"type": "object", "patternProperties": {HUGE: True}}},
    "minLength": {"json_schema": {"type": "string", "minLength": 10**9}},
    "structural tag": {
        "structural_tag": {
            "structures": [
                {"begin": "<a>", "schema": {"type": "string", "pattern": HUGE}, "end": "</a>"}
            ],
            "triggers": ["<a>"],
        }
    },
}


@pytest.mark.parametrize("door", TOO_LARGE)
def test_repeats_that_multiply_beyond_a_bound_are_refused_by_name(
    vocabulary: Vocabulary, door: str
) -> None:
    form = TOO_LARGE[door]
    with pytest.raises(InvalidSamplingError, match="bytes in one piece; 50000") as refused:
        compile_grammar(vocabulary, StructuredOutput(**form))
    assert refused.value.argument == next(iter(form))
    assert refused.value.limit == MAX_TERMINAL_BYTES
    assert isinstance(refused.value.value, int)
    assert refused.value.value > MAX_TERMINAL_BYTES


def doubled_schema(text: str) -> dict[str, Any]:
    defs: dict[str, Any] = {"d40": {"const": text}}
    for i in range(40):
        inner = {"$ref": f"#/$defs/d{i + 1}"}
        defs[f"d{i}"] = OBJECT | {"properties": {"a": inner, "b": inner}, "required": ["a", "b"]}
    return {"$ref": "#/$defs/d0", "$defs": defs}


ENDLESS: dict[str, dict[str, Any]] = {
    "rule that leads to itself": {"grammar": f'start: s\ns: T s | T "."\nT: "{"a" * 8000}"'},
    "rules that double": {"grammar": doubled("r", 60, '"aa"')},
    "repeats of a rule": {"grammar": 'start: (T{1000}){1000}\nT: "aaa"'},
    "rules that double, in another that leads to itself": {
        "grammar": doubled("r", 60, '"aa"') + '\nmore: "(" more ")" | r0'
    },
    "short texts in schemas that double": {"json_schema": doubled_schema("a"), "max_whitespace": 0},
    "schemas that double": {"json_schema": doubled_schema("a" * 8000), "max_whitespace": 0},
    "items": {
        "json_schema": {"type": "array", "items": {"const": "a" * 8000}, "minItems": 10**5},
        "max_whitespace": 0,
    },
}


@pytest.mark.parametrize("form", ENDLESS)
def test_what_could_be_forced_without_an_end_is_not_looked_ahead_in(
    vocabulary: Vocabulary, form: str
) -> None:
    matcher = compile_grammar(vocabulary, StructuredOutput(**ENDLESS[form])).matcher({LAST})
    for _ in range(100):
        assert not matcher.forced()
        (token,) = ids_in(matcher.allowed())
        assert matcher.accept(token)


def test_a_rule_that_leads_to_itself_is_looked_ahead_in_where_its_terminals_are_short(
    vocabulary: Vocabulary,
) -> None:
    grammar = compile_grammar(
        vocabulary, StructuredOutput(grammar='start: "ab" more\nmore: "cd" more | "cde."')
    )
    assert bytes(grammar.matcher({LAST}).forced()) == b"abcd"


@pytest.mark.parametrize(
    "expression",
    [
        "[a-z]{1,64}",
        r"\d{4}-\d{2}-\d{2}",
        ".{0,1000}",
        ".{1000}",
        r"([a-z]{1,64}\.){1,8}[a-z]{2,16}",
        r"[\w.+-]{1,64}@([\w-]{1,63}\.){1,4}[A-Za-z]{2,16}",
        r"https?://[^\s/?#]{1,255}(/[^\s?#]{0,255}){0,16}(\?[^\s#]{0,1000})?",
        "(([0-9a-f]{4}:){7}[0-9a-f]{4}){20}",
        "|".join([f"word{i}" for i in range(2000)]),
        r"\p{L}{1000}",
        "((a*)*)*",
        "a{1000}",
    ],
)
def test_expressions_in_use_are_taken_as_they_are(vocabulary: Vocabulary, expression: str) -> None:
    compile_grammar(vocabulary, StructuredOutput(regex=expression))
    assert _lark(f"start: /{expression.replace('/', '[/]')}/").forced < MAX_FORCED_BYTES


def test_a_grammar_of_the_library_s_own_json_is_none_in_lark(vocabulary: Vocabulary) -> None:
    hidden = {"json_schema": {"type": "string", "x-guidance": {"lenient": True}, "format": "?"}}
    with pytest.raises(InvalidSamplingError, match="grammar"):
        compile_grammar(vocabulary, StructuredOutput(grammar=json.dumps({"grammars": [hidden]})))


@pytest.mark.parametrize("times", ["*", "?+", "{1}"])
def test_repeats_in_a_row_are_bounded_in_gbnf(vocabulary: Vocabulary, times: str) -> None:
    row = (times * MAX_TIMES)[: MAX_TIMES * len(times) // len(times.strip("{1}") or "1")]
    compile_grammar(vocabulary, StructuredOutput(grammar=f'root ::= "a"{row}'))
    with pytest.raises(InvalidSamplingError, match=f"more than {MAX_TIMES} repeats"):
        compile_grammar(vocabulary, StructuredOutput(grammar='root ::= "a"' + times * 20_000))


def test_alternatives_of_rules_are_bounded_and_those_of_terminals_are_not(
    vocabulary: Vocabulary,
) -> None:
    many = " | ".join(['"ab"'] * (MAX_ALTERNATIVES + 1))
    compile_grammar(vocabulary, StructuredOutput(grammar=f"start: T\nT: {many}"))
    compile_grammar(vocabulary, StructuredOutput(grammar=f"root ::= {many}"))
    for grammar in (f"start: {many}", f'start: "b" | (r)\nr: {many[:9000]}\n  | {many[9000:]}'):
        with pytest.raises(InvalidSamplingError, match="alternatives; 4000 are taken at most"):
            compile_grammar(vocabulary, StructuredOutput(grammar=grammar))


def test_a_schema_with_references_is_looked_ahead_in(vocabulary: Vocabulary) -> None:
    node = {"properties": {"next": {"$ref": "#"}, "value": {"const": "abc"}}, "required": ["value"]}
    schema = {"type": "object", "additionalProperties": False} | node
    form = StructuredOutput(json_schema=schema, max_whitespace=0)
    matcher = compile_grammar(vocabulary, form).matcher({LAST})
    assert matcher.accept_all(b'{"')
    assert matcher.accept(ord("v"))
    assert bytes(matcher.forced()) == b'alue":"abc"}'


def test_sizes_of_what_refers_to_itself_in_many_ways_are_found_with_few_looks() -> None:
    refs = [f"#/$defs/{name}" for name in ("a%61", "%61a", "%61%61", "aa")]
    defs = {"aa": {"properties": {f"p{i}": {"$ref": refs[i % 4]} for i in range(2000)}}}
    endless = {"required": [*defs["aa"]["properties"]]} | defs["aa"]
    schema = {"$ref": refs[0], "$defs": {"aa": endless}}
    assert sizes._schema_size(schema).forced == 10**12
    rules = "\n".join([f"r{i}: r{(i * 7) % 900} r{i}{' r1' * 40}" for i in range(900)])
    assert _lark(rules).forced == 10**12
