"""Policies with options by name."""

from __future__ import annotations

import contextlib
import inspect
import re
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
        with pytest.raises(ConfigError, match="must be a whole number, got '-0x'"):
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
        (
            "tuned:sise=3",
            r"no option 'sise'; did you mean size\? There are: size \(a whole number; 256",
        ),
        ("tuned:Mo-de=3", r"did you mean mode\? .* mode \(fast or fair; fast unless given\)"),
        ("tuned:zzz=3", r"has no option 'zzz'; there are: .*, share \(a number; 0.5 unless given"),
        ("tuned:zzz=3", r"adaptive \(true or false; false unless given\), label \(a text; ''"),
        ("tuned:zzz=3", r"limit \(a whole number or none; 7 unless given\)"),
        ("tuned:zzz=3", r"weights \(KEY:VALUE;KEY:VALUE or none; none unless given\)"),
        ("tuned:size=big", "option 'size' of policy 'tuned' must be a whole number, got 'big'"),
        ("tuned:size=1.5", "option 'size' of policy 'tuned' must be a whole number, got '1.5'"),
        ("tuned:share=half", "option 'share' of policy 'tuned' must be a number, got 'half'"),
        ("tuned:adaptive=yes", "must be true or false, got 'yes'"),
        ("tuned:limit=few", "must be a whole number or none, got 'few'"),
        ("tuned:mode=slow", "must be one of fast, fair, got 'slow'"),
        ("tuned:weights=gold", "must be written KEY:VALUE;KEY:VALUE or none, got 'gold'"),
        ("tuned:weights=gold:x", "must be a number in 'gold:x' or none, got 'gold:x'"),
        (
            "tuned:weights=g:4; g:1",
            r"must be of different keys \('g' is there twice\) or none, got 'g:4; g:1'",
        ),
        ("tuned:unsaid=1", "policy 'tuned' can't be given by name: it has no annotation, so make"),
        ("tuned:sise=3", r"unsaid \(can't be given by name\), kept \(can't be given by name\)"),
        ("tuned:kept=1", "'kept' of policy 'tuned' can't be given by name: make the object"),
        ("tuned:size=0", "policy 'tuned': size must be at least 1, got 0"),
        ("fcfs:size=1", "policy 'fcfs' has no option 'size'; it has none$"),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_there_is(text, message):
    with pytest.raises(ConfigError, match=message):
        tuned(text)


def test_an_option_without_a_default_is_asked_for():
    def make(*, need: int) -> SchedulingPolicy:
        return Tuned(size=need)

    with pytest.raises(ConfigError, match="policy 'x' needs the option need"):
        made(make, {}, "policy 'x'")
    with pytest.raises(
        ConfigError, match=r"did you mean need\? .* \(a whole number; must be given"
    ):
        made(make, {"needs": "3"}, "policy 'x'")
    assert made(make, {"need": "3"}, "policy 'x'").given["size"] == 3


@pytest.mark.parametrize("name", sorted(PluginRegistry().policies))
def test_every_default_that_is_told_is_written_as_it_can_be_given(name: str) -> None:
    registry = PluginRegistry()
    with pytest.raises(ConfigError) as refused:
        registry.policy(f"{name}:no_such_option=1")
    told = dict(re.findall(r"(\w+) \([^()]*; ([^;()]*) unless given\)", str(refused.value)))
    signature = inspect.signature(registry.policies[name].spec.factory, eval_str=True)
    defaults = {
        option: parameter.default
        for option, parameter in signature.parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }

    def factory(**options: object) -> dict[str, object]:
        return options

    factory.__signature__ = signature
    assert made(factory, told, "it") == defaults


def test_an_option_that_says_nothing_of_its_kind_has_no_annotation():
    def make(*, need) -> SchedulingPolicy:
        return Tuned(size=need)

    with pytest.raises(
        ConfigError, match="option 'need' of policy 'x' can't be given by name: it has no"
    ):
        made(make, {"need": "3"}, "policy 'x'")
    with pytest.raises(ConfigError, match=r"There are: need \(can't be given by name\)"):
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
