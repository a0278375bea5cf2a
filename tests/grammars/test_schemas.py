"""Whatever is drawn of what a schema allows is a value that the schema accepts, or the schema is
refused with a reason."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from aioserve import InvalidSamplingError
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
    jsonschema.Draft202012Validator(exact).validate(value)


def check(tokenizer: Tokenizer, vocabulary: Vocabulary, end: int, seed: int) -> str:
    """What came of one schema."""
    schema = SchemaWriter(seed).schema()
    form = StructuredOutput(json_schema=schema, disable_any_whitespace=seed % 4 != 0)
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
    for schema in (
        {keyword: UNSUPPORTED[keyword]},
        {"type": "array", "items": {"type": "object", keyword: UNSUPPORTED[keyword]}},
    ):
        with pytest.raises(InvalidSamplingError) as refused:
            compile_grammar(vocabulary, StructuredOutput(json_schema=schema))
        assert keyword in str(refused.value)


REFUSED: dict[str, Any] = {
    "schema is false": False,
    "x-guidance": {"type": "string", "x-guidance": {"lenient": True}},
    "Unknown format": {"type": "string", "format": "unheard-of"},
    "http://example.com": {"$ref": "http://example.com/schema.json"},
    "nothing that the tokenizer can write": {"$ref": "#"},
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


def test_a_word_that_names_a_keyword_is_data_where_data_is() -> None:
    _, vocabulary = pyhelp()
    for schema in (
        {"enum": [{"minProperties": 5, "x-guidance": 1}]},
        {"type": "object", "properties": {"minProperties": {"type": "integer"}}},
        {"const": {"allOf": [{"pattern": "x"}] * 20}},
    ):
        compile_grammar(vocabulary, StructuredOutput(json_schema=schema))
