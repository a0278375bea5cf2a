"""Calls of models that write arguments between tags, held to the schemas of tools.

    <tool_call>weather <arg_key>city</arg_key> <arg_value>Oslo</arg_value> </tool_call>

Each argument is written as `aioserve.text.output_parsers.tagged` reads it. A string stands as it
is, up to the tag after it, and any other value as JSON. Arguments come in the order of the schema.
If it names some, there are no others. A schema of a string that can't be checked without quotes is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.call_rules import SPACE, Rules, escaped, marked, refused, text_of, words
from aioserve.grammars.keywords import NOTES
from aioserve.text.output_parsers.argument_types import STRING, resolved, types_of
from aioserve.text.output_parsers.tagged import CLOSES, OPENS, TaggedParser
from aioserve.text.output_parsers.tool_parser import MAX_WORD_CHARS

__all__ = ["tagged"]

_OF_OBJECT = NOTES | {"type", "properties", "required", "additionalProperties", "$schema", "$id"}
_DEFINITIONS = ("$defs", "definitions")
_OF_STRING = NOTES | {"type", "enum", "const", "minLength", "maxLength", "pattern"}
_NULLABLE = STRING | {"null"}
_ESCAPES = {"/": r"\/", r"\d": "[0-9]", r"\D": "[^0-9]"}
_ESCAPES |= {r"\w": "[A-Za-z0-9_]", r"\W": "[^A-Za-z0-9_]"}
"""Expressions that differ in Lark from ECMA's, where digits and words are of ASCII."""
_KEY = re.compile(r"[^<>\s](?:[^<>\n\r\t]*[^<>\s])?")


def tagged(rules: Rules, parser: type[TaggedParser]) -> None:
    """Add the rules of a family of models."""
    named = words(rules)
    if len(named) < len(rules.names):
        raise refused(
            f"have names of letters, digits, '_', '-' and '.', at most {MAX_WORD_CHARS}, where one "
            "is strict and the model writes them without quotes"
        )
    values = _Values(rules, parser)
    for index, name in named:
        rules.add(f"members{index}: {_members(values, name, rules.parameters[index])}")
    calls = [f"{text_of(name + parser.name_closes)} WS? members{index}" for index, name in named]
    rules.add(f"held: WS? ({' | '.join(calls)}) {rules.mark(parser.ends)}")
    marked(rules, parser.begins, around=(OPENS, CLOSES) if parser.ends != CLOSES else None)


def _members(values: _Values, name: str, schema: Mapping[str, Any]) -> str:
    """Return the rules of a function's arguments, with white space after each."""
    if unknown := sorted(set(schema) - _OF_OBJECT - {*_DEFINITIONS}):
        raise _no_rule(f"{unknown[0]} beside properties", name)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _no_rule("properties or required of another type", name)
    others = schema.get("additionalProperties", True)
    names = [*properties, *(key for key in required if key not in properties)]
    if not names:
        return "" if others is False else f"({values.rule(None, others, schema, name)})*"
    rules: list[str] = []
    for key in names:
        if key not in properties and others is False:
            raise _no_rule(f"a required name {key!r:.99} that there is no property of", name)
        rule = values.rule(key, properties.get(key, others), schema, name)
        rules.append(rule if key in required else f"({rule})?")
    return " ".join(rules)


