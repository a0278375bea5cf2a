"""Policies with options by name."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import ConfigError, PluginError, PolicySpec, SchedulingPolicy
from aioserve.plugins import PluginRegistry
from aioserve.plugins.options import made, split_name
from tests.plugin_system.planted import offering


class Tuned(SchedulingPolicy):
    def __init__(
        self,
        *,
        size: int = 256,
        share: float = 0.5,
        adaptive: bool = False,
        label: str = "",
        limit: int | None = 7,
        mode: Literal["fast", "fair"] = "fast",
        weights: Mapping[str, float] | None = None,
        bare=2,
        unsaid=None,
        kept: object = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"size must be at least 1, got {size}")
        self.given = {name: value for name, value in locals().items() if name != "self"}


def tuned(text: str) -> dict[str, object]:
    registry = PluginRegistry([offering([PolicySpec("tuned", Tuned)])])
    policy = registry.policy(text)
    assert isinstance(policy, Tuned)
    return policy.given


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("size=512", "size", 512),
        ("size = -0x", "size", None),
        ("share=1", "share", 1.0),
        ("share=1e-3", "share", 0.001),
        ("adaptive=true", "adaptive", True),
        ("adaptive=FALSE", "adaptive", False),
        ("label=a b", "label", "a b"),
        ("label=", "label", ""),
        ("label=x=y:z", "label", "x=y:z"),
        ("limit=none", "limit", None),
        ("limit=3", "limit", 3),
        ("mode=fair", "mode", "fair"),
        ("weights=gold:4;free:0.5", "weights", {"gold": 4.0, "free": 0.5}),
        ("weights=a:b:2", "weights", {"a:b": 2.0}),
        ("weights=none", "weights", None),
        ("bare=5", "bare", 5),
    ],
)
def test_values_become_what_the_annotations_say(text, name, value):
    if text == "size = -0x":
        with pytest.raises(ConfigError, match="must be an int, got '-0x'"):
            tuned(f"tuned:{text}")
        return
    found = tuned(f"tuned:{text}")[name]
    assert found == value
    assert type(found) is type(value)


def test_several_options_are_separated_by_commas():
    found = tuned("tuned:size=512, adaptive=true,limit=none")
    assert (found["size"], found["adaptive"], found["limit"]) == (512, True, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tuned:", "options are written NAME:OPTION=VALUE,OPTION=VALUE, got ''"),
        ("tuned:size", "options are written NAME:OPTION=VALUE,OPTION=VALUE, got 'size'"),
        ("tuned:=3", "options are written"),
        ("tuned:size=1,size=2", "option 'size' is given twice"),
        ("tuned:sise=3", r"policy 'tuned' has no option 'sise'; there are: size \(int, 256 unless"),
        ("tuned:size=big", "option 'size' of policy 'tuned' must be an int, got 'big'"),
        ("tuned:size=1.5", "option 'size' of policy 'tuned' must be an int, got '1.5'"),
        ("tuned:share=half", "option 'share' of policy 'tuned' must be a number, got 'half'"),
        ("tuned:adaptive=yes", "must be true or false, got 'yes'"),
        ("tuned:limit=few", "must be an int or none, got 'few'"),
        ("tuned:mode=slow", "must be one of fast, fair, got 'slow'"),
        ("tuned:weights=gold", "must be written KEY:VALUE;KEY:VALUE or none, got 'gold'"),
        ("tuned:weights=gold:x", "must be a number in 'gold:x' or none, got 'gold:x'"),
        (
            "tuned:weights=g:4; g:1",
            r"must be of different keys \('g' is there twice\) or none, got 'g:4; g:1'",
        ),
        ("tuned:unsaid=1", "'unsaid' of policy 'tuned' has no annotation, so a name can't give it"),
        ("tuned:sise=3", r"unsaid \(no annotation, None unless given\)"),
        ("tuned:kept=1", "is a object, which a name can't give: make the object yourself"),
        ("tuned:size=0", "policy 'tuned': size must be at least 1, got 0"),
        ("fcfs:size=1", "policy 'fcfs' has no option 'size'; there are: it has none"),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_there_is(text, message):
    with pytest.raises(ConfigError, match=message):
        tuned(text)


def test_an_option_without_a_default_is_asked_for():
    def make(*, need: int) -> SchedulingPolicy:
        return Tuned(size=need)

    with pytest.raises(ConfigError, match="policy 'x' needs the options need"):
        made(make, {}, "policy 'x'")
    assert made(make, {"need": "3"}, "policy 'x'").given["size"] == 3


def test_an_option_that_says_nothing_of_its_kind_has_no_annotation():
    def make(*, need) -> SchedulingPolicy:
        return Tuned(size=need)

    with pytest.raises(ConfigError, match="option 'need' of policy 'x' has no annotation"):
        made(make, {"need": "3"}, "policy 'x'")
    with pytest.raises(ConfigError, match=r"there are: need \(no annotation\)"):
        made(make, {"ned": "3"}, "policy 'x'")


def test_a_factory_that_raises_a_type_error_of_its_own_is_not_blamed_on_options():
    def make(*, size: int = 1) -> SchedulingPolicy:
        raise TypeError("planted")

    with pytest.raises(PluginError, match="can't be made: TypeError"):
        PluginRegistry([offering([PolicySpec("x", make)])]).policy("x")


def test_annotations_that_name_nothing_break_the_plugin_only_where_they_are_needed():
    def make(*, size: Missing = 1) -> SchedulingPolicy:  # noqa: F821  # pyright: ignore
        return Tuned()

    registry = PluginRegistry([offering([PolicySpec("x", make)])])
    assert isinstance(registry.policy("x"), Tuned)
    with pytest.raises(PluginError, match="the options of policy 'x' can't be read: NameError"):
        registry.policy("x:size=1")


WORDS = st.text(st.characters(exclude_characters=",=:", categories=["L", "N", "P"]), min_size=1)
VALUES = st.text(st.characters(exclude_characters=",", categories=["L", "N", "P", "S"]))


@given(name=WORDS, options=st.dictionaries(WORDS, VALUES, min_size=1))
def test_any_options_come_back_as_they_were_written(name, options):
    text = name + ":" + ",".join(f"{option}={value}" for option, value in options.items())
    assert split_name(text) == (name, options)


@given(st.text())
def test_no_text_is_more_than_a_clean_error(text):
    with contextlib.suppress(ConfigError):
        PluginRegistry().policy(text)  # which may be the name of one
    with contextlib.suppress(ConfigError):
        tuned("tuned:" + text)
