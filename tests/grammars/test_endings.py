"""Grammars that are accepted have an end that every partial completion can reach. A grammar without
an end is refused by name."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from aioserve import InvalidSamplingError, StructuredOutput
from aioserve.grammars.grammar import compile_grammar
from aioserve.grammars.vocabulary import Vocabulary
from tests.grammars.schemas import SchemaWriter
from tests.grammars.test_schemas import validate
from tests.grammars.walks import Walk, brought_to_an_end, single_bytes

LAST = 280
SCHEMAS = 250
RECURSIVE = 300


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return single_bytes(tmp_path_factory.mktemp("bytes"))[1]


def ends(vocabulary: Vocabulary, schema: Any, seed: int) -> None:
    """Go some way, and from there to an end, more than once."""
    form = StructuredOutput(json_schema=schema, disable_any_whitespace=True)
    grammar = compile_grammar(vocabulary, form)
    for most in (0, 3, 12, 40):
        walk = Walk(grammar, {LAST}, seed, most=most)
        brought_to_an_end(walk.matcher, walk.ids, {LAST}, seed)
        assert walk.ids.pop() == LAST
        validate(bytes(walk.ids).decode(), schema)


def test_an_end_is_reached_from_wherever_a_schema_led(vocabulary: Vocabulary) -> None:
    came = Counter[str]()
    for seed in range(5000, 5000 + SCHEMAS):
        schema = SchemaWriter(seed).schema()
        try:
            ends(vocabulary, schema, seed)
        except InvalidSamplingError:
            came["refused"] += 1
        else:
            came["ended"] += 1
    assert came["ended"] > 0.6 * SCHEMAS, came


# -- schemas that lead to themselves


class RecursiveWriter:
    """Draws schemas of a few definitions that lead to each other."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._names = "abcd"[: self._rng.randrange(1, 5)]

    def schema(self) -> dict[str, Any]:
        defs = {name: self._one(2, index + 1) for index, name in enumerate(self._names)}
        return self._one(1, 0) | {"$defs": defs}

    def _one(self, depth: int, first: int = 0) -> dict[str, Any]:
        """A schema that leads, by itself, to definitions from the number `first` on: of a circle of
        those nothing could be told, by any reader."""
        rng = self._rng
        kind = rng.randrange(9) if depth else rng.randrange(3)
        if kind < 2 and first < len(self._names):
            return {"$ref": f"#/$defs/{rng.choice(self._names[first:])}"}
        if kind <= 2:
            return {"type": rng.choice(["null", "boolean", "integer"])}
        if kind == 3:
            return {"anyOf": [self._one(depth - 1, first) for _ in range(rng.randrange(1, 3))]}
        if kind == 4:
            schema: dict[str, Any] = {"type": "array", "items": self._one(depth - 1)}
            if rng.random() < 0.5:
                schema |= {"minItems": rng.randrange(3), "maxItems": 3}
            if rng.random() < 0.3:
                schema["prefixItems"] = [self._one(depth - 1)]
            return schema
        if kind == 5:
            others = {"type": "object", "additionalProperties": self._one(depth - 1)}
            return others | {"minProperties": rng.randrange(2)}
        names = rng.sample(["x", "y", "z"], rng.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: self._one(depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": False,
        }


def has_value(schema: Any, defs: dict[str, Any], depth: int, known: dict[Any, bool]) -> bool:
    """Return true if a schema has a value of at most this depth. All are tried."""
    if (id(schema), depth) not in known:
        known[id(schema), depth] = depth > 0 and _tried(schema, defs, depth - 1, known)
    return known[id(schema), depth]


def _tried(schema: Any, defs: dict[str, Any], depth: int, known: dict[Any, bool]) -> bool:
    if "$ref" in schema:
        return has_value(defs[schema["$ref"].rpartition("/")[2]], defs, depth, known)
    if "anyOf" in schema:
        return any(has_value(one, defs, depth, known) for one in schema["anyOf"])
    kind = schema["type"]
    if kind == "array":
        places = [*schema.get("prefixItems", ()), *[schema["items"]] * 3]
        needed = places[: schema.get("minItems", 0)]
    elif kind == "object" and "properties" in schema:
        needed = [schema["properties"][name] for name in schema["required"]]
    elif kind == "object":
        needed = [schema["additionalProperties"]] * schema["minProperties"]
    else:
        return True
    return all(has_value(one, defs, depth, known) for one in needed)


def reached(schema: Any, defs: dict[str, Any], found: set[str]) -> set[str]:
    """Names of the definitions that a schema leads to."""
    if isinstance(schema, dict):
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name and name not in found:
            found.add(name)
            reached(defs[name], defs, found)
        for key, inner in schema.items():
            if key != "$defs":
                reached(inner, defs, found)
    elif isinstance(schema, list):
        for inner in schema:
            reached(inner, defs, found)
    return found


def test_schemas_that_lead_to_themselves_end_or_are_refused(vocabulary: Vocabulary) -> None:
    came = Counter[str]()
    for seed in range(RECURSIVE):
        schema = RecursiveWriter(seed).schema()
        defs, known = schema["$defs"], dict[Any, bool]()
        names = reached(schema, defs, set())
        endless = {name for name in names if not has_value(defs[name], defs, 40, known)}
        if endless:
            with pytest.raises(InvalidSamplingError, match=r"no value that ends at #/\$defs/"):
                ends(vocabulary, schema, seed)
        else:
            ends(vocabulary, schema, seed)
        came["refused" if endless else "ended"] += 1
    assert came["ended"] > 0.4 * RECURSIVE, came
    assert came["refused"] > 0.1 * RECURSIVE, came


NODE: dict[str, Any] = {"type": "object", "additionalProperties": False}
ENDLESS: dict[str, Any] = {
    "a list without an end": NODE | {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    "an optional one": {
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "$defs": {"a": NODE | {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
    },
    "by further names": {
        "type": "object",
        "required": ["a"],
        "additionalProperties": {"$ref": "#"},
    },
    "by the number of names": {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"$ref": "#"},
    },
    "by items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "by first items": {"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 2},
    "by parts": {
        "allOf": [
            {"type": "object", "required": ["a"]},
            {"properties": {"a": {"$ref": "#"}}},
        ]
    },
    "by each of several": {
        "type": "object",
        "required": ["a"],
        "anyOf": [
            {"properties": {"a": {"$ref": "#"}}},
            {"properties": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}}},
        ],
    },
    "by nothing but itself": {
        "items": {"$ref": "#/$defs/a"},
        "$defs": {"a": {"$ref": "#/$defs/a"}},
    },
    "by each other": {
        "items": {"$ref": "#/$defs/a"},
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
    },
    "by a long way": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
            "b": NODE | {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
        },
    },
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_schema_without_an_end_is_refused_by_name(vocabulary: Vocabulary, case: str) -> None:
    with pytest.raises(InvalidSamplingError, match="no value that ends at #") as refused:
        compile_grammar(vocabulary, StructuredOutput(json_schema=ENDLESS[case]))
    assert refused.value.argument == "json_schema"
    quoted = StructuredOutput(grammar=f"start: %json {json.dumps(ENDLESS['by items'])}")
    with pytest.raises(InvalidSamplingError, match="no value that ends at #"):
        compile_grammar(vocabulary, quoted)


