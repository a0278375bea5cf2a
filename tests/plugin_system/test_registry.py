"""Plugins: found, isolated, named when they break."""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import (
    ConfigError,
    Engine,
    PluginError,
    PolicySpec,
    RequestRejectedError,
    SamplingParams,
    SchedulingPolicy,
    UnknownPolicyError,
    Verdict,
    hookimpl,
)
from aioserve.plugins import API_VERSION, PluginRegistry, check_policy_object
from aioserve.plugins import installed as installed_module
from aioserve.testing.fake_model import FakeModel, expected_tokens
from tests.plugin_system.hostile import ERRORS, TOUCHES, contained, hostile
from tests.plugin_system.planted import Lifo, LifoPlugin, broken, entry_point, offering


def any_of(value) -> Any:
    """A value whose type is nobody's business."""
    return value


def test_fcfs_is_found_through_its_entry_point():
    info = PluginRegistry().policies["fcfs"]
    assert info.origin.distribution == "aioserve"
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
    installed.append(entry_point("bad", lambda: offering([PolicySpec("bad", broken)])))
    with pytest.raises(
        PluginError, match=r"policy bad \(some-dist 1.2\) can't be made: ImportError"
    ):
        PluginRegistry().policy("bad")


def test_two_plugins_may_not_offer_one_name(installed):
    installed += [entry_point("a", LifoPlugin), entry_point("b", LifoPlugin)]
    registry = PluginRegistry()
    assert [plugin.name for plugin in registry.broken] == ["b"]
    assert "offered by plugin a (some-dist 1.2) too" in str(registry.broken[0])


def test_what_a_broken_plugin_offered_is_known_by_name(installed):
    pack = [PolicySpec("alpha", Lifo), PolicySpec("lifo", Lifo)]
    installed += [entry_point("pack", lambda: offering(pack)), entry_point("lifo", LifoPlugin)]
    registry = PluginRegistry()
    assert isinstance(registry.policy("lifo"), Lifo)
    with pytest.raises(PluginError) as caught:
        registry.policy("alpha")
    assert "policy 'alpha' can't be loaded: pack (some-dist 1.2): PluginError(" in str(caught.value)


def test_an_unknown_name_may_be_of_a_plugin_that_is_broken(installed):
    installed.append(entry_point("pack", broken))
    said = r"broken: pack \(some-dist 1.2\): ImportError\('planted'\)"
    with pytest.raises(UnknownPolicyError, match=said):
        PluginRegistry().policy("alpha")
    with pytest.raises(ConfigError, match=said):
        PluginRegistry().eviction("alpha")


def test_one_object_counts_once_however_often_it_is_found(installed):
    plugin = LifoPlugin()
    installed += [entry_point("a", lambda: plugin), entry_point("b", lambda: plugin)]
    for plugins in ([], [plugin], [plugin, plugin]):
        registry = PluginRegistry(plugins)
        assert (list(registry.policies), registry.broken) == (["lifo"], [])


class Waits(SchedulingPolicy):
    async def finished(self, requests):
        pass


class Yields(SchedulingPolicy):
    async def order(self, waiting, view):
        for request in waiting:
            yield request


@pytest.mark.parametrize(("policy", "method"), [(Waits, "finished"), (Yields, "order")])
def test_a_policy_with_an_async_method_is_refused(policy, method):
    said = rf"{policy.__name__}.{method} must be a plain function, got an async one"
    with pytest.raises(ConfigError, match=said):
        Engine(FakeModel(), policy=policy())
    registry = PluginRegistry([offering([PolicySpec("mine", policy)])])
    with pytest.raises(PluginError, match=rf"policy mine \(given to the engine\): {said}"):
        registry.policy("mine")


class Misspells(SchedulingPolicy):
    def preempts(self, running, view):
        return ()


class HasHelpers(SchedulingPolicy):
    """Policy whose helpers look like misspelt questions and are none.

    It answers the question that `ordered` resembles, and `_preempts` begins with an underscore.
    """

    def order(self, waiting, view):
        return self.ordered(waiting)

    def ordered(self, waiting):
        return self._preempts(waiting)

    def _preempts(self, waiting):
        return waiting


def test_a_policy_with_a_misspelt_method_is_refused_with_the_name_that_was_meant():
    said = r"Misspells\.preempts is never called: did you mean preempt\?"
    with pytest.raises(ConfigError, match=said):
        Engine(FakeModel(), policy=Misspells())
    registry = PluginRegistry([offering([PolicySpec("mine", Misspells)])])
    with pytest.raises(PluginError, match=rf"policy mine \(given to the engine\): {said}"):
        registry.policy("mine")
    Engine(FakeModel(), policy=HasHelpers())


