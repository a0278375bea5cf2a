"""Flags of a command that are made of settings, not written one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from cyclopts import Group, Parameter, Token

from aioserve.cli._settings import Setting

__all__ = ["takes_flags"]


def takes_flags(
    verb: Callable[..., None], groups: Mapping[str, Sequence[Setting]], *, into: str
) -> None:
    """Let `verb` show a flag for each setting, in groups under their titles, where it has
    `**into`: there it gets those that were given, by name."""
    own = inspect.signature(verb, eval_str=True)
    parameters = [one for one in own.parameters.values() if one.name != into]
    for place, (title, settings) in enumerate(groups.items()):
        group = Group(title, sort_key=place)
        parameters += [_flag(setting, group) for setting in settings]
    annotations = {one.name: one.annotation for one in parameters}
    # What cyclopts reads of a function.
    verb.__signature__ = own.replace(parameters=parameters)
    verb.__annotations__ = {**annotations, "return": None}


def _flag(setting: Setting, group: Group) -> inspect.Parameter:
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
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_shown_kind(setting), about],
    )


def _shown_kind(setting: Setting) -> Any:
    """What help says that the flag takes."""
    if setting.is_repeated:
        return tuple[str, ...] | None
    kind: Any = setting.kind
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    # Of several, the flag takes one text with commas.
    return (str if get_origin(kind) is Sequence else kind) | None


def _as_it_is(_: Any, tokens: Sequence[Token]) -> str:
    """The text: what it may be is for the setting to say, as for variables."""
    return tokens[0].value
