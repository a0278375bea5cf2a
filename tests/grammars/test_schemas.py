"""Values drawn under a schema are accepted by the schema, or the schema is refused with a
reason."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest

from aioserve import InvalidSamplingError
from aioserve.grammars import schema as schemas
from aioserve.grammars.grammar import compile_grammar
from aioserve.grammars.vocabulary import Vocabulary
from aioserve.structured_output import StructuredOutput
from aioserve.text.tokenizer import Tokenizer
from tests.grammars.schemas import UNSUPPORTED, SchemaWriter
from tests.grammars.walks import END, Walk, pyhelp, single_bytes

SCHEMAS = 400
WALKS = 2


def number(text: str) -> Decimal | float:
    """Exactly: a float of Python's isn't a multiple of 0.01."""
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits
        return float(text)


def validate(text: str, schema: Any) -> None:
    value = json.loads(text, parse_float=number)
    exact = json.loads(json.dumps(schema), parse_float=number)
    with localcontext(prec=2000):  # of a quotient, for multipleOf
        jsonschema.Draft202012Validator(exact).validate(value)


def check(tokenizer: Tokenizer, vocabulary: Vocabulary, end: int, seed: int) -> str:
    """Return the outcome of one schema."""
    schema = SchemaWriter(seed).schema()
    form = StructuredOutput(json_schema=schema, max_whitespace=(0, None, 0, 32)[seed % 4])
    try:
        grammar = compile_grammar(vocabulary, form)
    except InvalidSamplingError as error:
        reason = str(error).removeprefix("json_schema must be one that can be kept: ")
        return "refused" if reason.strip() else "refused without a reason"
    came = "kept"
    for walk_seed in range(WALKS):
        walk = Walk(grammar, {end}, walk_seed)
        if walk.matcher.has_ended:
            assert walk.ids.pop() == end
            validate(tokenizer.decode(walk.ids), schema)
        else:
            came = "went on"
    return came


def test_what_is_drawn_with_a_real_tokenizer_validates() -> None:
    tokenizer, vocabulary = pyhelp()
    came = Counter(check(tokenizer, vocabulary, END, seed) for seed in range(SCHEMAS))
    assert came["kept"] > 0.6 * SCHEMAS, came
    assert came["went on"] < 0.1 * SCHEMAS, came
    assert came["refused"] > 0.05 * SCHEMAS, came
    assert not came["refused without a reason"]


def test_what_is_drawn_byte_by_byte_validates(tmp_path: Path) -> None:
    tokenizer, vocabulary = single_bytes(tmp_path)
    came = Counter(check(tokenizer, vocabulary, 280, seed) for seed in range(1000, 1100))
    assert came["kept"] > 60, came


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED))
def test_a_keyword_that_is_not_supported_is_refused_by_name(keyword: str) -> None:
    _, vocabulary = pyhelp()
    more = {"else": {"minLength": 3}} if keyword == "if" else {}
    bare = {keyword: UNSUPPORTED[keyword], **more}
    for schema in (bare, {"type": "array", "items": {"type": "object", **bare}}):
        with pytest.raises(InvalidSamplingError) as refused:
            compile_grammar(vocabulary, StructuredOutput(json_schema=schema))
        assert keyword in str(refused.value)


REFUSED: dict[str, Any] = {
    "schema is false": False,
    "x-guidance": {"type": "string", "x-guidance": {"lenient": True}},
    "Unknown format": {"type": "string", "format": "unheard-of"},
    "http://example.com": {"$ref": "http://example.com/schema.json"},
    "no value that ends at #": {"$ref": "#"},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    "names may come twice": {"type": "object", "minProperties": 2},
    "9 patterns and formats": {
        "allOf": [{"properties": {"a": {"pattern": f"x{i}"}}} for i in range(9)]
    },
    "nested more than 64 deep": '{"items":' * 65 + "true" + "}" * 65,
    "fuel": {"type": "number", "multipleOf": 999999937},
    "is unsatisfiable": {"properties": {"a": False}, "required": ["a"], "type": "object"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_schema_that_can_not_be_kept_is_refused_with_a_reason(reason: str) -> None:
    _, vocabulary = pyhelp()
    with pytest.raises(InvalidSamplingError) as refused:
        compile_grammar(vocabulary, StructuredOutput(json_schema=REFUSED[reason]))
    assert refused.value.argument == "json_schema"
    assert reason in str(refused.value)


def test_patterns_of_one_string_are_counted_wherever_they_come_from() -> None:
    _, vocabulary = pyhelp()
    four = [{"type": "string", "pattern": f"a{i}"} for i in range(4)]
    schema = {
        "$defs": {"four": {"allOf": four}, "eight": {"allOf": [{"$ref": "#/$defs/four"}] * 2}},
        "type": "array",
        "items": {"$ref": "#/$defs/eight", "anyOf": [{"format": "uuid"}, {"type": "null"}]},
    }
    with pytest.raises(InvalidSamplingError, match="9 patterns and formats"):
        compile_grammar(vocabulary, StructuredOutput(json_schema=schema))


def test_references_that_multiply_are_counted_in_no_time() -> None:
    _, vocabulary = pyhelp()
    defs: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(30)
    }
    schema = {"$defs": defs | {"d30": {"pattern": "x"}}, "$ref": "#/$defs/d0"}
    with pytest.raises(InvalidSamplingError):
        compile_grammar(vocabulary, StructuredOutput(json_schema=schema))


def spelled(name: str, number: int) -> str:
    """One of the ways to write a name in a reference."""
    ways = [f"%{ord(char):02X}" if number >> place & 1 else char for place, char in enumerate(name)]
    return "#/$defs/" + "".join(ways)


def test_a_reference_that_is_spelled_in_many_ways_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, vocabulary = pyhelp()
    name = "abcdefghij"
    inner = {"properties": {f"q{i}": {"type": "string"} for i in range(100)}}
    schema = {
        "$defs": {name: inner | {"type": "object", "additionalProperties": False}},
        "type": "array",
        "prefixItems": [{"$ref": spelled(name, i)} for i in range(620)],
    }
    assert len({each["$ref"] for each in schema["prefixItems"]}) == 620
    looked_at: list[object] = []
    within = schemas._Joined.of

    def counted(self: Any, schema: Any, refs: Any) -> Any:
        looked_at.append(schema)
        return within(self, schema, refs)

    monkeypatch.setattr(schemas._Joined, "of", counted)
    compile_grammar(vocabulary, StructuredOutput(json_schema=schema))
    assert len(looked_at) < 10_000


@pytest.mark.parametrize("name", ["Größe", "a b", 'a"b', "[z]", "a/b", "a~b", "50%", "#", "名前"])
def test_names_that_are_referred_to_are_any(name: str) -> None:
    tokenizer, vocabulary = pyhelp()
    pointer = name.replace("~", "~0").replace("/", "~1")
    for ref in (f"#/$defs/{pointer}", f"#/$defs/{quote(pointer)}"):
        schema = {"$defs": {name: {"const": 17}}, "$ref": ref}
        matcher = compile_grammar(vocabulary, StructuredOutput(json_schema=schema)).matcher({END})
        assert matcher.accept_all(tokenizer.encode("17"))
        assert matcher.is_accepting


def test_references_to_each_part_of_nested_schemas_are_counted() -> None:
    _, vocabulary = pyhelp()
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(29):
        leaves: dict[str, Any] = {f"x{i}": {"type": "string"} for i in range(30)}
        schema = {"type": "object", "properties": leaves | {"n": schema}}
    schema["properties"] |= {f"r{i}": {"$ref": "#" + "/properties/n" * i} for i in range(1, 30)}
    with pytest.raises(InvalidSamplingError, match="more schemas within it; 10000 are"):
        compile_grammar(vocabulary, StructuredOutput(json_schema=schema))


def test_a_word_that_names_a_keyword_is_data_where_data_is() -> None:
    _, vocabulary = pyhelp()
    for schema in (
        {"enum": [{"minProperties": 5, "x-guidance": 1}]},
        {"type": "object", "properties": {"minProperties": {"type": "integer"}}},
        {"const": {"allOf": [{"pattern": "x"}] * 20}},
    ):
        compile_grammar(vocabulary, StructuredOutput(json_schema=schema))


def takes(vocabulary: Vocabulary, schema: Any, text: str) -> bool:
    """Return true if the schema allows `text`. `vocabulary` is of single bytes."""
    form = StructuredOutput(json_schema=schema, disable_any_whitespace=True)
    matcher = compile_grammar(vocabulary, form).matcher({280})
    return matcher.accept_all(text.encode()) and matcher.is_accepting


A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
P: dict[str, Any] = {"type": "object", "patternProperties": {"^[a-f]$": {"type": "integer"}}}
E: dict[str, Any] = {"type": "object", "properties": {"\u00e9\U0001f600": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (A, r'{"a":1,"\u0061":"x"}'),
        (A | {"additionalProperties": True}, r'{"a":1,"\u0061":"x"}'),
        (A | {"additionalProperties": {"type": "string"}}, r'{"a":1,"\u0061":"x"}'),
        ({"allOf": [A, {"properties": {"b": True}}]}, r'{"a":1,"\u0061":"x"}'),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, r'{"a":1,"\u0061":"x"}'),
        ({"type": "array", "items": A}, r'[{"a":1,"\u0061":"x"}]'),
        (P, r'{"\u0061":"x"}'),
        (P | {"additionalProperties": {"type": "string"}}, r'{"\u0061":"x"}'),
        (E, r'{"\u00e9\ud83d\ude00":1}'),
        ({"type": "object", "properties": {'"\n/': {"type": "null"}}}, r'{"\"\n\/":1}'),
        ({"type": "object", "properties": {'"\n/': {"type": "null"}}}, r'{"\u0022\u000a/":1}'),
        ({"type": "object", "required": ["a"], "minProperties": 2}, r'{"a":1,"\u0061":2}'),
    ],
)
def test_a_name_that_is_written_in_another_way_is_the_same_name(
    tmp_path: Path, schema: Any, text: str
) -> None:
    _, vocabulary = single_bytes(tmp_path)
    with pytest.raises(jsonschema.ValidationError):
        validate(text, schema)
    assert not takes(vocabulary, schema, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (A, '{"a":1,"b":"x","\u00e9":[{"a":"y"}]}'),
        ({"allOf": [A, {"properties": {"b": {"type": "null"}}}]}, '{"a":1,"b":null,"c":2}'),
        (P, '{"a":1,"f":2}'),
        ({"type": "object", "additionalProperties": {"type": "null"}}, '{"a":null}'),
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"b":2}'),
        ({"oneOf": [A, {"type": "object", "properties": {"a": False}}]}, '{"b":1}'),
    ],
)
def test_names_that_no_schema_knows_are_drawn(tmp_path: Path, schema: Any, text: str) -> None:
    _, vocabulary = single_bytes(tmp_path)
    validate(text, schema)
    assert takes(vocabulary, schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [P | {"required": ["a"]}, {"type": "object", "required": ["x"]}]},
        {"oneOf": [{"type": "object", "required": ["x"]}, {"const": {"x": 1, '"': 2}}]},
        {"oneOf": [A | {"additionalProperties": {}}, E | {"required": ["\n"]}]},
    ],
)
def test_schemas_are_not_told_apart_by_what_is_left_out_of_them(schema: Any) -> None:
    _, vocabulary = pyhelp()
    with pytest.raises(InvalidSamplingError, match="has oneOf"):
        compile_grammar(vocabulary, StructuredOutput(json_schema=schema))


def test_a_schema_in_a_grammar_knows_names_as_well(tmp_path: Path) -> None:
    _, vocabulary = single_bytes(tmp_path)
    lark = f'// %json\nstart: "%json " %json {json.dumps(A)} "!"'
    grammar = compile_grammar(vocabulary, StructuredOutput(grammar=lark))
    for text, is_taken in ((r'{"a":1,"b":2}', True), (r'{"a":1,"\u0061":"x"}', False)):
        matcher = grammar.matcher({280})
        assert matcher.accept_all(f"%json {text}!".encode()) == is_taken
    quoted = StructuredOutput(grammar=f"start: /a/ // %json {json.dumps(A)}")
    with pytest.raises(InvalidSamplingError, match="quotes a schema"):
        compile_grammar(vocabulary, quoted)


NINE: dict[str, Any] = {"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(9)]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/%24defs/A", "$defs": {"A": NINE}},
        {"$ref": "#/default", "default": NINE},
        {"$ref": "#/foo", "foo": NINE},
        {"$ref": "#A", "$defs": {"A": NINE | {"$anchor": "A"}}},
        {"$ref": "#A", "$defs": {"A": NINE}},
        {"$ref": "#A", "$defs": {"A": NINE | {"$dynamicAnchor": "A"}}},
        {"$ref": "urn:a", "$defs": {"A": NINE | {"$id": "urn:a"}}},
        {"$ref": "urn:r#/$defs/A", "$defs": {"A": NINE}, "$id": "urn:r"},
        {"$ref": "", "$defs": {"A": NINE}},
        {"properties": {"a": {"$ref": "#/enum/0"}}, "enum": [{"minProperties": 3}]},
        {"$ref": "#/$defs/%41", "$defs": {"A": {"minProperties": 3}}},
    ],
)
def test_no_reference_leads_to_what_is_not_checked(schema: Any) -> None:
    _, vocabulary = pyhelp()
    reason = "no schema within it|9 patterns|only the whole schema|minProperties 3"
    with pytest.raises(InvalidSamplingError, match=reason):
        compile_grammar(vocabulary, StructuredOutput(json_schema=schema))


def test_references_lead_to_all_places_of_schemas(tmp_path: Path) -> None:
    _, vocabulary = single_bytes(tmp_path)
    defs = {"a/b~ c%": {"type": "integer"}}
    for ref in ("#/%24defs/a~1b~0%20c%25", "#/allOf/0", "#/allOf/1/items"):
        schema = {
            "$id": "http://example.com/root",
            "$defs": defs,
            "allOf": [{"type": "array"}, {"items": {"type": ["integer", "array"]}}],
            "prefixItems": [{"$ref": ref}],
        }
        assert takes(vocabulary, schema, "[[]]" if "all" in ref else "[1]"), ref


def test_a_long_way_of_references_is_refused_with_its_limit() -> None:
    _, vocabulary = pyhelp()
    for length, inner in ((1500, {}), (70, {}), (60, {"items": {"items": {"items": {}}}})):
        defs: dict[str, Any] = {}
        for place in range(length):
            at: Any = {"$ref": f"#/$defs/d{place + 1}"}
            for _ in range(20 if inner else 0):
                at = {"items": at}
            defs[f"d{place}"] = at
        schema = {"$defs": defs | {f"d{length}": True}, "$ref": "#/$defs/d0"}
        with pytest.raises(InvalidSamplingError) as refused:
            compile_grammar(vocabulary, StructuredOutput(json_schema=schema))
        assert refused.value.argument == "json_schema"
        if not inner:
            assert refused.value.limit == 64
            assert str(refused.value) == (
                "json_schema must be one that can be kept: it leads through more than 64 "
                "references; 64 are taken at most"
            )
