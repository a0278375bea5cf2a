"""Clocks that go wrong do so as they say. How many draft tokens an engine makes follows from
none."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import pytest

from aioserve import Engine, SamplingParams, Speculation
from aioserve.testing import FakeModel, run_simulated
from tests.clocks import CLOCKS, CREEP, JUMP_SECONDS, NAMES, RATE, distort
from tests.doubles.drafters import FakeModelDrafters, right_up_to

BEGAN_NS = 7_000_000_123


def clocks_at(passed_ns: list[int]) -> SimpleNamespace:
    """Clocks that began at `BEGAN_NS`, and show what has passed since."""
    names = {f"{name}_ns": lambda: BEGAN_NS + passed_ns[0] for name in NAMES}
    return SimpleNamespace(**names, **{name: lambda: 0.0 for name in NAMES})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("kind", "shown_seconds"),
    [
        ("fast", [0.0, 0.1 * RATE, 0.5 * RATE, 1.0 * RATE]),
        ("slow", [0.0, 0.1 / RATE, 0.5 / RATE, 1.0 / RATE]),
        ("jumps", [0.0, 0.1 / CREEP, JUMP_SECONDS + 0.1 / CREEP, 2 * JUMP_SECONDS + 0.2 / CREEP]),
    ],
)
def test_a_clock_goes_as_it_says(kind: str, shown_seconds: list[float], name: str) -> None:
    passed_ns = [0]
    clocks = clocks_at(passed_ns)
    distort(kind, clocks)
    for seconds, shown in zip([0.0, 0.1, 0.5, 1.0], shown_seconds, strict=True):
        passed_ns[0] = int(seconds * 1e9)
        assert getattr(clocks, f"{name}_ns")() - BEGAN_NS == pytest.approx(shown * 1e9)
        assert getattr(clocks, name)() == pytest.approx(BEGAN_NS / 1e9 + shown)


@pytest.mark.parametrize("kind", CLOCKS)
def test_no_clock_goes_back(kind: str) -> None:
    shown = [CLOCKS[kind](passed_ns) for passed_ns in range(0, 3_000_000_000, 9_999_991)]
    assert all(before <= after for before, after in pairwise(shown))
    assert shown[0] == 0 < shown[-1]


async def measures_steps() -> bool:
    """Return true if an engine that speculates knows afterwards what its steps have cost."""
    engine = Engine(
        FakeModel(step_seconds=lambda plan: 0.001),
        speculation=Speculation(drafter="scripted", max_tokens=4),
        plugins=[FakeModelDrafters(right_up_to(9), lambda prompt: 0)],
    )
    async with engine:
        done = await engine.generate([7, 1, 8], SamplingParams(max_tokens=20, seed=0))
        assert done.usage.accepted_draft_tokens > 0
        lengths = engine._lifecycle.scheduler.state.speculation.lengths
        return bool(lengths.plain.medians or lengths.verifying.medians)


def test_steps_are_measured_by_simulated_clocks_alone() -> None:
    assert not asyncio.run(measures_steps())
    assert run_simulated(measures_steps)
