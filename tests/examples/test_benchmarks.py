"""Benchmarks run, and their arithmetic is what their docstrings say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.testing.random_model import write_random_model
from tests.examples.conftest import Script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@pytest.mark.slow
def test_both_engines_do_the_same_work(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "tiny", TINY, dtype="float32")
    result = tmp_path / "result.json"
    sizes = ("--output-tokens", "4", "--concurrency", "3", "--prefill-tokens", "24")
    subprocess.run(
        [
            *(
                sys.executable,
                BENCHMARKS / "against_transformers.py",
                "--models",
                model,
                "--dtypes",
                "float32",
                *sizes,
            ),
            *("--repeats", "1", "--json", result),
        ],
        check=True,
        timeout=170,
    )
    rows = json.loads(result.read_text())
    counted = {"single": 4, "concurrent": 12, "prefill": 24}
    assert [row["name"] for row in rows] == list(counted)
    for row in rows:
        for engine, rate in row["tokens_per_second"].items():
            assert rate * row["seconds"][engine][0] == pytest.approx(counted[row["name"]])
        rates = row["tokens_per_second"]
        assert row["ratio"] == pytest.approx(rates["aioserve"] / rates["transformers"])


@pytest.mark.parametrize("recorded", [True, False], ids=["a trace", "what there is"])
def test_the_kv_benchmark_serves_what_its_baseline_does(
    script: Script, tmp_path: Path, recorded: bool
) -> None:
    result = tmp_path / "result.json"
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": ids}
        for ids in ([0, 1], [2, 3], [0, 1], [0, 4])
    ]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sizes = {"tokens": 64, "evict-pages": 10, "running": 4, "waiting": 8, "repeats": 5}
    more = {"requests": 30, "pool-tokens": 65_536, "live": 2, "json": result}
    more |= {"trace": trace} if recorded else {}
    options = [f"--{name}={value}" for name, value in (sizes | more).items()]
    done = script("kv.py", *options)
    assert done.returncode == 0, done.stderr
    written = json.loads(result.read_text())
    rows = {row["name"]: row for row in written["rows"]}
    plan = "plan, 4 running, 8 waiting"
    assert {"match 64 tokens", "evict 10 pages, each a leaf", plan} < rows.keys()
    for row in rows.values():
        assert 0 < row["median_us"] <= row["p99_us"]
        if not row["name"].startswith(("plan", "commit")):
            assert row["ratio"] == pytest.approx(row["baseline_median_us"] / row["median_us"])
    if recorded:
        assert written["replay"]["requests"] == 4
        assert written["replay"]["hit_share"] == 3 / 8


def test_plans_are_measured(script: Script) -> None:
    done = script("step_plans.py", "--running=3", "--context=40", "--rounds=1")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "plan",
        "read",
        "commit",
        "both",
        "encoded",
    ]


@pytest.mark.slow
def test_formats_are_compared_with_the_first(tmp_path: Path) -> None:
    result = tmp_path / "formats.json"
    command = [sys.executable, BENCHMARKS / "formats.py", "plain=pyhelp"]
    command += ["int8=pyhelp,quantization=int8", "--text", BENCHMARKS.parent / "LICENSE"]
    command += ["--max-tokens", "80", "--rounds", "1", "--json", result]
    done = subprocess.run(
        [*map(str, command)], check=True, stdout=subprocess.PIPE, text=True, timeout=170
    )
    plain, rounded = json.loads(result.read_text())["formats"]
    assert (plain["decode_ratio"], plain["prompt_ratio"]) == (1, 1)
    assert plain["comparison"] is None
    assert 0 < rounded["comparison"]["kl_nats_per_token"]["value"] < 0.1
    assert sum(rounded["weight_bytes"].values()) < sum(plain["weight_bytes"].values())
    rows = [line for line in done.stdout.splitlines() if line.startswith("| int8 | ")]
    assert len(rows) == 1


@pytest.mark.more
def test_speculation_is_measured_beside_that_of_transformers(script: Script) -> None:
    sizes = ("--prompts", "1", "--output-tokens", "8", "--repeats", "1")
    done = script("speculation_beside.py", *sizes)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.rstrip()[-3:-2] == "."]
    assert [words[0] for words in lines] == ["off", "lookup", "model"]
