"""Forms at the edge: one of six, each plain and within its bounds, or an error that names it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from aioserve import InvalidSamplingError, SamplingParams, StructuredOutput
from aioserve.structured_output import MAX_CHARS, MAX_CHOICES, MAX_DEPTH
from tests.docs.test_reference import first_column, section


class Sly(dict):
    def items(self) -> Any:
        raise KeyError("never")


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_schema_is_kept_as_json_text_whichever_way_it_is_given() -> None:
    schema = {"enum": [1, 2.5, None, True, ("a", "\u00e9")], "items": Sly(type="null")}
    kept = StructuredOutput(json_schema=schema).json_schema
    assert json.loads(str(kept)) == {
        "enum": [1, 2.5, None, True, ["a", "\u00e9"]],
        "items": {"type": "null"},
    }
    assert StructuredOutput(json_schema=kept).json_schema == kept
    assert StructuredOutput(json_schema=False).json_schema == "false"
    assert StructuredOutput(json_schema=nested(MAX_DEPTH)).kind == "json_schema"
    assert StructuredOutput(choice=["a"] * MAX_CHOICES).kind == "choice"
    assert StructuredOutput(regex="a" * MAX_CHARS).kind == "regex"


def structure(begin: str, end: str = ">") -> dict[str, Any]:
    return {"begin": begin, "schema": {}, "end": end}


def tag(*structures: dict[str, Any], **more: Any) -> dict[str, Any]:
    plain = {"structures": [structure("<a"), *structures], "triggers": ["<"]}
    return {"structural_tag": plain | more}


endless: dict[str, Any] = {}
endless["items"] = endless
WRONG: list[tuple[dict[str, Any], str, Any, str]] = [
    ({}, "structured_output", 1, "exactly one of"),
    ({"regex": "a", "json_object": True}, "structured_output", 1, "json_object and regex"),
    ({"json_object": 1}, "json_object", None, "got 1"),
    ({"regex": ""}, "regex", 1, "1 to 131072"),
    ({"regex": "a" * (MAX_CHARS + 1)}, "regex", MAX_CHARS, "1 to 131072"),
    ({"grammar": b"start"}, "grammar", None, "be a str"),
    ({"choice": []}, "choice", 1, "at least 1"),
    ({"choice": "abc"}, "choice", None, "a sequence"),
    ({"choice": ["a", 1]}, "choice", None, r"choice\[1\]"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice", MAX_CHOICES, "at most 4096"),
    ({"choice": ["a", "b" * 8193]}, "choice", 8192, r"choice\[1\] must be a str of 1 to 8192"),
    ({"choice": ["a" * 8192] * 17}, "choice", MAX_CHARS, "139264"),
    ({"json_schema": 3}, "json_schema", None, "a dict, its JSON text or a class"),
    ({"json_schema": "{"}, "json_schema", None, "be JSON"),
    ({"json_schema": "[" * 100_000}, "json_schema", None, "be JSON"),
    ({"json_schema": "[]"}, "json_schema", None, "an object"),
    ({"json_schema": {1: 2}}, "json_schema", None, "names of type str"),
    ({"json_schema": {"const": float("nan")}}, "json_schema", None, "what JSON has"),
    ({"json_schema": {"const": {1, 2}}}, "json_schema", None, "what JSON has"),
    ({"json_schema": {"const": 10**5000}}, "json_schema", None, "what JSON has"),
    ({"json_schema": {"const": "\ud800"}}, "json_schema", None, "be JSON"),
    ({"json_schema": {"const": "a" * MAX_CHARS}}, "json_schema", MAX_CHARS, "131072"),
    ({"json_schema": {"enum": [0] * (MAX_CHARS + 1)}}, "json_schema", MAX_CHARS, "131072"),
    ({"json_schema": nested(MAX_DEPTH + 1)}, "json_schema", MAX_DEPTH, "64 deep"),
    ({"json_schema": endless}, "json_schema", MAX_DEPTH, "64 deep"),
    (
        {"structural_tag": 3},
        "structural_tag",
        None,
        "a dict, its JSON text or a class",
    ),
    ({"structural_tag": "["}, "structural_tag", None, "be JSON"),
    ({"structural_tag": {}}, "structural_tag", None, "missing required field `structures`"),
    (tag(triggers=[]), "structural_tag", 1, "1 to 64 triggers, got 0"),
    (tag(triggers=["<"] * 65), "structural_tag", 64, "1 to 64 triggers, got 65"),
    (tag(structures=[]), "structural_tag", 1, "1 to 256 structures, got 0"),
    (tag(format={}), "structural_tag", None, "unknown field `format`"),
    (tag(triggers=["<", ""]), "structural_tag", 1, "1 to 1024 characters, got 0"),
    (tag(structure("<" * 1025)), "structural_tag", 1024, "1 to 1024 characters, got 1025"),
    (tag(structure("<a", "")), "structural_tag", 1, "1 to 1024 characters, got 0"),
    (tag(structure("a<")), "structural_tag", None, "a trigger at the start of each begin"),
    (tag(triggers=["<", "<a"]), "structural_tag", None, "no trigger within another, as '<' is"),
    (tag(structure("<b"), structure("<bc")), "structural_tag", None, "no begin at the start of"),
    (
        {"regex": "a", "disable_any_whitespace": True},
        "disable_any_whitespace",
        None,
        "False with regex",
    ),
    ({"regex": "a", "max_whitespace": 3}, "max_whitespace", None, "None with regex, got 3"),
    ({"json_object": True, "max_whitespace": 33}, "max_whitespace", 32, r"\[0, 32\], got 33"),
    (
        {"json_object": True, "max_whitespace": 2, "disable_any_whitespace": True},
        "max_whitespace",
        0,
        "must be 0 with disable_any_whitespace, got 2",
    ),
]


@pytest.mark.parametrize(("given", "argument", "limit", "message"), WRONG)
def test_what_is_wrong_is_named_with_its_limit(
    given: dict[str, Any], argument: str, limit: Any, message: str
) -> None:
    with pytest.raises(InvalidSamplingError, match=message) as refused:
        StructuredOutput(**given)
    assert (refused.value.argument, refused.value.limit) == (argument, limit)
    assert argument in str(refused.value)


def test_parameters_take_a_form_and_nothing_else() -> None:
    form = StructuredOutput(json_object=True)
    params = SamplingParams(structured_output=form)
    assert msgspec.structs.replace(params, max_tokens=3).structured_output is form
    for wrong in ({"json_object": True}, "json", StructuredOutput):
        with pytest.raises(InvalidSamplingError, match="must be a StructuredOutput"):
            SamplingParams(structured_output=wrong)  # pyright: ignore[reportArgumentType]


def test_the_reference_has_every_field_in_order() -> None:
    shown = first_column(section("sampling-params.md", "Structured output"))
    assert shown == list(StructuredOutput.__struct_fields__)