@pytest.mark.parametrize("value", [lambda self: False, None, 1, "no"])
def test_a_policy_says_with_a_bool_whether_its_victims_are_of_any_age(value):
    policy = type("Odd", (SchedulingPolicy,), {"victim_of_any_age": value})
    said = r"Odd\.victim_of_any_age must be True or False, got "
    with pytest.raises(ConfigError, match=said):
        Engine(FakeModel(), policy=policy())
    registry = PluginRegistry([offering([PolicySpec("mine", policy)])])
    with pytest.raises(PluginError, match=rf"policy mine \(given to the engine\): {said}"):
        registry.policy("mine")


def test_a_policy_belongs_to_the_entry_point_of_its_name(installed):
    installed += [entry_point("a", lambda: LifoPlugin()), entry_point("lifo", LifoPlugin)]
    registry = PluginRegistry()
    assert [plugin.name for plugin in registry.broken] == ["a"]


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (object(), "has no hook marked"),
        (SimpleNamespace(), "has no hook marked"),
        (LifoPlugin, "is a class: give an object of it"),
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


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        ([Lifo], "must give PolicySpec objects"),
        ("lifo", "must give a list of PolicySpec"),
        (PolicySpec("lifo", Lifo), "must give a list of PolicySpec"),
        ([PolicySpec("", Lifo)], "name must be letters"),
        ([PolicySpec("a:b", Lifo)], "name must be letters"),
        ([PolicySpec(any_of(3), Lifo)], "name must be letters"),
        ([PolicySpec("lifo", any_of("Lifo"))], "factory must be callable, got 'Lifo'"),
        ([PolicySpec("lifo", Lifo, any_of(None))], "description must be a str, got None"),
        ([PolicySpec("lifo", Lifo), PolicySpec("lifo", Lifo)], "offered twice"),
    ],
)
def test_a_hook_that_gives_something_else_breaks_its_plugin(installed, offered, message):
    installed += [entry_point("bad", lambda: offering(offered)), entry_point("good", LifoPlugin)]
    registry = PluginRegistry()
    (found,) = registry.broken
    assert message in str(found)
    assert [offer.origin.plugin for offer in registry.policies.values()] == ["good"]


@pytest.mark.parametrize("api", [0, API_VERSION + 1, "1", True, None])
def test_a_spec_made_for_another_api_version_is_broken_and_says_so(installed, api):
    spec = PolicySpec("lifo", Lifo, api=api)
    installed.append(entry_point("lifo", lambda: offering([spec])))
    with pytest.raises(PluginError, match=r"some-dist 1\.2") as caught:
        PluginRegistry().policy("lifo")
    assert f"made for version {api!r} of the plugin API" in str(caught.value)
    assert f"this aioserve has version {API_VERSION}" in str(caught.value)


def test_a_spec_that_names_no_version_is_made_for_the_first():
    assert PolicySpec("lifo", Lifo).api == 1


def test_a_hook_must_be_plain(installed):
    class Waiting:
        @hookimpl
        async def aioserve_scheduling_policies(self):
            return []

    class Wrapping:
        @hookimpl(wrapper=True)
        def aioserve_scheduling_policies(self):
            return (yield)

    class Misspelt:
        @hookimpl
        def aioserve_scheduling_policy(self):
            return []

    installed += [
        entry_point("a", Waiting),
        entry_point("b", Wrapping),
        entry_point("c", Misspelt),
    ]
    first, second, third = PluginRegistry().broken
    assert "must be a plain function, got an async one" in str(first)
    assert "must not be a wrapper" in str(second)
    assert "unknown hook 'aioserve_scheduling_policy'" in str(third)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("touches", [(), TOUCHES])
@contained
def test_a_module_that_raises_on_import_is_broken_whatever_it_raises(installed, touches, error):
    def leave():
        raise hostile(touches, error, base=error)

    installed.append(entry_point("bad", leave))
    (found,) = PluginRegistry().broken
    assert "Hostile" in str(found)
    with pytest.raises(PluginError, match=r"'bad' can't be loaded: bad \(some-dist 1.2\)"):
        PluginRegistry().policy("bad")


def test_an_interrupt_while_a_module_is_imported_is_let_through(installed):
    def interrupted():
        raise KeyboardInterrupt

    installed.append(entry_point("bad", interrupted))
    with pytest.raises(KeyboardInterrupt):
        PluginRegistry()


