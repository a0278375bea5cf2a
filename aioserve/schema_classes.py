"""Classes that describe JSON: their schemas, and the objects that a text becomes.

A class is recognized by its methods, so pydantic needn't be installed.

    pydantic.BaseModel     model_json_schema, model_validate_json
    pydantic.TypeAdapter   json_schema, validate_json: of an object of it
    msgspec.Struct         by msgspec
    dataclass              by msgspec
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast
from urllib.parse import quote

import msgspec

from aioserve.arguments import counted, shown
from aioserve.errors import InvalidRequestError, UnparsedError

__all__ = ["SchemaClass", "Validates", "has_schema", "parsed_answer", "placed", "schema_of"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

MAX_NAME_CHARS = 100
"""Most characters of a class's name in an error."""


class Validates(Protocol[T_co]):
    """A `pydantic.TypeAdapter`."""

    def validate_json(self, data: str, /) -> T_co: ...


if TYPE_CHECKING:
    SchemaClass: TypeAlias = type | Validates[Any]
else:
    SchemaClass = str  # kept as str: msgspec decodes no union with a type that it doesn't know


class _Form(NamedTuple):
    schema: Callable[[], Any]
    parse: Callable[[str], Any]


def has_schema(value: object) -> bool:
    """True if `schema_of` knows a schema of `value`."""
    return _form_of(value) is not None


def schema_of(value: object) -> Any:
    """Return the JSON schema of a class. Raises whatever the class raises.

    Raises `ValueError` if it has no schema.
    """
    form = _form_of(value)
    if form is None:
        raise ValueError(f"{shown(value)} says no JSON schema")
    return form.schema()


def placed(schema: Any, path: Sequence[str | int]) -> Any:
    """Return a class's plain schema as it stands at `path` in another: references point there."""
    if not path:
        return schema
    steps = [str(step).replace("~", "~0").replace("/", "~1") for step in path]
    return _moved(schema, "#/" + "/".join([quote(step, safe="~") for step in steps]))


def _moved(part: Any, start: str) -> Any:
    if isinstance(part, list):
        return [_moved(one, start) for one in part]
    if not isinstance(part, dict):
        return part
    moved = {name: _moved(one, start) for name, one in part.items()}
    if isinstance(ref := moved.get("$ref"), str) and ref.startswith("#"):
        moved["$ref"] = start + ref[1:]
    return moved


def parsed_answer(
    form: type[T] | Validates[T], content: str, finish_reason: str, num_calls: int = 0
) -> T:
    """Return the object of `form` that a completion's content describes.

    Raises `InvalidRequestError` if `form` is no class with a schema. Raises `UnparsedError` if the
    completion was cut off, has tool calls in place of content, is empty, or doesn't match the form.
    """
    known = _form_of(form)
    if known is None:
        raise InvalidRequestError(
            "form must be a pydantic model or TypeAdapter, a msgspec.Struct or a dataclass, got "
            f"{shown(form)}",
            argument="form",
            value=form,
        )
    if finish_reason != "stop":
        raise UnparsedError(
            f"the completion is no {_name_of(form)}: it was cut off, finish_reason is "
            f"{str(finish_reason)!r}",
            reason=cast("Any", str(finish_reason)),
        )
    if num_calls:
        raise UnparsedError(
            f"the completion is no {_name_of(form)}: it has "
            f"{counted(num_calls, 'call')} of tools, and content is what is parsed",
            reason="tool_calls",
        )
    if not content.strip():
        raise UnparsedError(
            f"the completion is no {_name_of(form)}: its content is empty", reason="empty"
        )
    try:
        return cast("T", known.parse(content))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised by a class of the caller's
        raise UnparsedError(
            f"the completion is no {_name_of(form)}: {_said_by(error)}", reason="invalid"
        ) from error


def _form_of(value: Any) -> _Form | None:
    try:
        return _known_form(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # raised by a class of the caller's
        return None


def _known_form(value: Any) -> _Form | None:
    if not isinstance(value, type):
        schema, parse = _methods(value, "json_schema", "validate_json")
        return None if schema is None or parse is None else _Form(schema, parse)
    schema, parse = _methods(value, "model_json_schema", "model_validate_json")
    if schema is not None and parse is not None:
        return _Form(schema, parse)
    is_pydantics = hasattr(value, "__pydantic_validator__")
    if issubclass(value, msgspec.Struct) or (dataclasses.is_dataclass(value) and not is_pydantics):
        return _Form(
            lambda: msgspec.json.schema(value),
            lambda text: msgspec.json.decode(text, type=value),
        )
    return None


def _methods(value: object, *names: str) -> list[Callable[..., Any] | None]:
    methods = [getattr(value, name, None) for name in names]
    return [method if callable(method) else None for method in methods]


def _name_of(form: object) -> str:
    if not issubclass(type(form), type):
        return shown(form)
    return type.__dict__["__name__"].__get__(form)[:MAX_NAME_CHARS]


def _said_by(error: BaseException) -> str:
    try:
        return shown(str(error))
    except KeyboardInterrupt:
        raise
    except BaseException:
        return shown(error)
