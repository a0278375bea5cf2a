"""Flags of a command, made from declared options and settings instead of written one by one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter, Token

from aioserve.cli._settings import Setting, docstrings

__all__ = ["option_flags", "setting_flags", "takes_flags"]


def takes_flags(verb: Callable[..., None], flags: Iterable[inspect.Parameter]) -> None:
    """Replace `**flags` of `verb` by these flags. It receives those that were given, by name."""
    own = inspect.signature(verb, eval_str=True)
    parameters = [one for one in own.parameters.values() if one.name != "flags"] + list(flags)
    annotations = {one.name: one.annotation for one in parameters}
    # cyclopts reads these of a function.
    verb.__signature__ = own.replace(parameters=parameters)
    verb.__annotations__ = {**annotations, "return": None}


def option_flags(options: type, names: Iterable[str]) -> list[inspect.Parameter]:
    """Return flags for these fields of a dataclass, with its defaults, and its docstrings as help.

    A bool that is on, or that has no default, can be turned off.
    """
    texts, hints = docstrings(options), get_type_hints(options, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    flags = []
    for name in names:
        default, kind = defaults[name], hints[name]
        if isinstance(default, tuple):
            kind = tuple[str, ...]
        elif isinstance(default, str):
            kind = str
        elif str in get_args(kind):
            kind = str | None
        flag = name.replace("_", "-")
        can_be_off = bool in (kind, *get_args(kind)) and default is not False
        about = Parameter(
            name=f"--{flag}",
            help=texts[name],
            negative=f"--no-{flag}" if can_be_off else (),
            show_default=False if isinstance(default, tuple) else None,
        )
        flags.append(_parameter(name, default, Annotated[kind, about]))
    return flags


def setting_flags(groups: Mapping[str, Sequence[Setting]]) -> list[inspect.Parameter]:
    """Return a flag for each setting, in groups under their titles."""
    titles = [Group(title, sort_key=place) for place, title in enumerate(groups)]
    return [
        _setting_flag(setting, title)
        for title, settings in zip(titles, groups.values(), strict=True)
        for setting in settings
    ]


def _setting_flag(setting: Setting, group: Group) -> inspect.Parameter:
    default: Any = setting.default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    elif isinstance(default, tuple):
        default = ",".join(map(str, default))
    about = Parameter(
        name=setting.flag,
        help=setting.help.replace("`", ""),
        group=group,
        negative=f"--no{setting.flag[1:]}" if setting.is_bool else (),
        show_default=False if default in (None, "") else lambda _: str(default),
        converter=None if setting.is_bool or setting.is_repeated else _as_it_is,
    )
    return _parameter(setting.name, None, Annotated[_shown_kind(setting), about])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _shown_kind(setting: Setting) -> Any:
    """Return the type that help shows for the flag."""
    if setting.is_repeated:
        return tuple[str, ...] | None
    kind: Any = setting.kind
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    # A flag takes several values as one text with commas.
    return (str if get_origin(kind) is Sequence else kind) | None


def _as_it_is(_: Any, tokens: Sequence[Token]) -> str:
    """Return the text unchanged: the setting checks it, as for variables."""
    return tokens[0].value
