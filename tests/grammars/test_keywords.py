"""Keywords that say nothing are let through, references are read however they are spelled, and
bounds of all sizes are kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import InvalidSamplingError, StructuredOutput
from aioserve.grammars.grammar import compile_grammar
from aioserve.grammars.keywords import MAX_BOUND
from aioserve.grammars.vocabulary import Vocabulary
from tests.grammars.test_schemas import takes, validate
from tests.grammars.walks import Walk, single_bytes

LAST = 280


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return single_bytes(tmp_path_factory.mktemp("bytes"))[1]


SAYING_NOTHING: list[dict[str, Any]] = [
    {"uniqueItems": False},
    {"minLength": 0},
    {"minItems": 0},
    {"minProperties": 0},
    {"anyOf": [{"minProperties": 1, "required": ["a"]}, {"minProperties": 0}]},
    {"additionalProperties": True},
    {"additionalProperties": {}},
    {"required": []},
    {"patternProperties": {}},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": True, "b": {"title": "B"}}},
    {"dependencies": {"a": [], "b": {}}},
    {"propertyNames": True},
    {"propertyNames": {"type": "string"}},
    {"not": False},
    {"not": {"not": {}}},
    {"contains": {"type": "null"}, "minContains": 0},
    {"minContains": 1, "maxContains": 2},
    {"unevaluatedProperties": True},
    {"unevaluatedProperties": False, "additionalProperties": {}},
    {"unevaluatedItems": {}},
    {"unevaluatedItems": False, "items": {}},
    {"if": {"type": "null"}},
    {"if": {"type": "null"}, "then": True, "else": {}},
    {"then": {"maxLength": 3}, "else": {"minLength": 3}},
    {"format": "password"},
    {"$comment": "", "readOnly": True, "deprecated": False, "x-order": 1},
    {"title": None, "description": None, "default": None},
    {"minLength": None, "maxItems": None, "items": None, "required": None, "enum": None},
    {"propertyNames": None, "uniqueItems": None, "not": None, "if": None, "format": None},
]
VALUES = ['"a"', "[1,1]", '{"a":null}', "1", "null"]


@pytest.mark.parametrize("keywords", SAYING_NOTHING, ids=json.dumps)
def test_keywords_that_say_nothing_are_let_through(
    vocabulary: Vocabulary, keywords: dict[str, Any]
) -> None:
    for text in VALUES:
        assert takes(vocabulary, keywords, text), text
        assert takes(vocabulary, {"type": "array", "items": keywords}, f"[{text}]"), text
        assert takes(
            vocabulary, {"anyOf": [False, {"$ref": "#/$defs/a"}], "$defs": {"a": keywords}}, text
        )


SAYING: list[dict[str, Any]] = [
    {"uniqueItems": True},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": False}},
    {"dependencies": {"a": ["b"]}},
    {"propertyNames": {"type": "string", "maxLength": 3}},
    {"propertyNames": {"type": "integer"}},
    {"not": {}},
    {"not": {"type": "null"}},
    {"contains": {}},
    {"contains": {}, "minContains": 0, "maxContains": 1},
    {"unevaluatedProperties": False},
    {"unevaluatedItems": False, "items": [True]},
    {"if": {}, "else": {}, "then": {"type": "null"}},
    {"if": {"type": "null"}, "else": False},
    {"format": "uri-reference"},
]


@pytest.mark.parametrize("keywords", SAYING, ids=json.dumps)
def test_keywords_that_say_something_are_refused_by_name(
    vocabulary: Vocabulary, keywords: dict[str, Any]
) -> None:
    name = next(iter(keywords))
    with pytest.raises(InvalidSamplingError, match=keywords.get("format", name)):
        compile_grammar(vocabulary, StructuredOutput(json_schema=keywords))


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        ("#/$defs/Größe", "Größe"),
        ("#/$defs/Gr%C3%B6%C3%9Fe", "Größe"),
        ("#/$defs/a b", "a b"),
        ("#/$defs/a%20b", "a b"),
        ("#/%24defs/値", "値"),
        ("#/$defs/a%b", "a%b"),
        ("#/$defs/a~1b~0", "a/b~"),
        ("#/$defs/List[int]", "List[int]"),
        ("#/$defs/Page«int»", "Page«int»"),
    ],
)
def test_references_are_read_however_they_are_spelled(
    vocabulary: Vocabulary, ref: str, name: str
) -> None:
    schema = {"type": "array", "items": {"$ref": ref}, "$defs": {name: {"type": "integer"}}}
    assert takes(vocabulary, schema, "[1]")
    assert not takes(vocabulary, schema, '["1"]')


# -- bounds

BOUNDS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-70, 70).map(lambda n: (2 ** abs(n)) * (1 if n > 0 else -1)),
    st.integers(-20, 20).map(lambda n: (10 ** abs(n)) * (1 if n > 0 else -1)),
    st.floats(allow_nan=False),
    st.floats(-1000, 1000),
)


def test_numbers_are_within_bounds_of_all_sizes(tmp_path: Path) -> None:
    _, vocabulary = single_bytes(tmp_path)
    num_drawn = 0

    @given(
        st.sampled_from(["integer", "number"]),
        st.sampled_from([None, "minimum", "exclusiveMinimum"]),
        st.sampled_from([None, "maximum", "exclusiveMaximum"]),
        BOUNDS,
        BOUNDS,
        st.integers(0, 99),
    )
    def check(
        kind: str, lower: str | None, upper: str | None, one: float, other: float, seed: int
    ) -> None:
        nonlocal num_drawn
        low, high = sorted([one, other])
        schema = {
            "type": kind,
            **({lower: low} if lower else {}),
            **({upper: high} if upper else {}),
        }
        try:
            grammar = compile_grammar(vocabulary, StructuredOutput(json_schema=schema))
        except InvalidSamplingError:
            return
        walk = Walk(grammar, {LAST}, seed, most=60)
        if walk.matcher.has_ended:
            num_drawn += 1
            try:
                validate(bytes(walk.ids[:-1]).decode(), schema)
            except jsonschema.ValidationError:
                raise AssertionError(schema, bytes(walk.ids[:-1])) from None

    check()
    assert num_drawn


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(
    ("bounds", "yes", "no"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [0, 9 * 10**18, -9 * 10**18], [10**19]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 9 * 10**18], [-1, 2 * 10**19]),
        ({"minimum": -(2**53) + 1, "maximum": 2**53 - 1}, [2**53 - 1, 1 - 2**53], [2**53]),
        ({"minimum": -(2**31), "maximum": 2**31 - 1}, [2**31 - 1, -(2**31)], [2**31]),
        ({"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [0, -5], []),
        ({"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, [0, -5], []),
        ({"minimum": 10**18}, [10**18, 9 * 10**18], [10**18 - 1]),
        ({"maximum": -(10**18)}, [-(10**18), -9 * 10**18], [1 - 10**18]),
        ({"exclusiveMaximum": 2**53 + 3}, [2**52], [2**53 + 3, 2**53 + 4]),
        ({"exclusiveMinimum": 5e-324}, [1], [0]),
    ],
)
def test_bounds_of_64_bits_are_taken(
    vocabulary: Vocabulary, kind: str, bounds: dict[str, Any], yes: list[int], no: list[int]
) -> None:
    schema = {"type": kind, **bounds}
    assert [takes(vocabulary, schema, str(number)) for number in yes] == [True] * len(yes)
    assert [takes(vocabulary, schema, str(number)) for number in no] == [False] * len(no)


@pytest.mark.parametrize(
    "bounds",
    [{"minimum": 10**19}, {"maximum": -(10**19)}, {"minimum": 10**19, "maximum": 10**20}],
)
def test_bounds_beyond_all_numbers_are_refused_by_name(
    vocabulary: Vocabulary, bounds: dict[str, Any]
) -> None:
    with pytest.raises(InvalidSamplingError, match=r"imum -?10{19}, beyond") as refused:
        compile_grammar(vocabulary, StructuredOutput(json_schema={"type": "integer", **bounds}))
    assert refused.value.limit == MAX_BOUND


# -- objects: all that is drawn of other schemas is sound; of these nothing is missing either

INNER: list[Any] = [True, {"type": "integer"}, {"type": "string"}, False]


def test_objects_are_drawn_wherever_the_docs_do_not_say_otherwise(vocabulary: Vocabulary) -> None:
    rng = random.Random(0)
    came = {True: 0, False: 0}
    for _ in range(400):
        names = rng.sample(["a", "b", "c"], rng.randrange(3))
        required = [name for name in ["a", "b", "c", 'q"'] if rng.random() < 0.3]
        others = rng.choice([None, *INNER])
        schema: dict[str, Any] = {"type": "object"}
        if names or rng.random() < 0.5:
            schema["properties"] = {name: rng.choice(INNER[:3]) for name in names}
        if required:
            schema["required"] = required
        if others is not None:
            schema["additionalProperties"] = others
        if rng.random() < 0.3:  # one more where some may be left out isn't supported
            more = set(names) <= set(required)
            schema["minProperties"] = rng.randrange(len(required) + 1 + more)
        order = [*names, *(name for name in required if name not in names)]
        is_any = others is None or others is True
        for _ in range(6):
            value: dict[str, Any] = {
                name: rng.choice([1, "x"]) for name in order if rng.random() < 0.7
            }
            if is_any or not order:  # beside names none of another schema are drawn
                value |= {name: rng.choice([1, "x"]) for name in "yz" if rng.random() < 0.4}
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
            text = json.dumps(value, separators=(",", ":"))
            try:
                assert takes(vocabulary, schema, text) == is_valid, (schema, text)
            except InvalidSamplingError:
                assert not is_valid, (schema, text)
            came[is_valid] += 1
    assert min(came.values()) > 300, came
