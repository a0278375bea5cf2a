"""`benchmarks/gpu.py` without a GPU: everything but the device is as on one.

Whole runs have processes of their own. An engine whose runner is a GPU's is here on the host.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from aioserve.execution.gpu.timing import StepTime
from aioserve.execution.timed_runner import TimedStep
from aioserve.steps.plan import StepPlan
from tests.examples.conftest import BENCHMARKS, Script
from tests.execution.gpu.plans import decode, item, plan
from tests.tiers import clock_counts

TINY = ("--device", "cpu", "--shape", "tiny", "--dtype", "float32", "--repeats", "1")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the benchmark by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name}.py").is_file():
            del sys.modules[name]


Measure = Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]


@pytest.fixture
def run(script: Script, tmp_path: Path) -> Measure:
    """Runs the benchmark with options: how it ended, and what it wrote."""

    def run(*options: object) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        path = tmp_path / "gpu.json"
        done = script("gpu.py", "--json", path, *TINY, *options)
        return done, json.loads(path.read_text())

    return run


def check_run(found: dict[str, Any], *, requests: int) -> None:
    assert found["answers"]["requests"] == requests
    output = found["answers"]["output_tokens"]
    rate = found["throughput"]["output_tokens_per_second"]
    assert rate * found["seconds"] == pytest.approx(output)
    device = found["device"]
    assert device["clock"] == "event loop"
    assert device["steps"] > 0
    assert 0 <= device["idle_share"] < 1
    assert 0 < device["busy_seconds"] <= found["seconds"]
    assert found["host"]["share_of_step"] > 0
    floor = found["floor"]
    assert floor["share"] == pytest.approx(floor["seconds"] / found["seconds"])
    kinds = [floor[kind] for kind in ("decodes", "with_prompts")]
    assert sum(kind["steps"] for kind in kinds) == device["steps"]
    assert sum(kind["floor_seconds"] for kind in kinds) == pytest.approx(floor["seconds"])


@pytest.mark.more
@pytest.mark.clock
def test_parts_are_measured_and_a_peer_that_is_not_there_is_named(run: Measure) -> None:
    parts = ("card", "offline", "single", "prefill", "prefix", "single-eager", "vllm", "online")
    done, written = run("--only", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert written["ok"]
    assert list(written["parts"]) == list(parts)
    results = {name: entry.get("result") for name, entry in written["parts"].items()}
    assert results["card"]["limits"]["bytes_per_second"] > (1e8 if clock_counts() else 0.0)
    assert results["card"]["machine"]["torch"]["version"]
    for part, requests in (("offline", 6), ("single", 1), ("prefill", 1), ("single-eager", 1)):
        check_run(results[part]["best"], requests=requests)
    reached = results["offline"]["best"]["throughput"]["requests_per_second"]
    loads = [found["requests_per_second"] / reached for found in results["online"]["runs"].values()]
    assert loads == pytest.approx([0.5, 0.8])
    alike, distinct = (results["prefix"]["runs"][run] for run in ("alike", "distinct"))
    # All but one of four prompts find what they share, 32 tokens.
    assert (alike["prompt_tokens_cached"], distinct["prompt_tokens_cached"]) == (96, 0)
    assert written["parts"]["vllm"] == {"status": "missing", "error": "it is not installed"}
    assert "\nvllm: missing: it is not installed\n" in done.stdout
    assert "offline: aioserve " in done.stdout


@pytest.mark.more
def test_a_part_that_fails_is_told_and_the_others_are_measured(run: Measure) -> None:
    options = ("--engine-options", '{"page_size": 3}', "--only", "card", "offline", "single")
    done, written = run(*options)
    assert done.returncode == 1
    assert not written["ok"]
    statuses = {name: entry["status"] for name, entry in written["parts"].items()}
    assert statuses == {"card": "ok", "offline": "failed", "single": "failed"}
    error = written["parts"]["offline"]["error"]
    assert error.startswith("ConfigError: page_size must be one of 1, 2, 4")
    assert f"offline: failed: {error}" in done.stdout


def test_what_there_is_no_time_for_is_cut_off(run: Measure) -> None:
    done, written = run("--minutes", 0.001, "--only", "offline", "single")
    assert done.returncode == 0
    for part in ("offline", "single"):
        assert written["parts"][part] == {"status": "cut off", "error": "0.001 minutes were over"}
        assert f"{part}: cut off: 0.001 minutes were over" in done.stdout


def test_a_part_that_does_not_end_has_failed(run: Measure) -> None:
    done, written = run("--part-minutes", 0.001, "--only", "offline")
    assert done.returncode == 1
    assert written["parts"]["offline"]["status"] == "failed"
    assert written["parts"]["offline"]["error"] == "it took longer than 0.06 seconds"


def test_a_process_that_dies_is_told_with_what_it_said(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = module("gpu")
    (tmp_path / "gpu_parts.py").write_text(
        "import os\nprint('an illegal access', flush=True)\nos.abort()\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "gpu.py"))
    arguments = ["gpu.py", "--json", str(tmp_path / "gpu.json"), *TINY, "--only", "card", "online"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as leaving:
        gpu.main()
    assert leaving.value.code == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    for part in ("card", "online"):
        assert parts[part]["status"] == "failed"
        assert parts[part]["error"].startswith("its process ended with -6: an illegal access")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("option", ["--minutes", "--part-minutes", "--repeats", "--rate"])
def test_numbers_that_make_no_sense_are_refused(
    script: Script, tmp_path: Path, option: str
) -> None:
    done = script("gpu.py", "--json", tmp_path / "gpu.json", option, "0")
    assert done.returncode == 2
    assert f"{option} must be more than 0" in done.stderr


@pytest.mark.more
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_device_of_a_gpu_is_timed_by_its_own_clock(tmp_path: Path, module: Any) -> None:
    """The real runner and kernels, with the host in the place of the device."""
    from tests.execution.gpu.assembled import on_host

    parts, workloads = module("gpu_parts"), module("gpu_workloads")
    scale = workloads.SCALES["tiny"]
    bench = parts.Bench(
        device="auto",
        dtype="float32",
        scale=scale,
        folder=tmp_path,
        repeats=1,
        rate=None,
        engine_options={"graph_sizes": (1, 2), "max_num_seqs": 2, "num_pages": 32},
        source_of=on_host,
    )

    async def measured() -> dict[str, Any]:
        try:
            return await parts.single(bench)
        finally:
            await bench.aclose()

    found = asyncio.run(measured())["best"]
    device = found["device"]
    assert device["clock"] == "device"
    # A prompt of 4 tokens, and 5 more answers.
    assert (device["steps"], device["graph_steps"]) == (scale.single_output, 5)
    assert device["graph_milliseconds"]["p50"] > 0
    assert 0 < device["busy_seconds"] < found["seconds"]
    assert found["floor"] is None


VLLM = """
class SamplingParams:
    def __init__(self, *, temperature, ignore_eos, max_tokens):
        assert temperature == 0.0 and ignore_eos
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, *, model, dtype, max_model_len):
        self.max_model_len = max_model_len

    def generate(self, prompts, params, *, use_tqdm):
        for prompt, one in zip(prompts, params, strict=True):
            assert len(prompt["prompt_token_ids"]) + one.max_tokens <= self.max_model_len
        return [output(one.max_tokens {change}) for one in params]

