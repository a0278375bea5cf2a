"""Options that can't both be followed are refused together, and defaults ask for nothing."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import pytest

from aioserve import LLM, Engine
from aioserve.arguments import check, integer, rules_of
from aioserve.config import EngineConfig, Speculation
from aioserve.errors import ConfigError
from aioserve.server import ServerSettings
from aioserve.server.listening import Listening
from aioserve.testing import FakeModel

WITHOUT_EFFECT = [
    ({"memory_utilization": 0.5, "num_pages": 64}, "memory_utilization=0.5", "num_pages=64"),
    ({"eviction": "lfu", "prefix_caching": False}, "eviction='lfu'", "prefix_caching=False"),
    (
        {"num_host_pages": 8, "prefix_caching": False, "preemption": "recompute"},
        "num_host_pages=8",
        "prefix_caching=False and preemption='recompute'",
    ),
]


@pytest.mark.parametrize(("options", "idle", "beside"), WITHOUT_EFFECT)
def test_an_option_that_another_leaves_without_effect_is_refused_with_both(
    options: dict[str, Any], idle: str, beside: str
) -> None:
    for make in (EngineConfig, Engine):
        with pytest.raises(ConfigError) as raised:
            make(**options)
        assert str(raised.value).startswith(f"{idle} has no effect with {beside}: ")
        assert "leave" in str(raised.value)  # what to do


@pytest.mark.parametrize(("options", "idle", "beside"), WITHOUT_EFFECT)
def test_defaults_and_each_option_without_the_others_are_accepted(
    options: dict[str, Any], idle: str, beside: str
) -> None:
    defaults = msgspec.structs.asdict(EngineConfig())
    name = idle.partition("=")[0]
    EngineConfig(**{**options, name: defaults[name]})
    EngineConfig(**{name: options[name]})
    for left_out in options.keys() - {name}:
        EngineConfig(**{**options, left_out: defaults[left_out]})


@pytest.mark.parametrize("listener", ["progress", "capture_progress"])
def test_progress_is_refused_where_the_model_loads_itself(listener: str) -> None:
    def progress(done: int, total: int) -> None:
        pass

    listens: dict[str, Any] = {listener: progress}
    refused = rf"^{listener}=.* has no effect with model=.*FakeModel.*: .*leave {listener} out$"
    with pytest.raises(ConfigError, match=refused):
        Engine(FakeModel(), **listens)
    Engine("pyhelp", **listens)
    Engine(Path("pyhelp"), **listens)


@pytest.mark.parametrize("listener", ["progress", "capture_progress"])
def test_progress_must_be_callable(listener: str) -> None:
    async def asynchronous(done: int, total: int) -> None:
        pass

    for wrong, got in ((3, "3"), (asynchronous, "<function ")):
        listens: dict[str, Any] = {listener: wrong}
        refused = f"^{listener} must be callable and not async, got {got}"
        with pytest.raises(ConfigError, match=refused):
            Engine("pyhelp", **listens)


def test_an_engine_takes_each_field_of_its_config_by_name_with_its_type_and_default() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(EngineConfig)}
    shown = inspect.signature(Engine).parameters
    beside = ["model", "policy", "plugins", "progress", "capture_progress"]
    assert list(shown) == [*beside, *fields]
    assert [name for name, one in shown.items() if one.kind is not one.KEYWORD_ONLY] == ["model"]
    assert {name: shown[name].default for name in fields} == {
        name: field.default for name, field in fields.items()
    }
    hints = {name: one.annotation for name, one in shown.items() if name in fields}
    assert hints.pop("chat_template") == str | Path | None
    assert hints.pop("speculation") == Speculation | str | None  # its drafter's name
    own = get_type_hints(EngineConfig)
    assert hints == {name: own[name] for name in hints}
    assert inspect.signature(LLM).parameters == shown


def test_an_option_that_may_be_given_in_two_ways_is_kept_in_one() -> None:
    sizes: Any = iter([1, 2])  # which can be read once
    engine = Engine(
        chat_template=Path("a.jinja"), speculation="suffix", device="cuda", graph_sizes=sizes
    )
    assert engine.config == EngineConfig(
        chat_template="a.jinja",
        speculation=Speculation(drafter="suffix"),
        device="cuda",
        graph_sizes=(1, 2),
    )
    assert type(engine.config) is EngineConfig


@pytest.mark.parametrize("kind", [EngineConfig, Speculation, Listening, ServerSettings])
def test_each_option_is_checked_by_a_rule_beside_its_type(kind: type[msgspec.Struct]) -> None:
    unchecked = set(kind.__struct_fields__) - rules_of(kind).keys()
    # Keys are made anew, and checked by that.
    assert unchecked == ({"api_keys"} if kind is ServerSettings else set())


def test_a_type_that_says_what_a_value_may_be_is_a_rule() -> None:
    class Options(msgspec.Struct):
        on: bool
        maybe: bool | None
        word: Literal["a", "b"] | None
        count: Annotated[int, integer(1, 3)]
        free: str

    rules = rules_of(Options)
    good = {"on": True, "maybe": None, "word": "b", "count": 3}
    assert {name: rule(good[name]) for name, rule in rules.items()} == good
    for name, wrong in (("on", None), ("maybe", 0), ("word", "c"), ("count", 4)):
        with pytest.raises(ConfigError, match=f"^{name} must be"):
            check(ConfigError, name, wrong, rules[name])


def test_an_unknown_option_is_named_as_python_does() -> None:
    with pytest.raises(TypeError, match=r"^Engine\(\) got an unexpected .* 'num_page'; did"):
        Engine(num_page=64)  # pyright: ignore[reportCallIssue]