@pytest.mark.parametrize("error", ERRORS)
@contained
def test_what_a_plugin_gives_may_raise_when_it_is_looked_at(installed, error):
    """Each object is its plugin's fault, and no other's."""
    thing = hostile(TOUCHES, error)
    installed += [
        entry_point("a", lambda: thing),
        entry_point("b", lambda: offering(thing)),
        entry_point("c", lambda: offering([thing])),
        entry_point("d", lambda: offering([PolicySpec(thing, Lifo)])),
        entry_point("e", lambda: offering([PolicySpec("e", Lifo, thing)])),
        entry_point("f", lambda: offering([PolicySpec("f", thing)])),
        entry_point("g", lambda: offering([PolicySpec("g", Lifo, api=thing)])),
        entry_point("lifo", LifoPlugin),
        entry_point("made", lambda: offering([PolicySpec("made", lambda: thing)])),
    ]
    registry = PluginRegistry()
    assert {broken.name for broken in registry.broken} | {"f"} == set("abcdefg")
    assert isinstance(registry.policy("lifo"), Lifo)
    with pytest.raises(PluginError, match=r"policy made \(some-dist 1.2\)"):
        registry.policy("made")
    with pytest.raises(PluginError, match="policy can't be used"):
        check_policy_object(hostile(TOUCHES, error, base=SchedulingPolicy))


def test_a_spec_is_made_anew_of_plain_values(installed):
    class Named(PolicySpec, frozen=True):
        pass

    class Name(StrEnum):
        LIFO = "lifo"

    given = Named(Name.LIFO, Lifo, Name.LIFO)
    spec = PluginRegistry([offering([given])]).policies["lifo"].spec
    assert (type(spec), type(spec.name), type(spec.description)) == (PolicySpec, str, str)
    assert spec == PolicySpec("lifo", Lifo, "lifo")


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_a_factory_that_ends_the_process_names_its_distribution(installed, error):
    def leave():
        raise error

    installed.append(entry_point("bad", lambda: offering([PolicySpec("bad", leave)])))
    with pytest.raises(
        PluginError, match=rf"bad \(some-dist 1.2\) can't be made: {error.__name__}"
    ):
        PluginRegistry().policy("bad")


def test_a_factory_that_makes_something_else_breaks_its_contract(installed):
    installed.append(entry_point("bad", lambda: offering([PolicySpec("bad", any_of(dict))])))
    with pytest.raises(PluginError, match=r"bad \(some-dist 1.2\): its factory made {}, no"):
        PluginRegistry().policy("bad")


def test_a_module_is_a_plugin():
    module = ModuleType("lifo_module")
    module.aioserve_scheduling_policies = hookimpl(  # pyright: ignore[reportAttributeAccessIssue]
        lambda: [PolicySpec("lifo", Lifo)]
    )
    assert isinstance(PluginRegistry([module]).policy("lifo"), Lifo)


@pytest.mark.parametrize("name", ["lifoo", "LIFO", "lif-o"])
def test_an_unknown_name_is_told_with_the_nearest_one(installed, name):
    installed.append(entry_point("a", LifoPlugin))
    with pytest.raises(UnknownPolicyError, match=r"did you mean lifo\? There are: lifo"):
        PluginRegistry().policy(name)
    with pytest.raises(ConfigError, match=r"did you mean slru\? There are: fifo, lfu"):
        PluginRegistry().eviction("slr_u")


def test_without_plugins_the_error_says_so(installed):
    with pytest.raises(UnknownPolicyError, match="none is installed"):
        PluginRegistry().policy("fcfs")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"policy": "lifo", "plugins": [LifoPlugin()]}, "lifo (given to the engine)"),
        ({"policy": Lifo()}, "Lifo"),
    ],
)
@pytest.mark.asyncio
async def test_a_policy_is_given_by_plugin_object_or_as_itself(options, name):
    async with Engine(FakeModel(), **options) as engine:
        assert engine.dump()["policy"] == name
        answer = await engine.generate([1], SamplingParams(max_tokens=3, seed=0))
        assert list(answer.token_ids) == expected_tokens([1], 3)


ENTRY_POINTS = "[aioserve]\nghost = no_such_module\n"
METADATA = "Metadata-Version: 2.1\nName: ghost-dist\nVersion: 3\n"


