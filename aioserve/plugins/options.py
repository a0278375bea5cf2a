"""Options given with a name: `round_robin:chunk_size=512,adaptive=true`.

Values are converted by the annotations of the factory's keyword-only parameters. Must not know what
the factory makes.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

from aioserve.arguments import shown
from aioserve.errors import ConfigError, PluginError

__all__ = ["made", "split_name"]

EMPTY = inspect.Parameter.empty


def split_name(text: str) -> tuple[str, dict[str, str]]:
    """Split `name:option=value,option=value` into the name and the options, values still as text.

    Raises `ConfigError` for an option that isn't written that way, or given twice.
    """
    name, colon, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        option, equals, value = part.partition("=")
        if not equals or not option.strip():
            raise ConfigError(
                f"{shown(text)}: options are written NAME:OPTION=VALUE,OPTION=VALUE, "
                f"got {shown(part)}"
            )
        if option.strip() in options:
            raise ConfigError(f"{shown(text)}: option {shown(option.strip())} is given twice")
        options[option.strip()] = value.strip()
    return name.strip(), options


def made(factory: Callable[..., Any], options: Mapping[str, str], what: str) -> Any:
    """Call `factory` with `options`, converted. `what` names the result in errors.

    Raises `ConfigError` for an unknown or missing option, an invalid value, and a value that the
    factory refuses with a `ConfigError`. Other exceptions of the factory pass through.
    """
    parameters = _options_of(factory, what) if options else {}
    values: dict[str, Any] = {}
    for option, text in options.items():
        if option not in parameters:
            raise ConfigError(f"{what} has no option {shown(option)}; {_known(option, parameters)}")
        try:
            values[option] = _converted(text, _kind(parameters[option]))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"option {option!r} of {what} {error}, got {shown(text)}") from None
    try:
        return factory(**values)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    except TypeError:
        missing = _missing(factory, values)
        if missing:
            word = "option" if len(missing) == 1 else "options"
            raise ConfigError(f"{what} needs the {word} {', '.join(missing)}") from None
        raise


def _missing(factory: Callable[..., Any], values: Mapping[str, Any]) -> list[str]:
    """Options without a default that `values` doesn't have."""
    return [
        name
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        and parameter.default is EMPTY
        and name not in values
    ]


def _options_of(factory: Callable[..., Any], what: str) -> dict[str, inspect.Parameter]:
    try:
        signature = inspect.signature(factory, eval_str=True)
    except Exception as error:
        raise PluginError(f"the options of {what} can't be read: {error!r}") from error
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _known(option: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    """Text that names the nearest option, if one is near, and all options."""
    if not parameters:
        return "it has none"
    near = get_close_matches(option.replace("-", "_").lower(), parameters, 1)
    meant = f"did you mean {near[0]}? There" if near else "there"
    return f"{meant} are: {', '.join(map(_option_text, parameters.values()))}"


def _option_text(parameter: inspect.Parameter) -> str:
    """Text of an option with its kind and its default, both as they are written."""
    default = parameter.default
    kind = _words(_kind(parameter))
    if kind is None:
        return f"{parameter.name} (can't be given by name)"
    if default is EMPTY:
        return f"{parameter.name} ({kind}; must be given)"
    return f"{parameter.name} ({kind}; {_written(default)} unless given)"


def _written(value: Any) -> str:
    """Text that converts to the value."""
    if value is None or type(value) is bool:
        return str(value).lower()
    if type(value) is float:
        return f"{value:.17g}" if value.is_integer() else str(value)
    if isinstance(value, Mapping):
        return ";".join(f"{key}:{_written(one)}" for key, one in value.items()) or "nothing"
    return value if type(value) is str and value else shown(value)


def _words(kind: Any) -> str | None:
    """Text that describes values of a kind; None for a kind that can't be written in a name."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        told = [_words(one) for one in members if one is not type(None)]
        known = [one for one in told if one is not None]
        return " or ".join([*known, *(["none"] if type(None) in members else [])]) or None
    if origin is Literal:
        return " or ".join(map(str, members))
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(members) == 2:
        return "KEY:VALUE;KEY:VALUE"
    return {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
    }.get(kind)


def _kind(parameter: inspect.Parameter) -> Any:
    """Annotation of a parameter, or else the type of its default. `EMPTY` if neither says
    anything."""
    if parameter.annotation is not EMPTY:
        return parameter.annotation
    default = parameter.default
    return EMPTY if default is EMPTY or default is None else type(default)


def _converted(text: str, kind: Any) -> Any:
    """Convert a text. Raises `ValueError` saying what the value must be, and `TypeError` for kinds
    that can't be written in a name."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(text, members)
    if origin is Literal:
        for choice in members:
            if str(choice) == text:
                return choice
        raise ValueError(f"must be one of {', '.join(map(str, members))}")
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(members) == 2:
        return _mapping(text, *members)
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("must be true or false")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"must be {_words(kind)}") from None
    why = ": it has no annotation, so" if kind is EMPTY else ":"
    raise TypeError(f"can't be given by name{why} make the object yourself")


def _one_of(text: str, kinds: tuple[Any, ...]) -> Any:
    if type(None) in kinds and text.lower() == "none":
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    errors: list[str] = []
    for kind in others:
        try:
            return _converted(text, kind)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(" or ".join([*errors, "none"] if type(None) in kinds else errors))


def _mapping(text: str, key_kind: Any, value_kind: Any) -> dict[Any, Any]:
    """Parse `gold:4;free:1`. A key may contain colons, a value may not."""
    values: dict[Any, Any] = {}
    for entry in filter(None, text.split(";")):
        key, colon, value = entry.rpartition(":")
        if not colon:
            raise ValueError("must be written KEY:VALUE;KEY:VALUE")
        try:
            converted_key = _converted(key.strip(), key_kind)
            converted = _converted(value.strip(), value_kind)
        except ValueError as error:
            raise ValueError(f"{error} in {shown(entry)}") from None
        if converted_key in values:
            raise ValueError(f"must be of different keys ({shown(key.strip())} is there twice)")
        values[converted_key] = converted
    return values
