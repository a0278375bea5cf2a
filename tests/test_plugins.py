"""Plugins: found, isolated, named when they break."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aioserve import (
    Engine,
    PluginError,
    PolicySpec,
    SamplingParams,
    SchedulingPolicy,
    UnknownPolicyError,
    hookimpl,
)
from aioserve import plugins as plugins_module
from aioserve.plugins import PluginRegistry
from aioserve.testing.fake_model import FakeModel, expected_tokens


class Lifo(SchedulingPolicy):
    def order(self, waiting, view):
        return reversed(waiting)


class LifoPlugin:
    @hookimpl
    def aioserve_scheduling_policies(self):
        return [PolicySpec("lifo", Lifo, "last in, first out")]


def entry_point(name: str, load):
    return SimpleNamespace(
        name=name, load=load, dist=SimpleNamespace(name="some-dist", version="1.2")
    )


@pytest.fixture
def installed(monkeypatch):
    """Entry points to be found instead of those that are installed."""
    found: list[SimpleNamespace] = []
    monkeypatch.setattr(plugins_module, "entry_points", lambda group: found)
    return found


def broken():
    raise ImportError("planted")


def test_fcfs_is_found_through_its_entry_point():
    info = PluginRegistry().policies["fcfs"]
    assert info.distribution == "aioserve-plugins"
    assert type(PluginRegistry().policy("fcfs")).__module__ == "aioserve_plugins.fcfs"


def test_each_engine_gets_a_policy_object_of_its_own():
    registry = PluginRegistry()
    assert registry.policy("fcfs") is not registry.policy("fcfs")


def test_a_broken_plugin_that_nobody_selects_is_a_warning(installed, caplog):
    installed += [entry_point("bad", broken), entry_point("lifo", LifoPlugin)]
    registry = PluginRegistry()
    assert isinstance(registry.policy("lifo"), Lifo)
    assert [plugin.name for plugin in registry.broken] == ["bad"]
    assert "bad (some-dist 1.2): ImportError('planted')" in caplog.text


def test_a_broken_plugin_that_is_selected_is_an_error_with_its_cause(installed):
    installed.append(entry_point("bad", broken))
    with pytest.raises(
        PluginError, match=r"'bad' can't be loaded: bad \(some-dist 1.2\)"
    ) as caught:
        PluginRegistry().policy("bad")
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_factory_that_raises_names_its_distribution(installed):
    class Plugin:
        @hookimpl
        def aioserve_scheduling_policies(self):
            return [PolicySpec("bad", broken)]

    installed.append(entry_point("bad", Plugin))
    with pytest.raises(PluginError, match=r"some-dist 1.2 can't be made: ImportError"):
        PluginRegistry().policy("bad")


def test_two_plugins_may_not_offer_one_name(installed):
    installed += [entry_point("a", LifoPlugin), entry_point("b", LifoPlugin)]
    registry = PluginRegistry()
    assert [plugin.name for plugin in registry.broken] == ["b"]
    assert "offered by some-dist too" in str(registry.broken[0])


def test_a_policy_belongs_to_the_entry_point_of_its_name(installed):
    installed += [entry_point("a", lambda: LifoPlugin()), entry_point("lifo", LifoPlugin)]
    registry = PluginRegistry()
    assert [plugin.name for plugin in registry.broken] == ["a"]


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (object(), "has no hook marked"),
        (SimpleNamespace(), "has no hook marked"),
    ],
)
def test_an_object_without_hooks_is_refused(plugin, message):
    with pytest.raises(PluginError, match=message):
        PluginRegistry([plugin])


def test_a_given_plugin_whose_hook_raises_is_an_error_with_its_cause():
    class Plugin:
        @hookimpl
        def aioserve_scheduling_policies(self):
            raise KeyError("planted")

    with pytest.raises(PluginError, match="is broken: KeyError") as caught:
        PluginRegistry([Plugin()])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_hook_that_gives_something_else_breaks_its_plugin(installed):
    class Plugin:
        @hookimpl
        def aioserve_scheduling_policies(self):
            return [Lifo]

    installed.append(entry_point("bad", Plugin))
    (found,) = PluginRegistry().broken
    assert "must give PolicySpec objects" in str(found)


def test_without_plugins_the_error_says_so(installed):
    with pytest.raises(UnknownPolicyError, match="none is installed"):
        PluginRegistry().policy("fcfs")


@pytest.mark.parametrize(
    "options", [{"policy": "lifo", "plugins": [LifoPlugin()]}, {"policy": Lifo()}]
)
@pytest.mark.asyncio
async def test_a_policy_is_given_by_plugin_object_or_as_itself(options):
    async with Engine(FakeModel(), **options) as engine:
        assert engine.dump()["policy"] == "Lifo"
        answer = await engine.generate([1], SamplingParams(max_tokens=3, seed=0))
        assert list(answer.token_ids) == expected_tokens([1], 3)
