"""Types of the arguments of functions, from the JSON schemas of tools.

They are for families of models that write values without their types: `5` is a number or a string,
whichever the schema asks for. Knows no family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

__all__ = ["ANY", "STRING", "ArgumentTypes", "resolved", "types_of", "written"]

ANY: frozenset[str] = frozenset(["string", "number", "boolean", "null", "object", "array"])
"""Types of JSON; integers are numbers."""
STRING: frozenset[str] = frozenset(["string"])
MAX_STEPS = 32
"""Most references and alternatives that are followed into each other."""
_PYTHONS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}
"""Words and brackets of JSON, by those of Python that models write for them."""
MAX_PYTHON_CHARS = 20_000
"""Most characters of a value that is tried as a Python literal."""
_PYTHON_PART = re.compile(
    r"""(?s: '(?P<single>(?:[^'\\]|\\.)*+)' | "(?P<double>(?:[^"\\]|\\.)*+)" )
    | (?P<word> \b(?:True|False|None)\b | [()] ) | ,(?P<last> (?=\s*[\])}]) ) | \\.""",
    re.VERBOSE,
)
_PYTHON_ESCAPE = re.compile(r"(?s)\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_PYTHON_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_PYTHON_ESCAPES |= {"0": "\0", "\n": "", "'": "'", '"': '"', "\\": "\\"}


class ArgumentTypes:
    """Types of arguments, by function and name. An unknown argument may have any type."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Read the types of `tools`, in a chat template's form. Invalid schemas are ignored."""
        self.tools: Sequence[Mapping[str, Any]] = tools
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
    """Return the types of the values that a schema allows. References lead into `root`."""
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
    """Return the schema that a reference leads to, or `schema` itself."""
    for _ in range(MAX_STEPS):
        if not isinstance(schema, dict) or not isinstance(ref := schema.get("$ref"), str):
            return schema
        at: object = root
        for part in unquote(ref).split("/")[1:]:
            at = _object(at).get(part.replace("~1", "/").replace("~0", "~"))
        schema = at
    return None


def written(text: str, types: frozenset[str]) -> str:
    """Return JSON of the value that a model wrote as `text`, in JSON or as a Python literal.

    If `types` include strings, it is a string unless it is of another of these types. Otherwise it
    is a string only if it is neither JSON nor a literal.
    """
    bare = text.strip(" \t\r\n")
    kind = _kind(bare)
    starts = "[{TFN" if "string" in types else "[{TFN('"
    if kind is None and len(bare) <= MAX_PYTHON_CHARS and bare.startswith(tuple(starts)):
        translated = _PYTHON_PART.sub(_translated, bare)
        if (kind := _kind(translated)) is not None:
            bare = translated
    if kind is None:
        return json.dumps(text if "string" in types else bare, ensure_ascii=False)
    if "string" in types and (kind == "string" or kind not in types):
        return json.dumps(text, ensure_ascii=False)
    return bare


def _translated(part: re.Match[str]) -> str:
    """Return a part of a Python literal as JSON."""
    if part["word"] is not None:
        return _PYTHONS[part["word"]]
    if part["last"] is not None:
        return ""
    text = part["single"] if part["double"] is None else part["double"]
    if text is None:
        return part[0]
    return json.dumps(_PYTHON_ESCAPE.sub(_unescaped, text), ensure_ascii=False)


def _unescaped(escape: re.Match[str]) -> str:
    two, four, eight, char = escape.groups()
    if char is not None:
        return _PYTHON_ESCAPES.get(char, escape[0])
    code = int(two or four or eight, 16)
    is_char = code <= 0x10FFFF and not 0xD800 <= code < 0xE000
    return chr(code) if is_char else escape[0]


def _kind(text: str) -> str | None:
    """Return the type of a value in JSON; None for text that is no JSON."""
    try:
        return _type_of(json.loads(text, parse_constant=_no_constant, parse_int=float))
    except (ValueError, RecursionError):
        return None


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
