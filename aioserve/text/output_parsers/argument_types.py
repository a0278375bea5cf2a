"""Types of the arguments of functions, as the JSON schemas of tools say them.

For families of models that write values without saying what they are: `5` is a number where the
schema asks for one, and a string where it asks for that. Knows no family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ANY", "STRING", "ArgumentTypes", "resolved", "types_of", "written"]

ANY: frozenset[str] = frozenset(["string", "number", "boolean", "null", "object", "array"])
"""JSON's types; integers are numbers."""
STRING: frozenset[str] = frozenset(["string"])
MAX_STEPS = 32
"""Most references and alternatives that are followed into each other."""
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
"""Words that models write for those of JSON."""


class ArgumentTypes:
    """Types of arguments, by function and name. Those that nothing is known of may be any."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools` as a chat template has them; what is no schema says nothing."""
        self._parameters: dict[object, Mapping[str, Any]] = {}
        for tool in tools:
            function = _object(tool.get("function"))
            name = function.get("name")
            if isinstance(name, str):
                self._parameters[name] = _object(function.get("parameters"))

    def of(self, function: str, argument: str) -> frozenset[str]:
        parameters = self._parameters.get(function, {})
        others = parameters.get("additionalProperties")
        schema = _object(parameters.get("properties")).get(argument, others)
        return types_of(schema, parameters)


def types_of(schema: object, root: Mapping[str, Any], steps: int = 0) -> frozenset[str]:
    """Types of the values that a schema may take; `root` is what its references lead into."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or steps > MAX_STEPS:
        return ANY
    types = ANY
    named = schema.get("type")
    if isinstance(named, str | list):
        names = [named] if isinstance(named, str) else named
        types &= {
            "number" if name == "integer" else name for name in names if isinstance(name, str)
        }
    if "const" in schema:
        types &= {_type_of(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        types &= {*map(_type_of, values)}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(inner := schema.get(keyword), list) and inner:
            types &= frozenset().union(
                *(types_of(one, root, steps + 1) for one in inner[:MAX_STEPS])
            )
    if isinstance(inner := schema.get("allOf"), list):
        for one in inner[:MAX_STEPS]:
            types &= types_of(one, root, steps + 1)
    return types or ANY


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """The schema that one with nothing but a reference leads to, or itself."""
    for _ in range(MAX_STEPS):
        if not isinstance(schema, dict) or not isinstance(ref := schema.get("$ref"), str):
            return schema
        at: object = root
        for part in ref.split("/")[1:]:
            at = _object(at).get(part.replace("~1", "/").replace("~0", "~"))
        schema = at
    return None


def written(text: str, types: frozenset[str]) -> str:
    """JSON of the value that a model wrote as `text`. Where the types have strings, it is one
    unless it is JSON of another of them; where they have none, unless it is JSON at all."""
    bare = text.strip(" \t\r\n")
    bare = _PYTHONS.get(bare, bare)
    try:
        kind = _type_of(json.loads(bare, parse_constant=_no_constant, parse_int=float))
    except (ValueError, RecursionError):
        return json.dumps(text if "string" in types else bare, ensure_ascii=False)
    if "string" in types and (kind == "string" or kind not in types):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (dict, "object"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "number"


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