@pytest.mark.parametrize(
    "schema",
    [
        NODE | {"properties": {"next": {"$ref": "#"}}},
        NODE
        | {"properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["a"]},
        {"type": ["object", "string"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "additionalProperties": {"$ref": "#"}},
        {"type": "object", "minProperties": 1, "patternProperties": {"^x": {"type": "null"}}}
        | {"additionalProperties": {"$ref": "#"}},
        {
            "type": "integer",
            "$defs": {"unused": ENDLESS["by items"] | {"items": {"$ref": "#/$defs/unused"}}},
        },
    ],
)
def test_a_schema_that_leads_to_itself_and_ends_is_taken(
    vocabulary: Vocabulary, schema: Any
) -> None:
    ends(vocabulary, schema, 0)


def test_schemas_that_lead_to_each_other_in_many_ways_take_no_time(vocabulary: Vocabulary) -> None:
    refs = [{"$ref": f"#/$defs/d{i}"} for i in range(40)]
    defs = {
        f"d{i}": {"type": "object", "properties": {"a": {"anyOf": refs}}, "required": ["a"]}
        for i in range(40)
    }
    with pytest.raises(InvalidSamplingError, match=r"no value that ends at #|too many ways"):
        compile_grammar(vocabulary, StructuredOutput(json_schema={**refs[0], "$defs": defs}))


# -- rules that lead to themselves


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('root ::= "a" root', "root"),
        ('root ::= "a" | "b" more\nmore ::= "(" more ")"', "more"),
        ('root ::= a*\na ::= b+ | "x" b\nb ::= [a-z] (a | b){2}', "a"),
        ('start: "a" | s\ns: T s\nT: /a{10000}/', "s"),
        ('start: "x" s\ns: T s | T s T\nT: "ab"', "start"),
        ('start: a\na: "a" b | "b" b "c"\nb: "a" a', "start"),
    ],
)
def test_a_rule_without_an_end_is_refused_by_name(
    vocabulary: Vocabulary, grammar: str, rule: str
) -> None:
    with pytest.raises(InvalidSamplingError, match=f"no text of the rule '{rule}' ends"):
        compile_grammar(vocabulary, StructuredOutput(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "a" root?', "aa"),
        ('root ::= "a" (root | )', "aa"),
        ('root ::= "a" | unused\nunused ::= "b" root', "ba"),
        ('root ::= "a" root{0,2} "b"\nunused ::= unused', "aabb"),
        ('start: "a" start? "b"', "aabb"),
        ('start: "a" [start] "b"', "aabb"),
        ('start: "a" start~0..2 "b"\nmore: more "c"', "aabb"),
    ],
)
def test_a_rule_that_leads_to_itself_and_ends_is_taken(
    vocabulary: Vocabulary, grammar: str, text: str
) -> None:
    matcher = compile_grammar(vocabulary, StructuredOutput(grammar=grammar)).matcher({LAST})
    assert matcher.accept_all(text.encode())
    assert matcher.is_accepting
