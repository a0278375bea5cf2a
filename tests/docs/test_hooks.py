"""The page about hooks names every hook and every field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aioserve import (
    CustomCalls,
    EvictionSpec,
    JsonCalls,
    ModelFamily,
    Observer,
    ObserverSpec,
    PageUse,
    PolicySpec,
    ReasoningMarks,
    ReasoningParserSpec,
    RequestInfo,
    RequestSummary,
    StepInfo,
    StepPart,
    ToolParserSpec,
    WeightFormat,
    WeightPart,
    architectures,
)
from aioserve.plugins import API_VERSION
from aioserve.plugins.specs import HookSpecs

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/hooks.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[str]:
    """Code in the first cells of the table whose first heading begins so."""
    table = PAGE.split(f"\n| {heading}", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [name for cell in cells for name in re.findall(r"`(\w+)", cell)]


@pytest.mark.parametrize(
    "kind",
    [JsonCalls, CustomCalls, ReasoningMarks, ToolParserSpec, ModelFamily, WeightFormat, WeightPart],
)
def test_every_field_of_a_value_is_there(kind: type) -> None:
    assert sorted(rows(f"field of `{kind.__name__}`")) == sorted(kind.__struct_fields__)


@pytest.mark.parametrize(
    "kind", [PageUse, RequestInfo, StepInfo, StepPart, RequestSummary, PolicySpec]
)
def test_every_field_is_there(kind: type) -> None:
    fields = kind.__struct_fields__
    found = rows(f"field of `{kind.__name__}`")
    assert sorted(found) == sorted(fields)


def test_every_block_is_there() -> None:
    assert set(rows("name in `aioserve.architectures`")) <= set(architectures.__all__)
    shown = PAGE.split("| name in `aioserve.architectures`", 1)[1].split("\n\n", 1)[0]
    assert {name for name in architectures.__all__ if f"`{name}`" not in shown} == set()


def test_specs_have_the_same_fields() -> None:
    assert PolicySpec.__struct_fields__ == EvictionSpec.__struct_fields__
    assert PolicySpec.__struct_fields__ == ObserverSpec.__struct_fields__
    assert ToolParserSpec.__struct_fields__ == ReasoningParserSpec.__struct_fields__


def test_every_hook_and_every_method_is_there() -> None:
    assert rows("hook |") == [name for name in vars(HookSpecs) if name.startswith("aioserve_")]
    methods = [name for name in vars(Observer) if not name.startswith("_")]
    assert rows("method of `Observer`") == methods


def test_the_version_of_the_api_is_the_one_that_is_told() -> None:
    assert f"The API has version {API_VERSION}." in PAGE
