"""`aioserve calibrate` with an engine on a fake GPU, which works in real time.

Its graphs take 2 ms. Each of the three kernels of an eager step takes 4 ms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioserve.cli import _calibration, calibrate, doctor
from aioserve.config import EngineConfig
from aioserve.execution import loading
from aioserve.execution.cuda_driver import Card, Driver
from aioserve.execution.gpu.graphs import default_graph_sizes
from aioserve.execution.gpu.runner import CudaRunner
from aioserve.execution.gpu.waiting import Threads
from aioserve.execution.gpu.worker import CudaWorker
from aioserve.execution.host import Host
from aioserve.execution.runner import LoadedModel, ModelLimits
from aioserve.request import SamplingParams
from aioserve.testing.fake_device import VOCAB_SIZE
from tests.cli.command import Run
from tests.doubles.fake_gpu import FakeGpu
from tests.doubles.fake_gpu_model import FakeStepModel
from tests.execution.gpu.plans import threaded_gpu
from tests.tiers import clock_counts

MAX_MODEL_LEN, NUM_PAGES = 160, 64
SECONDS = {"a graph": 0.002, "tokens": 0.004, "keys and values": 0.004, "samples": 0.004}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Device of every model that is loaded."""

    async def load(model: str, config: EngineConfig, *, num_slots: int, **listeners: Any):
        assert config.device == "cuda"
        sizes = default_graph_sizes(config.max_num_seqs)
        steps = FakeStepModel(
            gpu,
            num_pages=NUM_PAGES,
            page_size=config.page_size,
            num_slots=num_slots,
            max_tokens=config.max_num_batched_tokens,
            max_rows=max(num_slots, *sizes),
            max_model_len=MAX_MODEL_LEN,
        )
        host = Host(config.page_size, num_slots, steps.num_groups)
        worker = CudaWorker(gpu, steps, sizes)
        runner = CudaRunner(host, worker, name=model, host_side=Threads())
        await runner.capture_graphs(lambda done, total: None)
        return LoadedModel(
            name=model,
            runner=runner,
            limits=ModelLimits(VOCAB_SIZE, MAX_MODEL_LEN, NUM_PAGES, frozenset()),
            defaults=SamplingParams(),
            tokenizer=None,
            chat_template=None,
            description={"device": "cuda:1", "dtype": "float16"},
        )

    cards = tuple(Card(name, 1 << 30, (9, 0)) for name in ("another card", "a fake card"))
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(doctor, "find_driver", lambda: Driver((13, 0), cards))
    with threaded_gpu(op_seconds=lambda name: SECONDS.get(name, 0.0)) as gpu:
        yield gpu


@pytest.mark.more
@pytest.mark.clock
def test_a_table_of_a_gpu_has_a_leap_where_steps_are_no_graphs_any_more(
    aioserve_here: Run, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = _calibration.Recorder.take

    def noted(recorder: _calibration.Recorder) -> Any:
        samples = take(recorder)
        taken.append(len(samples))
        return samples

    async def lone(*given: Any) -> Any:
        before = len(taken)
        found = await measure(*given)
        del taken[before:]
        return found

    measure = calibrate.measure_host
    monkeypatch.setattr(calibrate, "measure_host", lone)
    monkeypatch.setattr(_calibration.Recorder, "take", noted)
    path = tmp_path / "table.json"
    sizes = ("--max-num-seqs", 2, "--max-num-batched-tokens", 64)
    done = aioserve_here("calibrate", "fake", "--device", "cuda", "-o", path, *sizes)
    # If other work slows the machine, the table is written, and is as poor as it says.
    assert done.returncode == (1 if "far off" in done.stderr else 0), done.stderr
    assert "steps of fake, float16, a fake card\n" in done.stdout
    table = json.loads(path.read_text())
    assert table["prefill_tokens"] == [0, 2, 16, 32, 64]
    assert table["decode_batch"] == [0, 1, 2]
    graphs, eager = table["seconds"][0], table["seconds"][1]
    if clock_counts():
        assert 0.002 <= graphs[1] < eager[0]
        assert eager[0] >= 0.012 / 2  # half: the sum of all steps decides the level of a table
        assert eager[0] > 2 * graphs[1]
    measured = table["measured"]
    assert (measured["device"], measured["card"]) == ("cuda:1", "a fake card")
    # The first request and a pass that compiles. Then, twice: a pass that counts, lone requests,
    # and a pass that is held out.
    _, compiling, *passes = taken
    assert compiling > 0
    assert measured["steps"] == passes[0] + passes[3]
    assert measured["held_out_steps"] == passes[2] + passes[5]
    assert gpu.num_replays > 0
    assert not gpu.violations

    simulated = aioserve_here(
        "simulate", "--synthetic", "bursts", "--num-requests", 5, "--cost-table", path
    )
    assert simulated.returncode == 0, simulated.stderr


def test_a_gpu_that_is_not_there_is_named(aioserve_here: Run, tmp_path: Path) -> None:
    done = aioserve_here("calibrate", "--device", "cuda:97", "-o", tmp_path / "table.json")
    assert done.returncode == 2
    assert "device='cuda:97' can't be used: " in done.stderr
    assert not (tmp_path / "table.json").exists()
