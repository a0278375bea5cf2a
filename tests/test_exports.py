"""Public names: sorted lists, and signatures that name only public types."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import typing
from collections.abc import Iterator
from types import ModuleType, UnionType
from typing import Any

import pytest
import torch

import aioserve
import aioserve.errors

PACKAGES = ("aioserve", "aioserve.errors", "aioserve.testing")
"""Packages that users import from."""
CONTRACTS = (
    "aioserve.capacity.models",
    "aioserve.paging.format",
    "aioserve.architectures",
    "aioserve.sampling.masks",
    "aioserve.models.reranking",
    "aioserve.models.retrieval",
    "aioserve.steps.outcome",
    "aioserve.steps.page_tables",
    "aioserve.steps.pages",
    "aioserve.steps.plan",
    "aioserve.execution.runner",
    "aioserve.simulation.cost",
    "aioserve.simulation.metrics",
    "aioserve.simulation.timeline",
    "aioserve.text.chat_template",
    "aioserve.text.conversation",
    "aioserve.traces.trace_request",
)
"""Modules of the types that devices, cost models and traces are made of."""
PUBLIC_MODULES = PACKAGES + CONTRACTS
MADE_BY_THE_ENGINE = {"ChatStream", "RequestView", "TokenStream"}
"""Classes that only the engine makes, so their constructors are no public signatures."""
FOR_THE_HOUSE = {"ModelShape.of"}
"""Constructors of public classes from values that aren't public."""

READ_FROM_FILES = {("ModelShape", "of")}
"""Methods that take what the package has read from a model's files, which users don't make."""


def names_in(annotation: Any) -> Iterator[type]:
    """Every class that an evaluated annotation is made of."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        yield annotation
    for part in typing.get_args(annotation):
        for inner in part if isinstance(part, list) else [part]:
            yield from names_in(inner)
    origin = typing.get_origin(annotation)
    if isinstance(origin, type) and origin is not UnionType:
        yield origin


def evaluated(thing: Any) -> dict[str, Any]:
    """Annotations of a function or class; names for type checkers alone are looked up."""
    names: dict[str, Any] = {**vars(collections.abc), "Tensor": torch.Tensor}
    for one in reversed(thing.__mro__ if inspect.isclass(thing) else [thing]):
        names |= vars(importlib.import_module(one.__module__))
    return typing.get_type_hints(thing, names)


def signatures_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """Public annotations of a function, or of a class, its methods and properties."""
    if inspect.isfunction(thing):
        for name, hint in evaluated(thing).items():
            yield f"{thing.__name__}({name})", hint
    if not inspect.isclass(thing):
        return
    for name, hint in evaluated(thing).items():
        if not name.startswith("_"):
            yield f"{thing.__name__}.{name}", hint
    house = [one for one in thing.__mro__ if one.__module__.startswith("aioserve.")]
    members = {name: member for one in reversed(house) for name, member in vars(one).items()}
    for name, member in members.items():
        if name.startswith("_") and (name != "__init__" or thing.__name__ in MADE_BY_THE_ENGINE):
            continue
        if f"{thing.__name__}.{name}" in FOR_THE_HOUSE:
            continue
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        if (thing.__name__, name) in READ_FROM_FILES:
            continue
        if inspect.isfunction(function) and function.__module__.startswith("aioserve"):
            for argument, hint in evaluated(function).items():
                yield f"{thing.__name__}.{name}({argument})", hint


def exported(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def all_exported() -> set[Any]:
    return {
        thing
        for name in PUBLIC_MODULES
        for thing in exported(importlib.import_module(name)).values()
        if isinstance(thing, type)
    }


@pytest.mark.parametrize("name", ["aioserve", "aioserve.testing"])
def test_what_a_package_imports_is_what_it_exports(name: str) -> None:
    module = importlib.import_module(name)
    imported = {
        member
        for member, thing in vars(module).items()
        if not member.startswith("_") and not isinstance(thing, ModuleType)
    }
    assert sorted(module.__all__) == sorted(imported - {"annotations"})  # ruff has the order


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_what_a_public_module_exports_is_there(name: str) -> None:
    assert len(exported(importlib.import_module(name))) == len(
        importlib.import_module(name).__all__
    )


def test_every_error_is_exported_by_the_package() -> None:
    assert set(aioserve.errors.__all__) <= set(aioserve.__all__)


def test_public_signatures_name_only_exported_types() -> None:
    """Signatures are those of exports, and of the types that these name in turn."""
    known = all_exported()
    to_see = [
        thing for name in PACKAGES for thing in exported(importlib.import_module(name)).values()
    ]
    seen: list[Any] = []
    hidden = {}
    while to_see:
        thing = to_see.pop()
        if any(thing is other for other in seen):
            continue
        seen.append(thing)
        for place, annotation in signatures_of(thing):
            for kind in names_in(annotation):
                if kind in known:
                    to_see.append(kind)
                elif kind.__module__.partition(".")[0] == "aioserve":
                    hidden[kind.__qualname__] = place
    assert not hidden
    assert len(seen) > 80
