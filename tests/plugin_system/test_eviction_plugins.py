"""Eviction strategies by name: whole engines under good ones and bad ones."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from aioserve import (
    ConfigError,
    Engine,
    EvictionSpec,
    PageUse,
    PluginError,
    SamplingParams,
    SchedulingPolicy,
    hookimpl,
)
from aioserve.plugins import PluginRegistry
from aioserve.testing import FakeModel, check_invariants, expected_tokens, run_simulated
from tests.plugin_system.planted import entry_point


class MostRecent:
    """`after` uses it fails."""

    def __init__(self, *, after: int | None = None, fail=None) -> None:
        self.left = after
        self.fail = fail
        self.asked = 0

    def key(self, use: PageUse) -> float:
        self.asked += 1
        if self.left is not None and self.asked > self.left:
            return self.fail() if self.fail is not None else 1 // 0
        return -use.last_used_tick


class Waiting:
    async def key(self, use: PageUse) -> float:
        return 0.0


class EvictionPlugin:
    def __init__(self, factory: Any = MostRecent, name: str = "mru") -> None:
        self.spec = EvictionSpec(name, factory, "most recently used first")

    @hookimpl
    def aioserve_eviction_strategies(self):
        return [self.spec]


def serve(eviction: str, plugins: list, seed: int = 0) -> int:
    """Prompts that come again and need more pages than there are: tokens found in the cache."""
    cached = 0

    async def main() -> None:
        nonlocal cached
        model = FakeModel(num_pages=24, max_model_len=64)
        async with Engine(
            model,
            policy=SchedulingPolicy(),
            plugins=plugins,
            eviction=eviction,
            page_size=4,
            num_host_pages=4 * (seed % 2),
        ) as engine:
            for turn in range(40):
                prompt = [turn % 9] * 12 + [turn] * 4
                answer = await engine.generate(prompt, SamplingParams(max_tokens=6, seed=turn))
                assert list(answer.token_ids) == expected_tokens(prompt, 6, seed=turn)
                check_invariants(engine)
            cached = engine.stats().tokens_cached_total

    run_simulated(main, seed=seed)
    return cached


def test_an_engine_evicts_in_the_order_of_a_plugin():
    made = []

    def factory():
        made.append(MostRecent())
        return made[-1]

    recent = serve("mru", [EvictionPlugin(factory)])
    assert recent > serve("lru", [])
    assert made[0].asked > 20


def test_an_engine_is_collected_although_its_strategy_refers_to_it():
    async def main() -> weakref.ref[Engine]:
        made: list[Any] = []
        plugin = EvictionPlugin(lambda: made.append(MostRecent()) or made[-1])
        options: Any = {"policy": SchedulingPolicy(), "plugins": [plugin], "page_size": 4}
        async with Engine(FakeModel(), eviction="mru", **options) as engine:
            made[0].engine = engine
            await engine.generate([1] * 12, SamplingParams(max_tokens=2))
            assert made[0].asked
            return weakref.ref(engine)

    engine = run_simulated(main)
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "fail",
    [None, lambda: float("nan"), lambda: "first", lambda: None, lambda: [].pop(), lambda: exit(3)],
)
def test_a_strategy_that_fails_costs_no_token(fail, seed, caplog):
    plugin = EvictionPlugin(lambda: MostRecent(after=7 * seed, fail=fail))
    serve("mru", [plugin], seed=seed)
    (record,) = caplog.records
    assert "eviction strategy mru (given to the engine): key" in record.getMessage()
    assert "least recently used decides from now on" in record.getMessage()


@pytest.mark.parametrize(
    ("eviction", "plugins", "error", "message"),
    [
        (
            "mru",
            [],
            ConfigError,
            r"eviction: no strategy 'mru'; did you mean lru\? There are: fifo, lfu, lru, slru",
        ),
        ("mrv", [EvictionPlugin()], ConfigError, "There are: fifo, lfu, lru, mru, slru"),
        ("lru:size=1", [], ConfigError, "eviction strategy 'lru' has no options"),
        ("mru:after=x", [EvictionPlugin()], ConfigError, "must be a whole number or none, got 'x'"),
        ("mru:size=1", [EvictionPlugin()], ConfigError, r"has no option 'size'; there are: after"),
        ("mru", [EvictionPlugin(lambda: 1 // 0)], PluginError, "can't be made: ZeroDivision"),
        ("mru", [EvictionPlugin(dict)], PluginError, "its factory made {}, no EvictionStrategy"),
        ("mru", [EvictionPlugin(Waiting)], PluginError, "Waiting.key must be a plain function"),
        ("lru", [EvictionPlugin(name="lru")], PluginError, "'lru' is built in"),
    ],
)
@pytest.mark.asyncio
async def test_a_strategy_that_there_is_not_is_refused_with_those_there_are(
    eviction, plugins, error, message
):
    with pytest.raises(error, match=message):
        async with Engine(
            FakeModel(), policy=SchedulingPolicy(), eviction=eviction, plugins=plugins
        ):
            pass


def test_options_are_given_with_the_name():
    registry = PluginRegistry([EvictionPlugin()])
    guarded = registry.eviction("mru:after=3")
    assert not isinstance(guarded, str)
    assert guarded.strategy.left == 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_broken_plugin_of_that_name_says_why(installed):
    installed.append(entry_point("mru", lambda: 1 // 0))
    with pytest.raises(PluginError, match=r"'mru' can't be loaded: mru \(some-dist 1.2\): ZeroDiv"):
        PluginRegistry().eviction("mru")