@pytest.mark.parametrize(
    ("metadata", "listed", "said"),
    [
        (None, ENTRY_POINTS, "ghost (ghost-1.dist-info): ModuleNotFoundError"),
        (b"", ENTRY_POINTS, "ghost (ghost-1.dist-info): ModuleNotFoundError"),
        (b"\xff\xfe", ENTRY_POINTS, "ghost (ghost-1.dist-info): ModuleNotFoundError"),
        (b"Name: ghost-dist\n", ENTRY_POINTS, "ghost (ghost-dist): ModuleNotFoundError"),
        (
            METADATA.encode(),
            "[aioserve]\nghost\n",
            "entry_points.txt is malformed: ",
        ),
        (None, "[aioserve]\nghost\n", "ghost-1.dist-info (ghost-1.dist-info): PluginError("),
    ],
)
def test_a_damaged_distribution_harms_nobody(tmp_path, monkeypatch, caplog, metadata, listed, said):
    info = tmp_path / "ghost-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(listed)
    if metadata is not None:
        (info / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    registry = PluginRegistry()
    assert "fcfs" in registry.policies
    (found,) = registry.broken
    assert said in str(found)
    assert said in caplog.text
    if metadata == METADATA.encode():
        assert (found.name, str(found.origin)) == ("ghost-dist", "ghost-dist 3")
    assert found.origin.version is not None
    monkeypatch.setenv("AIOSERVE_PLUGINS", found.name)
    with pytest.raises(PluginError, match="AIOSERVE_PLUGINS names a plugin that can't be loaded"):
        PluginRegistry().check_selected()


def test_a_damaged_distribution_without_plugins_is_not_spoken_of(tmp_path, monkeypatch, caplog):
    info = tmp_path / "ghost-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[console_scripts]\nghost\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = PluginRegistry()
    assert "fcfs" in registry.policies
    assert (registry.broken, caplog.text) == ([], "")


# AIOSERVE_PLUGINS


@pytest.fixture
def three(installed):
    """One bundled plugin, two of others; each notes that it was imported."""
    imported = []

    def load(name):
        def imports():
            imported.append(name)
            return offering([PolicySpec(name, Lifo)])

        return imports

    installed += [
        entry_point("fcfs", load("fcfs"), "aioserve"),
        entry_point("mine", load("mine"), "My.Policies"),
        entry_point("theirs", load("theirs"), "their_policies"),
    ]
    return imported


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["fcfs", "mine", "theirs"]),
        ("off", ["fcfs"]),
        (" OFF ", ["fcfs"]),
        ("", ["fcfs"]),
        ("mine", ["fcfs", "mine"]),
        ("my-policies", ["fcfs", "mine"]),
        ("My.Policies, their-policies", ["fcfs", "mine", "theirs"]),
        ("fcfs,theirs", ["fcfs", "theirs"]),
    ],
)
def test_the_environment_says_which_plugins_are_imported(three, monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("AIOSERVE_PLUGINS", value)
    registry = PluginRegistry()
    assert sorted(registry.policies) == expected
    assert three == expected
    assert sorted([*expected, *(plugin.name for plugin in registry.off)]) == [
        "fcfs",
        "mine",
        "theirs",
    ]


def test_a_name_in_the_environment_that_is_not_installed_is_an_error(three, monkeypatch):
    monkeypatch.setenv("AIOSERVE_PLUGINS", "mine,quota")
    with pytest.raises(ConfigError, match=r"names 'quota', which is neither .*: aioserve"):
        PluginRegistry()
    assert three == []


@pytest.mark.parametrize("value", [",", " , ,", ",,"])
def test_an_environment_that_names_nothing_between_commas_is_an_error(three, monkeypatch, value):
    monkeypatch.setenv("AIOSERVE_PLUGINS", value)
    with pytest.raises(ConfigError, match=r"AIOSERVE_PLUGINS must be names .* or off; got"):
        PluginRegistry()
    assert three == []


def test_a_broken_plugin_that_the_environment_names_is_an_error(installed, monkeypatch):
    installed += [entry_point("lifo", LifoPlugin), entry_point("quota", broken)]
    PluginRegistry().check_selected()
    monkeypatch.setenv("AIOSERVE_PLUGINS", "lifo,quota")
    with pytest.raises(PluginError) as caught:
        PluginRegistry().check_selected()
    assert "AIOSERVE_PLUGINS names a plugin that can't be loaded" in str(caught.value)
    assert "quota (some-dist 1.2): ImportError('planted')" in str(caught.value)


def test_what_is_switched_off_says_so(three, monkeypatch):
    monkeypatch.setenv("AIOSERVE_PLUGINS", "mine")
    with pytest.raises(UnknownPolicyError, match="AIOSERVE_PLUGINS leaves out: theirs"):
        PluginRegistry().policy("theirs")


def test_a_plugin_that_was_given_goes_before_those_that_are_installed(installed, monkeypatch):
    installed.append(entry_point("fcfs", lambda: offering([PolicySpec("fcfs", Lifo)])))
    monkeypatch.setenv("AIOSERVE_PLUGINS", "off")
    registry = PluginRegistry([LifoPlugin()])
    assert list(registry.policies) == ["lifo"]
    monkeypatch.delenv("AIOSERVE_PLUGINS")
    mine = offering([PolicySpec("fcfs", Lifo, "mine")])
    registry = PluginRegistry([mine])
    assert registry.policies["fcfs"].spec.description == "mine"
    assert "offered by plugin Plugin (given to the engine) too" in str(registry.broken[0])


NAMES = st.sampled_from(["a", "b", "c", "d"])
BAD: dict[str, Any] = {
    "import": broken,
    "nonsense": lambda: offering([Lifo]),
    "another version": lambda: offering([PolicySpec("a", Lifo, api=API_VERSION + 1)]),
    "no hook": object,
    "raises": lambda: Raising(),
    "exits": lambda: exit(3),
}


class Raising:
    @hookimpl
    def aioserve_scheduling_policies(self):
        raise KeyError("planted")


@given(
    st.lists(
        st.tuples(NAMES, st.sets(NAMES, min_size=1).map(sorted) | st.sampled_from(sorted(BAD))),
        unique_by=lambda plugin: plugin[0],
    )
)
def test_whatever_is_installed_a_good_plugin_has_the_name_of_its_entry_point(plugins):
    points = [
        entry_point(name, BAD[kind])
        if isinstance(kind, str)
        else entry_point(name, lambda kind=kind: offering([PolicySpec(n, Lifo) for n in kind]))
        for name, kind in plugins
    ]
    logging.disable(logging.WARNING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installed_module, "entry_points", lambda group: points)
        patch.delenv("AIOSERVE_PLUGINS", raising=False)
        registry = PluginRegistry()
    logging.disable(logging.NOTSET)
    good = [(name, kind) for name, kind in plugins if not isinstance(kind, str)]
    had = {name: offer.origin.plugin for name, offer in registry.policies.items()}
    for name in had:
        assert isinstance(registry.policy(name), Lifo)
    # A plugin is there whole or not at all, and if not, it is broken.
    there = [(n, offered) for n, offered in good if all(had.get(o) == n for o in offered)]
    assert sorted(had) == sorted(o for _, offered in there for o in offered)
    assert len(there) + len(registry.broken) == len(plugins)
    # A name is its own entry point's, and else somebody's.
    for name, offered in good:
        if name in offered:
            assert had.get(name, name) == name
        if offered == [name]:
            assert had[name] == name


def test_nobody_takes_the_name_of_a_bundled_policy(installed):
    fcfs = [PolicySpec("fcfs", Lifo)]
    installed += [
        entry_point("a", lambda: offering([PolicySpec("a", Lifo), PolicySpec("fcfs", Lifo)])),
        entry_point("fcfs", lambda: offering(fcfs)),
        entry_point("fcfs", lambda: offering(fcfs), "aioserve", "0.1.0"),
    ]
    registry = PluginRegistry()
    assert str(registry.policies["fcfs"].origin) == "aioserve 0.1.0"
    assert [plugin.name for plugin in registry.broken] == ["a", "fcfs"]
    assert "offered by plugin fcfs (aioserve 0.1.0) too" in str(registry.broken[0])


@pytest.mark.asyncio
async def test_a_policy_that_was_chosen_by_name_is_named_with_its_distribution(installed, caplog):
    class Picky(SchedulingPolicy):
        def __init__(self, *, limit: int = 9) -> None:
            self.limit = limit

        def admit(self, request, view):
            return Verdict.NEVER if request.prompt_tokens > self.limit else Verdict.NOW

        def step_finished(self, step, tokens):
            raise ValueError("planted")

    installed.append(entry_point("picky", lambda: offering([PolicySpec("picky", Picky)])))
    async with Engine(FakeModel(), policy="picky:limit=2") as engine:
        await engine.generate([1], SamplingParams(max_tokens=1))
        with pytest.raises(
            RequestRejectedError, match=r"the policy picky \(some-dist 1.2\) refused request"
        ):
            await engine.generate([1, 2, 3])
        assert engine.dump()["policy"] == "picky (some-dist 1.2)"
    assert "scheduling policy picky (some-dist 1.2): step_finished raised" in caplog.text
