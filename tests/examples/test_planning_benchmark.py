"""The benchmark of planning: its situations are what it says they are, and so are its ratios."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import msgspec
import pytest

from aioserve import SchedulingPolicy
from aioserve.plugins import PluginRegistry
from tests.examples.test_benchmarks import BENCHMARKS

RUNNING, WAITING, DEEP = 8, 12, 40


@pytest.fixture(scope="module")
def planning() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("planning_benchmark", BENCHMARKS / "planning.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planning_benchmark"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["planning_benchmark"]


@pytest.mark.parametrize(
    ("situation", "computes_prompts", "goes_on", "reuses", "preempts"),
    [
        ("no seat", False, False, False, False),
        ("no pages", False, False, False, False),
        ("deep", False, False, False, False),
        ("resting", False, False, False, False),
        ("prompt", True, False, False, False),
        ("turnover", True, True, False, False),
        ("alike", True, True, True, False),
        ("short", True, True, True, True),
    ],
)
def test_each_situation_is_what_it_is_said_to_be(
    planning: ModuleType,
    situation: str,
    computes_prompts: bool,
    goes_on: bool,
    reuses: bool,
    preempts: bool,
) -> None:
    sizes = planning.Sizes(RUNNING, WAITING, DEEP, 2, planning.ANSWER_TOKENS)
    load = planning.SITUATIONS[situation](SchedulingPolicy(), sizes)
    scheduler, state = load.scheduler, load.scheduler.state
    live, before = set(state.sequences), msgspec.structs.replace(scheduler.counters)
    for _ in range(sizes.rounds * sizes.steps):
        load.step()
        assert scheduler.num_waiting >= (DEEP if situation == "deep" else WAITING)
        has_slots = len(state.running) < state.max_num_seqs and state.slots.num_free > 0
        assert goes_on or has_slots == (situation in ("no pages", "deep"))
    counters = scheduler.counters
    assert (counters.tokens_prefilled > before.tokens_prefilled) == computes_prompts
    assert (set(state.sequences) != live) == goes_on
    assert (counters.tokens_cached > before.tokens_cached) == reuses
    assert (counters.preemptions > before.preemptions) == preempts
    assert bool(counters.drafted) == (situation == "resting")
    probes = sum(counters.drafted[:1]) - sum(before.drafted[:1])
    assert probes <= sizes.rounds * sizes.steps * RUNNING // 10


def test_it_tries_each_installed_policy_and_each_method_and_its_ratios_are_to_the_first_row(
    planning: ModuleType, tmp_path
) -> None:
    result = tmp_path / "planning.json"
    sizes = {
        "running": RUNNING,
        "waiting": WAITING,
        "deep": DEEP,
        "rounds": 1,
        "steps": 2,
        "json": result,
    }
    options = [f"--{name}={value}" for name, value in sizes.items()]
    subprocess.run([sys.executable, BENCHMARKS / "planning.py", *options], check=True, timeout=200)
    tables = json.loads(result.read_text())
    assert list(tables) == list(planning.SITUATIONS)
    methods = {f"own {name}" for name, _ in inspect.getmembers(SchedulingPolicy, callable)}
    for rows in tables.values():
        named = {row["policy"] for row in rows}
        assert named >= set(PluginRegistry().policies)
        assert {name for name in methods - named if "__" not in name} == {
            f"own {planning.NEVER_ASKED}"
        }
        first = rows[0]
        assert first["policy"] == planning.BASELINE
        for row in rows:
            for what in ("plan", "commit"):
                assert row[f"{what}_us"] > 0
                ratio = row[f"{what}_us"] / first[f"{what}_us"]
                assert row[f"{what}_ratio"] == pytest.approx(ratio)