class _Values:
    """Rules of arguments, each with name and value."""

    def __init__(self, rules: Rules, parser: type[TaggedParser]) -> None:
        self._rules = rules
        self._parser = parser
        self._num_texts = 0
        ways = f"{text_of(parser.value_closes)} | /{parser.cutting(escaped, f'{SPACE}*')}/"
        rules.add(
            r"KEY: /[^<>\n\r\t ]([^<>\n\r\t]{0,98}[^<>\n\r\t ])?/",
            f"VALUE: ANY & ~(ANY ({ways}) ANY)",
        )

    def rule(self, key: object, schema: object, root: Mapping[str, Any], function: str) -> str:
        """Return the rule of an argument of that name; None for any name."""
        if key is not None and not (
            isinstance(key, str) and len(key) <= MAX_WORD_CHARS and _KEY.fullmatch(key)
        ):
            raise _no_rule(f"the name {key!r:.99}, which its tags can't hold,", function)
        first, *more = self._parser.key_closes
        named = f"{text_of(self._parser.key_opens)} KEY {text_of(first)}"
        if key is not None:
            named = text_of(f"{self._parser.key_opens}{key}{first}")
        closes = "".join([f" WS? {self._rules.mark(tag)}" for tag in more])
        line = f" {text_of(self._parser.line)}" if self._parser.line else ""
        return f"{named}{closes}{line} {self._value(schema, root, key, function)} WS?"

    def _value(self, schema: object, root: Mapping[str, Any], key: object, function: str) -> str:
        """Return the rule of a value, and the tag after it."""
        bare = resolved(schema, root)
        if bare is True or bare is None or (isinstance(bare, dict) and not set(bare) - NOTES):
            return self._text("VALUE")
        types = types_of(schema, root)
        if isinstance(schema, dict) and "string" not in types:
            within = {name: root[name] for name in _DEFINITIONS if name in root}
            return f"{self._rules.json({**schema, **within})} {self._closing()}"
        if isinstance(schema, dict) and schema is not bare and set(schema) - NOTES - {"$ref"}:
            bare = None
        text = _string_of(bare, types, root)
        if text is None or set(text) - _OF_STRING:
            raise _no_rule(f"parameters as {key!r:.99}: one that takes strings", function)
        is_null = types == _NULLABLE
        also_null = f"{self._exactly('null')} | " if is_null else ""
        return f"({also_null}{self._string(text, is_null=is_null)})"

    def _string(self, schema: Mapping[str, Any], *, is_null: bool) -> str:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            if len(set(schema) - NOTES - {"type"}) > 1:
                raise refused("have strings of enum or const with nothing else where one is strict")
            return " | ".join([self._exactly(one) for one in values if isinstance(one, str)])
        name = f"VALUE_{self._num_texts}"
        self._num_texts += 1
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        parts = ["VALUE", f"/(?s:.{{{least},{most}}})/"]
        if (pattern := schema.get("pattern")) is not None:
            parts.append(_expression(pattern))
        if is_null:
            parts.append(r"~/[ \t\r\n]*(null|None)[ \t\r\n]*/")
        self._rules.add(f"{name}: {' & '.join(parts)}")
        return self._text(name)

    def _text(self, terminal: str) -> str:
        """Return the rule of a terminal's text, and the tag after it."""
        rule = f"closed_{terminal.lower()}"
        tag = self._parser.line + self._parser.value_closes
        self._rules.up_to(terminal, rule, tag, self._special)
        return rule

    def _exactly(self, text: str) -> str:
        cut = re.search(self._parser.cutting(re.escape, r"\s*"), text)
        if (tag := cut[0] if cut else self._parser.value_closes) in text:
            raise refused(f"have no value with {tag:.99} where one is strict")
        whole = text_of(text + self._parser.line + self._parser.value_closes)
        special = self._special
        return whole if special is None else f"({whole} | {text_of(text)} <[{special}]>)"

    def _closing(self) -> str:
        if self._parser.line:
            return text_of(self._parser.line + self._parser.value_closes)
        return self._rules.mark(self._parser.value_closes)

    @property
    def _special(self) -> int | None:
        """Id of the tag after a value. After a line it would have to end the line first."""
        closes = self._parser.value_closes
        return None if self._parser.line else self._rules.style.specials.get(closes)


def _string_of(
    schema: object, types: frozenset[str], root: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return the part of a schema that is about strings; None if it takes values beside these and
    null.
    """
    if not isinstance(schema, dict) or types not in (STRING, _NULLABLE):
        return None
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            inner = schema[keyword]
            if set(schema) - NOTES - {keyword} or not isinstance(inner, list):
                return None
            texts = [one for one in inner if types_of(one, root) == STRING]
            nulls = [one for one in inner if types_of(one, root) == {"null"}]
            if len(texts) != 1 or len(texts) + len(nulls) != len(inner):
                return None
            return _string_of(resolved(texts[0], root), STRING, root)
    return schema


def _expression(pattern: object) -> str:
    """Return an expression that matches all of a string, for a pattern that matches anywhere
    in it.
    """
    if not isinstance(pattern, str):
        raise refused("have patterns of type str where one is strict")
    starts, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern)
    inner = pattern[1 if starts else 0 : -1 if ends else None]
    inner = re.sub(r"\\.|/", lambda found: _ESCAPES.get(found[0], found[0]), inner, flags=re.DOTALL)
    anything = "(?s:.*)"
    whole = f"{'' if starts else anything}(?:{inner}){'' if ends else anything}"
    return "/" + whole.replace("\n", r"\n") + "/"


def _no_rule(what: str, function: str) -> InvalidSamplingError:
    return refused(
        f"have no {what} in {function!r:.99}, as the model writes strings without quotes, and a "
        "tool is strict"
    )
