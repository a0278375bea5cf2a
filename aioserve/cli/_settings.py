"""The settings of `aioserve serve`, and the sources of their values.

    flag > environment variable > file > default

The settings are the fields of the structs that check them. A new field becomes a flag, a variable
and a key of the file, and its docstring their help. This module knows names, types and sources; the
structs know the allowed values.

cyclopts' own sources of configuration don't fit. Its `Env` ignores a variable that no flag has,
which is refused here. Its `Toml` takes a key of either table for any flag, and makes a text of each
value. Then `page_size = "16"` would be as good as a number, and a list would need a flag for each
entry.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import json
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from aioserve.cli._numbers import MAX_DIGITS, is_count, is_float
from aioserve.errors import ConfigError
from aioserve.isolation import shown

__all__ = [
    "DEFAULT",
    "Setting",
    "Value",
    "docstrings",
    "gather",
    "made",
    "settings_of",
    "shown_settings",
]

T = TypeVar("T")

PREFIX = "AIOSERVE_"
OTHER_VARIABLES = frozenset(
    {
        "AIOSERVE_CONFIG",
        "AIOSERVE_ISA",
        "AIOSERVE_NUM_THREADS",
        "AIOSERVE_OPS",
        "AIOSERVE_PLUGINS",
        # Variables of the test suite and of builds:
        "AIOSERVE_FUZZ",
        "AIOSERVE_GPU_TESTS",
        "AIOSERVE_SANITIZE",
        "AIOSERVE_SANITIZED",
    }
)
"""Environment variables of ours that aren't settings of a server."""
SERVICE_LINK = re.compile(
    r"AIOSERVE_(SERVICE_(HOST|PORT(_\w+)?)|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod beside a service with the name `aioserve`."""
MAX_FILE_BYTES = 2**20
DEFAULT = "default"
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")


class Part(msgspec.Struct, frozen=True):
    """Field of a struct that is itself the value of a field of another struct."""

    of: str
    """Field that may hold the struct."""
    kind: Any
    """The struct. Its `of` makes one of its fields' values, or returns None."""
    name: str


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One field of one struct, as it can be given from outside."""

    table: str
    """Table of the file."""
    name: str
    kind: Any
    """Type: bool, int, float, str, a `Literal` of strs, a `Sequence` of these, or one of them or
    None.
    """
    default: Any
    help: str
    is_secret: bool = False
    """True if its value is never shown."""
    is_argument: bool = False
    """True if it is no flag, but the word after the verb."""
    is_repeated: bool = False
    """True if its flag is given once for each entry, which may hold commas."""
    part: Part | None = None
    """Struct that it is a part of; None if it is a field of the main struct."""

    @property
    def flag(self) -> str:
        """Name on the command line."""
        if self.is_argument:
            return self.name.upper()
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        return self.kind is bool


class Value(msgspec.Struct, frozen=True):
    """Value of a setting, and its origin: a flag, variable, key of a file, or "default"."""

    value: Any
    origin: str


# -- the settings


def settings_of(
    table: str,
    kind: type[msgspec.Struct],
    *,
    arguments: Iterable[str] = (),
    secrets: Iterable[str] = (),
    leave_out: Iterable[str] = (),
) -> tuple[Setting, ...]:
    """Return a setting for each field of a struct.

    A field that may hold a struct has one for each of that struct's fields. Raises `TypeError` for
    a field whose type has no text.
    """
    hints = typing.get_type_hints(kind)
    texts = docstrings(kind)
    found = []
    for field in msgspec.structs.fields(kind):
        if field.name in leave_out:
            continue
        if (inner := _struct_of(hints[field.name])) is not None:
            found += _parts_of(table, field.name, texts.get(field.name, ""), inner)
            continue
        found.append(
            Setting(
                table=table,
                name=field.name,
                kind=hints[field.name],
                default=field.default,
                help=texts.get(field.name, ""),
                is_argument=field.name in arguments,
                is_secret=field.name in secrets,
                is_repeated=field.name in secrets,
            )
        )
        _reader(hints[field.name])
    return tuple(found)


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a field of this type may hold beside None."""
    inner = get_args(kind)
    is_struct = len(inner) == 2 and inner[1] is type(None) and isinstance(inner[0], type)
    return inner[0] if is_struct and issubclass(inner[0], msgspec.Struct) else None


def _parts_of(table: str, field: str, help: str, kind: type[msgspec.Struct]) -> Iterator[Setting]:
    """Yield settings for the fields of a struct that `field` may hold.

    The first has the name of `field`, and there is no struct without it. The others have it as a
    prefix.
    """
    first, *others = settings_of(table, kind)
    yield msgspec.structs.replace(
        first,
        name=field,
        kind=first.kind | None,
        default=None,
        help=f"{help} {first.help}",
        part=Part(field, kind, first.name),
    )
    for one in others:
        name = f"{field}_{one.name}"
        yield msgspec.structs.replace(one, name=name, part=Part(field, kind, one.name))


def docstrings(kind: type) -> dict[str, str]:
    """Return the docstring under each field of a class and of its bases."""
    texts = {}
    for base in reversed([base for base in kind.__mro__ if vars(base).get("__annotations__")]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                texts[field.target.id] = " ".join(below.value.value.split())
    return texts


# -- sources of values


def gather(
    settings: Sequence[Setting],
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: str | None,
) -> dict[str, Value]:
    """Return the value of each setting, by its name.

    `flags` are the given ones, by name: texts, or bools; `file` is the path of a TOML file. Raises
    `ConfigError` that names source and value.
    """
    known = {setting.name: setting for setting in settings}
    found = {setting.name: Value(setting.default, DEFAULT) for setting in settings}
    if file is not None:
        found |= _from_file(settings, file)
    found |= _from_environment(settings, environment)
    for name, given in flags.items():
        found[name] = Value(_of_flag(known[name], given), known[name].flag)
    return found


def _of_flag(setting: Setting, given: Any) -> Any:
    if isinstance(given, bool):
        return given
    if setting.is_repeated:
        return tuple(given)
    return _read(setting, given, setting.flag)


def _from_environment(
    settings: Sequence[Setting], environment: Mapping[str, str]
) -> dict[str, Value]:
    by_variable = {setting.variable: setting for setting in settings}
    found: dict[str, Value] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        setting = by_variable.get(variable)
        if setting is None:
            if SERVICE_LINK.fullmatch(variable):
                continue
            raise ConfigError(
                f"the environment variable {shown(variable)[1:-1]} is none of aioserve's"
                + _nearest(variable, [*by_variable, *OTHER_VARIABLES])
            )
        if variable == "AIOSERVE_PORT" and "://" in text:
            raise ConfigError(
                f"AIOSERVE_PORT must be a port, got {shown(text)}, which Kubernetes sets beside a "
                "service with the name aioserve: set AIOSERVE_PORT, or enableServiceLinks: false",
                argument="port",
                value=text,
            )
        found[setting.name] = Value(_read(setting, text, variable), variable)
    return found


def _from_file(settings: Sequence[Setting], file: str) -> dict[str, Value]:
    tables: dict[str, dict[str, Setting]] = {}
    for setting in settings:
        tables.setdefault(setting.table, {})[setting.name] = setting
    found: dict[str, Value] = {}
    for table, values in _parsed(file).items():
        if table not in tables:
            names = ", ".join(f"[{name}]" for name in tables)
            raise ConfigError(
                f"{file}: {shown(table)} must be one of the tables {names}"
                + _home_of(table, settings)
            )
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: {table} must be a table, got {shown(values)}")
        for key, value in values.items():
            setting = tables[table].get(key)
            if setting is None:
                hint = _home_of(key, settings) or _nearest(key, list(tables[table]))
                raise ConfigError(f"{file}: [{table}] has no key {shown(key)}{hint}")
            where = f"{file}: {table}.{key}"
            found[key] = Value(_typed(setting, value, where), where)
    return found


def _parsed(file: str) -> dict[str, Any]:
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"config: {file} can't be read: {why}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"config: {file} has more than {MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"config: {file} isn't TOML: {error}") from error


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; the nearest is {near[0]}" if near else ""


def _home_of(key: str, settings: Sequence[Setting]) -> str:
    homes = [setting.table for setting in settings if setting.name == key]
    return f"; it belongs into [{homes[0]}]" if homes else ""


# -- from texts to values


def _read(setting: Setting, text: str, where: str) -> Any:
    """Return the value that a text stands for."""
    try:
        return _reader(setting.kind)(text)
    except ValueError as must:
        got = "what isn't shown" if setting.is_secret else shown(text)
        raise ConfigError(
            f"{where} must be {must}, got {got}",
            argument=setting.name,
            value=None if setting.is_secret else text,
        ) from None


def _reader(kind: Any) -> Callable[[str], Any]:
    """Return the function that makes a value of a text. It raises `ValueError` that says what the
    text must be.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _READERS:
        return _READERS[kind]
    if origin is Literal and all(isinstance(choice, str) for choice in inner):
        return str
    is_union = origin in (types.UnionType, typing.Union)
    if is_union and inner[-1] is str and all(get_origin(one) is Literal for one in inner[:-1]):
        return str  # one of some names, or another
    if is_union and len(inner) == 2 and inner[1] is type(None):
        read, is_sequence = _reader(inner[0]), get_origin(inner[0]) is not None
        # For a sequence, "none" is already the empty sequence.
        return read if is_sequence else lambda text: None if text == "none" else read(text)
    if origin is Sequence and inner[0] in _READERS:
        return lambda text: _entries(text, _READERS[inner[0]])
    raise TypeError(f"there is no text for a setting of the type {kind}")


def _entries(text: str, read: Callable[[str], Any]) -> tuple[Any, ...]:
    if text == "none":
        return ()
    return tuple([read(entry.strip()) for entry in text.split(",")])


def _bool(text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise ValueError("true or false")
    return text.lower() in TRUE


def _int(text: str) -> int:
    if not is_count(text):
        raise ValueError(f"a whole number of at most {MAX_DIGITS} digits")
    return int(text)


def _float(text: str) -> float:
    if not is_float(text):
        raise ValueError("a decimal number")
    return float(text)


_READERS: dict[Any, Callable[[str], Any]] = {bool: _bool, int: _int, float: _float, str: str}


def _typed(setting: Setting, value: Any, where: str) -> Any:
    """Return a value of the file if it has the setting's type."""
    try:
        return msgspec.convert(value, setting.kind, strict=True)
    except msgspec.ValidationError as error:
        reason = str(error)[:1].lower() + str(error)[1:]
        got = "" if setting.is_secret else f", got {shown(value)}"
        raise ConfigError(
            f"{where}: {reason}{got}",
            argument=setting.name,
            value=None if setting.is_secret else value,
        ) from None


# -- making structs of values


def made(kind: Callable[..., T], values: Mapping[str, Value], settings: Iterable[Setting]) -> T:
    """Make a `kind` of the values that were given. An error names the value's origin."""
    given: dict[str, Value] = {}
    parts: dict[tuple[str, Any], dict[str, Value]] = {}
    for setting in settings:
        value = values[setting.name]
        if value.origin == DEFAULT:
            continue
        if (part := setting.part) is None:
            given[setting.name] = value
        else:
            parts.setdefault((part.of, part.kind), {})[part.name] = value
    for (field, inner), fields in parts.items():
        origins = ", ".join([value.origin for value in fields.values()])
        given[field] = Value(_made(inner.of, fields), origins)
    return _made(kind, given)


def _made(kind: Callable[..., T], given: Mapping[str, Value]) -> T:
    try:
        return kind(**{name: value.value for name, value in given.items()})
    except ConfigError as error:
        if error.argument is None or error.argument not in given:
            raise
        message = f"{given[error.argument].origin}: {error}"
        raise ConfigError(
            message, argument=error.argument, value=error.value, limit=error.limit
        ) from None


def shown_settings(settings: Sequence[Setting], values: Mapping[str, Value]) -> str:
    """Return every value with its origin, as a TOML file that sets the same.

    Secrets and None, which TOML has no word for, are comments.
    """
    lines: list[str] = []
    for table in dict.fromkeys(setting.table for setting in settings):
        rows = []
        for setting in (one for one in settings if one.table == table):
            value = values[setting.name]
            rows.append((_assignment(setting, value.value), value.origin))
        width = min(48, max(len(assignment) for assignment, _ in rows))
        lines += [f"[{table}]", *(f"{a:<{width}}  # {_commented(o)}" for a, o in rows), ""]
    return "\n".join(lines)


def _assignment(setting: Setting, value: Any) -> str:
    if value is None:
        return f"# {setting.name}: none"
    if setting.is_secret:
        return f"# {setting.name}: {len(value)}, not shown"
    return f"{setting.name} = {_as_toml(value)}"


def _as_toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, str):
        # TOML escapes what JSON does, and DEL too; it has no halves of surrogate pairs.
        text = value.encode(errors="replace").decode()
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _commented(origin: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in origin)