def output(count):
    from types import SimpleNamespace as Names
    return Names(outputs=[Names(token_ids=[0] * count)])
"""
SGLANG = """
class Engine:
    def __init__(self, *, model_path, dtype, context_length, log_level):
        self.context_length = context_length

    def generate(self, *, input_ids, sampling_params):
        answers = []
        for prompt, one in zip(input_ids, sampling_params, strict=True):
            assert one["ignore_eos"] and one["temperature"] == 0.0
            assert len(prompt) + one["max_new_tokens"] <= self.context_length
            answers.append({"meta_info": {"completion_tokens": one["max_new_tokens"] {change}}})
        return answers

    def shutdown(self):
        pass
"""


@pytest.fixture(params=[("vllm", VLLM), ("sglang", SGLANG)], ids=["vllm", "sglang"])
def peer(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> Any:
    """Installs an engine of that interface which answers at once, and measures it."""
    name, source = request.param

    def measure(change: str = "") -> dict[str, Any]:
        (tmp_path / f"{name}.py").write_text(source.replace("{change}", change))
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        bench = module("gpu_parts").Bench(
            device="cpu",
            dtype="float32",
            scale=module("gpu_workloads").SCALES["tiny"],
            folder=tmp_path,
            repeats=2,
            rate=None,
            engine_options={},
        )
        return module("gpu_parts").peer(bench, name)

    return measure


def test_a_peer_gets_the_same_requests_as_aioserve(peer: Any, module: Any) -> None:
    found = peer()
    scale = module("gpu_workloads").SCALES["tiny"]
    assert found["version"] == "1.2"
    for name, requests_of in (("offline", scale.offline), ("single", scale.single)):
        counts = [sum(each.output_tokens for each in requests_of(300, seed)) for seed in (0, 1)]
        measured = found["workloads"][name]
        assert measured["output_tokens"] == counts
        rates = [n / took for n, took in zip(counts, measured["seconds"], strict=True)]
        assert measured["output_tokens_per_second"] == max(rates)


def test_a_peer_that_answers_less_is_no_peer(peer: Any) -> None:
    with pytest.raises(RuntimeError, match=r"answers have \[.*\] tokens instead of \["):
        peer("- 1")


@pytest.mark.slow
def test_transformers_does_the_same_work(run: Measure) -> None:
    done, written = run("--only", "offline", "transformers")
    assert done.returncode == 0, done.stdout + done.stderr
    found = written["parts"]["transformers"]["result"]
    own = written["parts"]["offline"]["result"]["best"]
    assert found["workloads"]["offline"]["output_tokens"] == [own["answers"]["output_tokens"]]
    assert "transformers" in done.stdout.rpartition("offline: aioserve")[2]


def test_the_best_of_reads_and_products_is_a_gpus_limit(module: Any) -> None:
    import torch

    limits = module("machine_limits")
    seconds = iter([0.5, 0.125, 2.0, 0.25])
    done: list[Any] = []

    def best_seconds(work: Any) -> float:
        done.append(work())
        return next(seconds)

    found = limits.gpu_limits(
        torch.float32,
        torch.device("cpu"),
        best_seconds,
        read_mib=1,
        products=((4, 8, 16), (2, 4, 8)),
        memory_bytes=1 << 30,
    )
    assert len(done) == 4
    assert float(done[1]) == (1 << 20) / 4  # the sum over all that is read
    assert (found.fastest_read, found.bytes_per_second) == ("sum", (1 << 20) / 0.125)
    assert found.fastest_product == "torch, 4 x 8 x 16"
    assert found.flops_per_second == 2 * 4 * 8 * 16 / 2.0
    assert found.hardware().memory_bytes == 1 << 30


def test_steps_are_counted_with_what_they_take_and_what_is_between_them(module: Any) -> None:
    engine = module("gpu_engine")
    prompt, answer = plan(0, item(1, 0, [5, 6, 7]), started=(1,)), plan(1, decode(1, 3))
    steps = [TimedStep(prompt, 10.0, 11.0), TimedStep(answer, 13.0, 13.5)]
    use = engine.device_use(steps, None)
    assert (use["steps"], use["busy_seconds"], use["idle_seconds"]) == (2, 1.5, 2.0)
    assert use["idle_share"] == 2.0 / 3.5
    timed = [StepTime(0, 0.25, None, None), StepTime(1, 0.25, 0.5, 2)]
    use = engine.device_use(steps, timed)
    assert (use["busy_seconds"], use["idle_share"], use["graph_steps"]) == (0.5, 0.5, 1)

    class Cost:
        def step_seconds(self, plan: StepPlan) -> float:
            return 0.5 if plan is prompt else 0.125

    assert engine.floor(steps, Cost(), 5.0) == {
        "seconds": 0.625,
        "share": 0.125,
        "decodes": {"steps": 1, "floor_seconds": 0.125, "seconds": 0.5},
        "with_prompts": {"steps": 1, "floor_seconds": 0.5, "seconds": 1.0},
    }
