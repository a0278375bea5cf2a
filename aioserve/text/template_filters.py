"""Filters, tests, methods and globals of chat templates, each within the `Budget` of its rendering.

Knows the sizes of their results, as far as these may be larger than the arguments. Must not know
how templates are compiled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import Namespace

from aioserve.text.template_budget import Budget

__all__ = [
    "GLOBALS",
    "METHODS",
    "BudgetedContext",
    "RefusedError",
    "budgeted_filters",
    "budgeted_test",
]

MAX_INDENT = 64
_LEFT_OUT = frozenset(("pprint", "striptags", "urlize", "xmlattr"))
_LOOKERS = ("map", "select", "reject", "selectattr", "rejectattr")
"""Filters that make a step for each value."""


class RefusedError(Exception):
    """Refusal of a template through `raise_exception`."""


class BudgetedContext(Context):
    """Variables of one rendering, with its budget."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> BudgetedContext:
        context = cast(BudgetedContext, super().derived(locals))
        context.budget = self.budget
        return context


# -- checks before an operation whose result may be larger than its input. They take the operation's
# arguments, and may return others in their place.


def _check_width(budget: Budget, text: Any, width: Any = 0, *more: Any) -> None:
    budget.check_width(width)


def _check_expanded(budget: Budget, text: str, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int):
        budget.check_room(len(text) + text.count("\t") * tabsize)


def _check_joined(budget: Budget, separator: str, values: Any) -> tuple[Any]:
    listed = budget.made(list(budget.counted(values)))
    budget.check_room(budget.size(listed) + len(separator) * len(listed))
    return (listed,)


def _check_replaced(budget: Budget, text: str, old: Any, new: Any, count: Any = -1) -> None:
    budget.check_replaced(text, budget.text(old), budget.text(new))


def _check_fields(budget: Budget, text: str, *args: Any, **kwargs: Any) -> None:
    budget.check_fields(text, args, kwargs)


METHODS: Mapping[str, Callable[..., tuple[Any, ...] | None]] = {
    "center": _check_width,
    "expandtabs": _check_expanded,
    "format": _check_fields,
    "join": _check_joined,
    "ljust": _check_width,
    "replace": _check_replaced,
    "rjust": _check_width,
    "zfill": _check_width,
}
"""Checks of methods of str by name. They are given the text, and the method's arguments."""


def _check_batch(budget: Budget, value: Any, linecount: Any, fill_with: Any = None) -> None:
    budget.check_width(linecount)


def _check_slices(budget: Budget, value: Any, slices: Any, fill_with: Any = None) -> None:
    budget.check_width(slices)


def _check_format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    budget.check_format(budget.text(value), kwargs or args)


def _check_indent(budget: Budget, value: Any, width: Any = 4, *flags: Any, **named: Any) -> None:
    budget.check_width(width)
    if isinstance(value, str):
        each = len(width) if isinstance(width, str) else int(width)
        budget.check_room(len(value) + len(value.splitlines()) * each)


def _check_joined_filter(
    budget: Budget, value: Any, d: Any = "", attribute: Any = None
) -> tuple[Any, ...]:
    (listed,) = _check_joined(budget, budget.text(d), value)
    return (listed, d, attribute)


def _check_replaced_filter(
    budget: Budget, value: Any, old: Any, new: Any, count: Any = None
) -> None:
    budget.check_replaced(budget.text(value), budget.text(old), budget.text(new))


def _check_round(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    budget.check_width(precision)


def _check_wrapped(
    budget: Budget,
    value: Any,
    width: Any = 79,
    break_long_words: Any = True,
    wrapstring: Any = None,
    break_on_hyphens: Any = True,
) -> None:
    text = budget.text(value)
    budget.check_room(len(text) * (2 if wrapstring is None else len(wrapstring) + 1))


_FILTERS: Mapping[str, Callable[..., tuple[Any, ...] | None]] = {
    "batch": _check_batch,
    "center": _check_width,
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_joined_filter,
    "replace": _check_replaced_filter,
    "round": _check_round,
    "slice": _check_slices,
    "wordwrap": _check_wrapped,
}


def budgeted_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the library's filters, within budgets, and transformers' `tojson`."""
    kept = {name: _filter(name, filters[name]) for name in filters if name not in _LEFT_OUT}
    return kept | {"tojson": _to_json, "sum": _sum}


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed, check, looks = _passed(function), _FILTERS.get(name), name in _LOOKERS

    @jinja2.pass_context
    def within_budget(context: BudgetedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.step()
        if args or kwargs:
            budget.passed(args, kwargs)
        if check is not None and (other := check(budget, value, *args, **kwargs)) is not None:
            value, *rest = other
            args, kwargs = tuple(rest), {}
        if looks and value:
            value = budget.counted(value)
        return budget.made(function(*passed(context), value, *args, **kwargs))

    return within_budget


def budgeted_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test of the library, within a budget."""
    passed = _passed(function)

    @jinja2.pass_context
    def within_budget(context: BudgetedContext, *args: Any, **kwargs: Any) -> Any:
        context.budget.step()
        return function(*passed(context), *args, **kwargs)

    return within_budget


def _passed(function: Callable[..., Any]) -> Callable[[Context], tuple[Any, ...]]:
    """Return a function for the values that the library passes to a filter or test before its
    arguments.
    """
    kind = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    if kind == "context":
        return lambda context: (context,)
    if kind == "eval_context":
        return lambda context: (context.eval_ctx,)
    if kind == "environment":
        return lambda context: (context.environment,)
    return lambda context: ()


@jinja2.pass_context
def _sum(context: BudgetedContext, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    budget = context.budget
    if attribute is not None:
        iterable = context.environment.call_filter(
            "map", iterable, kwargs={"attribute": attribute}, context=context
        )
    return functools.reduce(budget.add, budget.counted(iterable), start)


# -- additions of transformers to the library


@jinja2.pass_context
def _to_json(
    context: BudgetedContext,
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. Unlike the library's own filter, it escapes nothing for HTML."""
    budget = context.budget
    size = budget.size(x)
    if indent is not None:
        each = len(indent) if isinstance(indent, str) else int(indent)
        if each > MAX_INDENT:
            raise ValueError(f"indent of tojson must be at most {MAX_INDENT}, got {each}")
        size *= max(each, 0) + 1
    if separators is not None:
        size *= sum(map(len, separators)) + 1
    budget.check_room(size)
    return budget.made(
        json.dumps(
            x,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
    )


def _raise_exception(message: Any) -> None:
    raise RefusedError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Variables that a template may change; no name begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # Its values may contain it in turn, many times over.
        return "<Namespace>"


GLOBALS: Mapping[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "dict": _Dict(),
    "namespace": _Namespace,
}


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"attributes of a namespace must not begin with an underscore, got {name!r:.100}"
        )
