"""The reference pages name exactly what there is: nothing is missing, nothing is left over."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

import aioserve.errors
import aioserve.testing
from aioserve import (
    ChatAnswer,
    ChatCompletion,
    ChatDelta,
    ChatStream,
    ChatStreamLike,
    Completion,
    Engine,
    EngineLike,
    EngineStats,
    InterTokenLatency,
    ModelFacts,
    PhaseStats,
    RequestView,
    Sample,
    SamplingParams,
    SchedulerView,
    SchedulingPolicy,
    Timings,
    Token,
    TokenStream,
    TokenStreamLike,
    ToolCall,
    ToolCallDelta,
    Usage,
    Verdict,
)
from aioserve.config import ReasoningParserName, ToolParserName
from aioserve.text.messages import FIELDS, FIELDS_OF

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
ABSTRACT_ERRORS = {
    "AioserveError",
    "EngineError",
    "InvalidRequestError",
    "ModelError",
    "RequestRefusedError",
}


def section(page: str, title: str | None = None) -> str:
    """A page's text, or that of the section under the heading `title`."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    if title is None:
        return text
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_column(text: str) -> list[str]:
    """Code in the first cells of a section's tables, in order."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(?:await )?([^`]+)`", cell)]


def in_the_house(thing: type) -> bool:
    return thing.__module__.startswith("aioserve.")


def public(thing: type) -> set[str]:
    names = {name for one in thing.__mro__ if in_the_house(one) for name in vars(one)}
    return {name for name in names if not name.startswith("_")}


def test_the_engines_options_and_defaults_are_all_there() -> None:
    parameters = dict(inspect.signature(Engine).parameters)
    options, _, methods = section("engine.md", "`Engine`").partition("| method |")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", options, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(parameters)
    for name, shown in rows:
        default = parameters[name].default
        expected = f'"{default}"' if isinstance(default, str) else f"{default}"
        assert shown.strip("`").removesuffix(".0") == expected.removesuffix(".0"), name
    named = {re.split(r"\W", name)[0] for name in first_column(methods)}
    assert named == public(Engine) - {"config"}


def test_the_contract_of_engines_is_all_there() -> None:
    members = {
        re.split(r"\W", name)[0] for name in first_column(section("engine-like.md", "`EngineLike`"))
    }
    assert members == public(EngineLike)
    shown = section("engine-like.md", "`ModelFacts`")
    assert first_column(shown) == list(ModelFacts.__struct_fields__)
    assert public(ModelFacts) - set(ModelFacts.__struct_fields__) == {"reads", "filled_in"}
    assert "`reads(" in shown
    assert "`filled_in(" in shown
    for kind in (TokenStreamLike, ChatStreamLike):
        for name in public(kind):
            assert f"`{name}`" in section("engine-like.md", "`EngineLike`"), name


def test_what_a_stream_offers_is_all_there() -> None:
    shown = section("streams.md", "`TokenStream`")
    for name in public(TokenStream):
        assert f"`{name}" in shown or f"await {name}" in shown, name


def test_what_a_chat_stream_offers_is_all_there() -> None:
    shown = section("chat-streams.md")
    for name in public(ChatStream):
        assert f"`{name}" in shown or f"await {name}" in shown, name
    for kind in (ChatDelta, ChatCompletion, ChatAnswer, ToolCall, ToolCallDelta):
        assert set(re.findall(r"`(\w+)`", shown)) >= {kind.__name__, *public(kind)}
    parsers = [*get_args(ToolParserName), *get_args(ReasoningParserName)]
    assert sorted(re.findall(r'^\| `"(\w+)"`', shown, re.MULTILINE)) == sorted(parsers)


def test_every_field_of_a_message_and_what_goes_with_it_has_a_row() -> None:
    rows = first_column(section("prompts.md", "A message"))
    fields = [*FIELDS, *FIELDS_OF["assistant"], *FIELDS_OF["tool"]]
    assert rows == [name for name in fields if name != "reasoning"] + [
        *("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    ]


@pytest.mark.parametrize("kind", [Token, Completion])
def test_the_fields_of_what_comes_back_are_all_there(kind: type) -> None:
    shown = section("streams.md", f"`{kind.__name__}`")
    assert set(re.findall(r"`(\w+)`", shown)) >= set(kind.__struct_fields__)


@pytest.mark.parametrize("kind", [Usage, Timings, InterTokenLatency])
def test_what_is_told_of_a_request_is_all_there(kind: type) -> None:
    shown = section("streams.md", "Usage and timings")
    if kind is InterTokenLatency:
        assert set(re.findall(r"`(\w+)`", shown)) >= public(kind)
        return
    table = shown.split(f"| `{kind.__name__}` |", 1)[1].split("\n\n", 1)[0]
    fields = kind.__struct_fields__
    assert first_column(table) == [*fields, *sorted(public(kind) - set(fields))]


def test_the_fields_of_a_sample_are_those_of_a_completion_too() -> None:
    assert public(Completion) - set(Completion.__struct_fields__) == public(Sample)
    shown = section("streams.md", "`Completion`")
    assert set(re.findall(r"`(\w+)`", shown)) >= {"Sample", *public(Sample)}


def test_every_sampling_parameter_has_a_row() -> None:
    table, _, _ = section("sampling-params.md").partition("\n## ")
    assert first_column(table) == list(SamplingParams.__struct_fields__)


def test_every_statistic_has_a_row() -> None:
    # In an order of its own: what is asked most comes first.
    fields, _, _ = section("stats.md").partition("\n## ")
    assert sorted(first_column(fields)) == sorted(EngineStats.__struct_fields__)
    rows = first_column(section("stats.md", "Work by phase"))
    assert rows == list(PhaseStats.__struct_fields__)


@pytest.mark.parametrize("kind", [SchedulingPolicy, RequestView])
def test_what_a_policy_sees_and_is_asked_is_all_there(kind: type) -> None:
    rows = first_column(section("policy-interface.md", f"`{kind.__name__}`"))
    assert {re.split(r"\W", name)[0] for name in rows} == public(kind)


def test_every_fact_about_the_scheduler_has_a_row() -> None:
    rows = first_column(section("policy-interface.md", "`SchedulerView`"))
    fields = [name for name in SchedulerView.__struct_fields__ if not name.startswith("_")]
    assert rows[: len(fields)] == fields
    looked_up = [re.split(r"\W", name)[0] for name in rows[len(fields) :]]
    assert set(looked_up) == public(SchedulerView) - set(fields)


def test_every_verdict_has_a_row() -> None:
    assert first_column(section("policy-interface.md", "`Verdict`")) == [v.name for v in Verdict]


def test_every_error_has_a_row() -> None:
    rows = first_column(section("errors.md").partition("\n## ")[0])
    errors = {name for name in aioserve.errors.__all__ if name.endswith("Error")}
    assert set(rows) == errors - ABSTRACT_ERRORS


def test_every_name_for_tests_has_a_row() -> None:
    names = {re.split(r"\W", name)[0] for name in first_column(section("testing.md"))}
    assert names == set(aioserve.testing.__all__)


def test_every_environment_variable_has_a_row() -> None:
    sources = [*(ROOT / "aioserve").rglob("*.py"), *(ROOT / "native").rglob("*.cpp")]
    read = re.compile(r"(?:environ(?:\.get\(|\[)|getenv\()\s*\"(\w+)\"")
    found = {name for path in sources for name in read.findall(path.read_text(encoding="utf-8"))}
    assert found
    assert found <= set(first_column(section("environment.md")))
