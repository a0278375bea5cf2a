"""JSON schemas, drawn by a seed.

They hold types, enums, constants, nested objects and arrays, numbers, strings, alternatives and
references, and now and then an unsupported keyword.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

UNSUPPORTED: dict[str, Any] = {
    "not": {"type": "null"},
    "uniqueItems": True,
    "contains": {"type": "integer"},
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "if": {"type": "string"},
    "$dynamicRef": "#meta",
}
"""Keywords of Draft 2020-12 that say something of a value, and that no grammar is made of."""

FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
PATTERNS = (
    "^[a-z]+$",
    "^[A-Z][a-z]{2,5}$",
    "[0-9]{3}",
    "^(red|green)-[0-9]+$",
    "^\\d\\w\\s.$",
    "x|y",
)
NAMES = ("name", "id", "tags", "x-1", "größe", "a b", "", "値", 'q"t', "minProperties")


class SchemaWriter:
    """Draws one schema after the other."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._uses_defs = False

    def schema(self) -> dict[str, Any] | bool:
        self._uses_defs = False
        root = self._schema(0)
        if self._rng.random() < 0.05 and isinstance(root, dict):
            keyword = self._rng.choice(sorted(UNSUPPORTED))
            root[keyword] = UNSUPPORTED[keyword]
            if keyword == "if":
                root["then"] = {"maxLength": 3}
        if self._uses_defs and isinstance(root, dict):
            root["$defs"] = {
                "leaf": self._string(),
                "tree": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "children": {
                            "type": "array",
                            "items": {"$ref": "#/$defs/tree"},
                            "maxItems": 2,
                        },
                    },
                    "required": ["value"],
                    "additionalProperties": False,
                },
            }
        return root

    def _schema(self, depth: int) -> dict[str, Any] | bool:
        kinds: list[Callable[[], dict[str, Any] | bool]] = [
            self._string,
            self._number,
            self._number,
            lambda: {"type": self._rng.choice(["null", "boolean", "integer", "number", "string"])},
            lambda: {"type": self._rng.sample(["null", "boolean", "integer", "string"], 2)},
            lambda: {"enum": self._rng.sample([1, "two", None, True, [3, "x"], {"k": 0.5}, ""], 3)},
            lambda: {"const": self._rng.choice([0, -1.5, "const\n", [], {"a": [None]}, "é"])},
            self._ref,
        ]
        if depth < 3:
            kinds += [
                lambda: self._object(depth),
                lambda: self._object(depth),
                lambda: self._array(depth),
                lambda: self._array(depth),
                lambda: self._alternatives(depth),
                lambda: self._all(depth),
            ]
        if depth:
            kinds.append(lambda: self._rng.random() < 0.9)
        elif self._rng.random() < 0.7:
            kinds = [lambda: self._object(0), lambda: self._array(0)]
        return self._rng.choice(kinds)()

    def _ref(self) -> dict[str, Any]:
        self._uses_defs = True
        return {"$ref": self._rng.choice(["#/$defs/leaf", "#/$defs/tree", "#/$defs/none"][:2])}

    def _string(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        kind = self._rng.randrange(4)
        if kind == 0:
            low = self._rng.randrange(4)
            schema |= {"minLength": low, "maxLength": low + self._rng.randrange(6)}
        elif kind == 1:
            schema["pattern"] = self._rng.choice(PATTERNS)
        elif kind == 2:
            schema["format"] = self._rng.choice([*FORMATS, "unheard-of"])
        else:
            schema["maxLength"] = self._rng.choice([0, 3, 12])
        return schema

    def _number(self) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
        low = rng.choice([-1000, -3, 0, 0.5, 7, 99.25, -(2**63), 123456789.12345679])
        if rng.random() < 0.7:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.7:
            top = low + rng.choice([0, 1, 2.5, 10, 10_000, 2**53, 2**63 - 1, 2**64, 1e300])
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = top
        if rng.random() < 0.25:
            schema["multipleOf"] = rng.choice([2, 3, 10, 0.5, 0.01, 7])
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(NAMES, rng.randrange(4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._schema(depth + 1) for name in names},
        }
        if rng.random() < 0.6:
            schema["required"] = rng.sample(names, rng.randrange(len(names) + 1))
        if rng.random() < 0.15:
            schema["required"] = [*schema.get("required", []), "elsewhere"]
        others = rng.random()
        if others < 0.6:
            schema["additionalProperties"] = False
        elif others < 0.8:
            schema["additionalProperties"] = self._schema(depth + 1)
        elif others < 0.9:
            schema["patternProperties"] = {"^p_[a-z]$": self._schema(depth + 1)}
            schema["additionalProperties"] = False
        if rng.random() < 0.15:
            schema[rng.choice(["minProperties", "maxProperties"])] = rng.randrange(4)
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": "array", "items": self._schema(depth + 1)}
        if rng.random() < 0.3:
            schema["prefixItems"] = [self._schema(depth + 1) for _ in range(rng.randrange(1, 3))]
        low = rng.choice([0, 0, 0, 1, 2])
        if low:
            schema["minItems"] = low
        if rng.random() < 0.8:
            schema["maxItems"] = low + rng.randrange(3)
        return schema

    def _alternatives(self, depth: int) -> dict[str, Any]:
        keyword = self._rng.choice(["anyOf", "anyOf", "oneOf"])
        return {keyword: [self._schema(depth + 1) for _ in range(self._rng.randrange(1, 4))]}

    def _all(self, depth: int) -> dict[str, Any]:
        return {"allOf": [self._object(depth + 1), self._object(depth + 1)]}
