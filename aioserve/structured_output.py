"""Structured output: a value that a caller makes and a grammar is compiled from.

Knows no library of grammars: `aioserve.grammars` defines the meaning of a schema or a regular
expression. Values are made plain here, so that they can't change while a thread compiles them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import msgspec

from aioserve.arguments import (
    MadeByNames,
    boolean,
    check,
    integer,
    optional,
    plain_int,
    plain_str,
    sequence,
    shown,
    text,
)
from aioserve.errors import InvalidSamplingError
from aioserve.schema_classes import SchemaClass, has_schema, placed, schema_of

__all__ = ["MAX_WHITESPACE", "StructuralTag", "StructuredOutput", "structured_output"]

MAX_CHARS = 2**17
"""Most characters of a schema, expression or grammar, or of all choices together."""
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 2**13
"""Most characters of a choice: fewer bytes than a grammar follows (`MAX_LEXER_STATES`)."""
MAX_DEPTH = 64
"""Deepest nesting of values in a schema."""

MAX_WHITESPACE = 32
MAX_STRUCTURES = 256
MAX_TRIGGERS = 64
MAX_MARK_CHARS = 1024
"""Most characters of a structural tag's `begin`, `end` or trigger."""
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
STEPS_TO_SCHEMA = {"json_schema": 0, "structural_tag": len(("structures", 0, "schema"))}
OF_JSON = ("json_schema", "json_object", "structural_tag")
"""Kinds that contain JSON."""


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, metaclass=MadeByNames):
    """Form that a completion must have: exactly one of six kinds. Each has at most 131,072
    characters.

    Raises `InvalidSamplingError` for none or several of them, and for a value that isn't as
    described below. Something unsupported, such as an unknown keyword of a schema, ends the request
    with that error when it is compiled.
    """

    json_schema: Mapping[str, Any] | bool | str | SchemaClass | None = None
    """The answer is a JSON value that this schema accepts. The schema is a dict, its JSON text, or
    a class: a pydantic model or `TypeAdapter`, a `msgspec.Struct` or a dataclass. Kept as JSON
    text. Properties come in the order in which the schema names them.
    """
    json_object: bool = False
    """The answer is any JSON object."""
    regex: str | None = None
    """The whole answer matches this regular expression, without look-around and back-references."""
    choice: Sequence[str] | None = None
    """The answer is one of these, up to 4096, of up to 8192 characters each. Kept as a tuple."""
    grammar: str | None = None
    """The answer matches this grammar: llguidance's form of Lark, from `start` on, or GBNF, the
    EBNF of llama.cpp, from `root` on.
    """
    structural_tag: Mapping[str, Any] | str | None = None
    """The answer is free text up to each of the `triggers`. A trigger begins one of the
    `structures`: its `begin`, JSON of its `schema`, its `end`. A dict of these lists, or its JSON
    text. Kept as JSON text.
    """
    disable_any_whitespace: bool = False
    """Write JSON without white space between its parts, as `max_whitespace=0`. Kinds with JSON
    only.
    """
    max_whitespace: int | None = None
    """Most white space at each place of JSON, in characters, in [0, 32]. None: at most one space
    after a colon and a comma, where `json.dumps` has one. Kinds with JSON only.
    """

    def __post_init__(self) -> None:
        rules = {
            "json_schema": _schema,
            "json_object": boolean,
            "regex": optional(text(1, MAX_CHARS)),
            "choice": optional(sequence(text(1, MAX_CHOICE_CHARS), MAX_CHOICES, least=1)),
            "grammar": optional(text(1, MAX_CHARS)),
            "structural_tag": _structural_tag,
            "disable_any_whitespace": boolean,
            "max_whitespace": optional(integer(0, MAX_WHITESPACE)),
        }
        for name, rule in rules.items():
            value = check(InvalidSamplingError, name, getattr(self, name), rule)
            msgspec.structs.force_setattr(self, name, value)
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidSamplingError(
                f"structured_output must have exactly one of {', '.join(KINDS)}, "
                f"got {' and '.join(given) or 'none'}",
                argument="structured_output",
                value=" and ".join(given) or "none",
                limit=1,
            )
        for name, plain in (("disable_any_whitespace", False), ("max_whitespace", None)):
            value = getattr(self, name)
            if value != plain and given[0] not in OF_JSON:
                raise InvalidSamplingError(
                    f"{name} must be {plain} with {given[0]}, got {value}",
                    argument=name,
                    value=value,
                )
        if self.disable_any_whitespace and self.max_whitespace:
            raise InvalidSamplingError(
                f"max_whitespace must be 0 with disable_any_whitespace, got {self.max_whitespace}",
                argument="max_whitespace",
                value=self.max_whitespace,
                limit=0,
            )
        chars = sum(map(len, self.choice or ()))
        if chars > MAX_CHARS:
            raise InvalidSamplingError(
                f"choice must have at most {MAX_CHARS} characters in all, got {chars}",
                argument="choice",
                value=chars,
                limit=MAX_CHARS,
            )

    @property
    def whitespace(self) -> int | None:
        """`max_whitespace`, or 0 with `disable_any_whitespace`."""
        return 0 if self.disable_any_whitespace else self.max_whitespace

    @property
    def kind(self) -> str:
        """Name of the kind that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def structured_output(value: object) -> StructuredOutput:
    """Rule for an argument that is a `StructuredOutput`."""
    if issubclass(type(value), StructuredOutput):
        return value  # pyright: ignore[reportReturnType]
    raise InvalidSamplingError(
        f"structured_output must be a StructuredOutput, got {shown(value)}",
        argument="structured_output",
        value=value,
    )


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One structure of a structural tag."""

    begin: str
    end: str
    schema: dict[str, Any] | bool | None = None
    """Schema of its JSON. None: any JSON."""


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`StructuredOutput.structural_tag`, decoded."""

    structures: list[Structure]
    triggers: list[str]
    at_least_one: bool = False
    """True if the answer must have at least one of the structures."""
    type: Literal["structural_tag"] = "structural_tag"


def _schema(value: object) -> str | None:
    """Return a schema as JSON text. Unsupported keywords are found when it is compiled."""
    if value is None:
        return None
    if value is True or value is False:
        return json.dumps(value)
    written, parsed = _json_text("json_schema", value)
    if not isinstance(parsed, dict | bool):
        raise _refused("json_schema", f"be an object in JSON, got {shown(written)}", written)
    return written


def _structural_tag(value: object) -> str | None:
    """Return a structural tag as JSON text. Unknown fields are refused."""
    if value is None:
        return None
    argument = "structural_tag"
    written, parsed = _json_text(argument, value)
    try:
        tag = msgspec.convert(parsed, StructuralTag)
    except msgspec.ValidationError as error:
        must = "have structures with begin, schema and end, and triggers"
        raise _refused(argument, f"{must}: {error}", written) from None
    for name, count, most in (
        ("structures", len(tag.structures), MAX_STRUCTURES),
        ("triggers", len(tag.triggers), MAX_TRIGGERS),
    ):
        if not 1 <= count <= most:
            must = f"have 1 to {most} {name}, got {count}"
            raise _refused(argument, must, count, limit=most if count else 1)
    _check_marks(tag)
    return written


def _check_marks(tag: StructuralTag) -> None:
    """Raise `InvalidSamplingError` if a text could be read in two ways."""
    argument = "structural_tag"
    begins = sorted({one.begin for one in tag.structures})
    for mark in (*tag.triggers, *begins, *[one.end for one in tag.structures]):
        if not 1 <= len(mark) <= MAX_MARK_CHARS:
            must = f"have triggers, begins and ends of 1 to {MAX_MARK_CHARS} characters"
            limit = MAX_MARK_CHARS if mark else 1
            raise _refused(argument, f"{must}, got {len(mark)}", len(mark), limit=limit)
    for one in tag.triggers:
        if any(one != other and one in other for other in tag.triggers):
            raise _refused(argument, f"have no trigger within another, as {one!r:.99} is", one)
    for one in begins:
        if not one.startswith(tuple(tag.triggers)):
            must = f"have a trigger at the start of each begin, got {one!r:.99}"
            raise _refused(argument, must, one)
    for one, after in pairwise(begins):
        if after.startswith(one):
            must = f"have no begin at the start of another, as {one!r:.99} is"
            raise _refused(argument, must, one)


def _json_text(argument: str, value: object) -> tuple[str, Any]:
    """Return the JSON text of a dict or a str, and its value."""
    written = plain_str(value)
    if written is None:
        value = plain_schema(value, partial(_refused, argument))
        if not issubclass(type(value), dict):
            must = f"be a dict, its JSON text or a class with a schema, got {shown(value)}"
            raise _refused(argument, must, value)
        plain = _plain(argument, value, (), [MAX_CHARS])
        written = json.dumps(plain, separators=(",", ":"))
    written = check(InvalidSamplingError, argument, written, text(1, MAX_CHARS))
    try:
        return written, msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refused(argument, f"be JSON, got {shown(written)}: {error}", written) from None


def plain_schema(value: Any, refused: Callable[[str, object], Exception]) -> Any:
    """Return the schema of a class that has one, and any other value unchanged.

    Raises `refused(what is wrong, value)`.
    """
    if issubclass(type(value), dict) or not has_schema(value):
        return value
    must = f"be a class with a JSON schema, got {shown(value)}"
    try:
        schema = schema_of(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised by a class of the caller's
        raise refused(f"{must}: {shown(error)}", value) from error
    if not issubclass(type(schema), dict):
        raise refused(f"{must}, which says {shown(schema)}", value)
    return schema


def _plain(argument: str, value: object, path: tuple[str | int, ...], room: list[int]) -> Any:
    """Replace subclasses of dict, list, str, numbers and None by Python's own, without calling
    their methods.

    `path` is the place of the value; `room[0]` counts down the characters that are left.
    """
    room[0] -= 1
    if len(path) > MAX_DEPTH:
        raise _refused(
            argument, f"be nested {MAX_DEPTH} deep at most, got more", len(path), limit=MAX_DEPTH
        )
    if room[0] < 0:
        raise _refused(
            argument, f"have at most {MAX_CHARS} characters, got more", None, limit=MAX_CHARS
        )
    kind = type(value)
    if value is None or kind is bool:
        return value
    if issubclass(kind, dict):
        return {
            (name := _text(argument, key, room)): _plain(argument, entry, (*path, name), room)
            for key, entry in dict.items(value)  # pyright: ignore[reportArgumentType]
        }
    if issubclass(kind, list | tuple):
        entries = tuple.__iter__ if issubclass(kind, tuple) else list.__iter__
        return [
            _plain(argument, entry, (*path, index), room)
            for index, entry in enumerate(entries(value))  # pyright: ignore
        ]
    if issubclass(kind, str):
        return _text(argument, value, room)
    if (whole := plain_int(value)) is not None and abs(whole) < 10**300:
        return whole
    if issubclass(kind, float) and math.isfinite(number := float.__float__(value)):  # pyright: ignore
        return number
    if has_schema(value):
        plain = _plain(argument, plain_schema(value, partial(_refused, argument)), path, room)
        return placed(plain, path[STEPS_TO_SCHEMA[argument] :])
    raise _refused(argument, f"hold nothing but what JSON has, got {shown(value)}", value)


def _text(argument: str, value: object, room: list[int]) -> str:
    written = plain_str(value)
    if written is None:
        raise _refused(argument, f"have names of type str, got {shown(value)}", value)
    room[0] -= len(written)
    return written


def _refused(
    argument: str, must: str, value: object, *, limit: object = None
) -> InvalidSamplingError:
    return InvalidSamplingError(
        f"{argument} must {must}", argument=argument, value=value, limit=limit
    )
