"""Range of `aioserve calibrate`, and other work on the machine.

Measured steps cover all steps that an engine may run. Other work meanwhile is noticed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.cli._busy import Busy, MachineWatch
from aioserve.cli._calibration import MOST_PROMPTS, STEPS_BETWEEN, Grid, measure_grid
from aioserve.engine.engine import Engine
from aioserve.errors import ConfigError
from aioserve.simulation.cost import StepLoad
from aioserve.steps.plan import StepPlan
from aioserve.testing import FakeModel, run_simulated
from tests.waits import block_until


@given(
    st.integers(16, 8192),
    st.integers(1, 512),
    st.integers(33, 200_000),
    st.integers(1, 1 << 20),
    st.booleans(),
)
def test_a_grid_covers_a_step_from_one_end_to_the_other(
    tokens: int, seqs: int, length: int, most_context: int, graphs: bool
) -> None:
    try:
        grid = Grid.up_to(tokens, seqs, length, graphs=graphs, most_context_tokens=most_context)
    except ConfigError:
        return
    assert grid.prefill_tokens[0] == grid.decode_batch[0] == 0
    assert grid.decode_batch[-1] == seqs
    reachable = MOST_PROMPTS * (length - STEPS_BETWEEN - 1)
    assert grid.prefill_tokens[-1] == min(tokens, reachable)
    assert grid.longest_prompt + STEPS_BETWEEN < length
    for batch, context in grid.rounds:
        assert batch in grid.decode_batch
        assert 0 <= context < length
        assert batch * context <= max(most_context, batch)
    assert {batch for batch, _ in grid.rounds} == set(grid.decode_batch)
    # The smallest and the largest batch reach as far as they may.
    for batch in (1, seqs):
        longest = max(context for b, context in grid.rounds if b == batch)
        assert longest >= min(length // 2, most_context // batch)


def test_steps_of_the_whole_range_are_measured() -> None:
    """Measure up to all tokens of a step, all sequences, and the whole context. No prompt is that
    long."""
    loads: list[StepLoad] = []

    def seconds(plan: StepPlan) -> float:
        loads.append(StepLoad.of(plan))
        return 0.01

    tokens, seqs, length = 512, 4, 200

    async def measure() -> Grid:
        model = FakeModel(num_pages=400, max_model_len=length, step_seconds=seconds)
        options: dict[str, Any] = {
            "max_num_seqs": seqs + MOST_PROMPTS,
            "max_num_batched_tokens": tokens,
        }
        async with Engine(model, **options) as engine:
            grid = Grid.up_to(tokens, seqs, length)
            await measure_grid(engine, grid, 0, lambda: None)
            return grid

    grid = run_simulated(measure)
    assert grid.prefill_tokens[-1] == tokens
    assert max(load.prefill_tokens for load in loads) == tokens
    assert {load.decode_batch for load in loads} >= set(range(seqs + 1))
    assert max(load.context_tokens for load in loads) > 0.9 * seqs * length
    mixed = [load for load in loads if load.decode_batch >= seqs]
    # All sequences decode, and prompts get the rest of the step.
    assert max(load.prefill_tokens for load in mixed) == tokens - seqs
    for size in grid.prefill_tokens[1:-1]:
        assert {load.decode_batch for load in loads if load.prefill_tokens == size} >= {0, 1, seqs}


IDLE = Busy(4, 0.1, 0.02, 0.0, (0.010, 0.011))


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        ({"load": 2.1}, "load 2.1 on 4 processors before"),
        ({"others": 0.25}, "other programs took 25% of the processors"),
        ({"stolen": 0.04}, "4% of the processors' time was stolen by the hypervisor"),
        ({"probe_seconds": (0.01, 0.02, 0.01)}, "the same work took 10.0 to 20.0 ms"),
    ],
)
def test_each_sign_of_a_busy_machine_is_told_by_name_and_number(
    changed: dict[str, object], finding: str
) -> None:
    assert IDLE.findings == []
    assert IDLE._replace(load=None, others=None, stolen=None).findings == []
    assert IDLE._replace(**changed).findings == [finding]


def test_what_others_take_of_the_processors_is_seen_and_what_we_take_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, now = tmp_path / "stat", [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("aioserve.cli._busy.time", clock)

    def write(user: int, steal: int) -> None:
        # Processors that don't exist count for nobody.
        lines = [f"cpu{n} {user} 0 0 1000 0 0 0 {steal} 0 0" for n in (*range(64), 5000)]
        stat.write_text("\n".join(["cpu  1 1 1 1 1 1 1 1 1 1", *lines, "intr 1"]))

    write(0, 0)
    watch = MachineWatch(stat)
    now[0] = 1000.0
    # Ticks of a hundredth of a second: half of each processor is used, and a tenth stolen.
    write(50_000, 10_000)
    busy = watch.busy()
    assert busy.stolen == pytest.approx(0.1)
    assert busy.others == pytest.approx(0.5, abs=0.01)  # and hardly any of it is ours
    missing = MachineWatch(tmp_path / "no-such-file").busy()
    assert (missing.others, missing.stolen) == (None, None)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat here")
def test_another_program_on_all_processors_is_noticed() -> None:
    watch = MachineWatch()
    burn = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(burn) for _ in range(watch.num_processors)]
    try:
        # They must still run: ended programs were our children, and count as ours.
        block_until(lambda: (watch.busy().others or 0.0) > 0.1)
    finally:
        for program in programs:
            program.kill()
            program.wait()
