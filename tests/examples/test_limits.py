"""Limits of the machine beside what an engine reaches, and the parts of a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioserve import _native
from aioserve.testing.random_model import write_random_model
from tests.examples.conftest import Script
from tests.examples.test_benchmarks import TINY
from tests.tiers import clock_counts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "tiny", TINY, dtype="float32")


def printed(script: Script, name: str, *options: object) -> str:
    done = script(name, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.more
@pytest.mark.clock
def test_each_workload_is_compared_with_what_its_steps_cannot_take_less_than(
    script: Script, model: Path, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    sizes = ("--streams", 3, "--prompt-tokens", 9, "--output-tokens", 4)
    sizes += ("--long-prompt-tokens", 40, "--read-mib", 16, "--product-seconds", 0)
    output = printed(
        script,
        "limits.py",
        "--model",
        model,
        "--dtype",
        "float32",
        "--repeats",
        1,
        *sizes,
        "--json",
        result,
    )
    written: dict[str, Any] = json.loads(result.read_text())
    least = 1e8 if clock_counts() else 0.0
    assert written["limits"]["bytes_per_second"] > least
    assert written["limits"]["flops_per_second"] > least
    one, many, prompt = written["results"]
    assert [[phase["tokens"] for phase in row["phases"]] for row in (one, many, prompt)] == [
        [9, 3],
        [27, 9],
        [40],
    ]
    for row in (one, many, prompt):
        for phase in row["phases"]:
            assert phase["share"] == pytest.approx(phase["limit_seconds"] / phase["seconds"])
            assert phase["share"] > 0
        assert all(seconds >= 0 for seconds in row["op_seconds"].values())
        for name in ("linear", "attention", "rowwise"):
            assert row["op_seconds"][name] > 0
        assert f"\n{row['workload']['name']}" in output
    # A step of one stream reads each weight once; a limit can't be less than that.
    head_bytes = 4 * TINY["vocab_size"] * TINY["hidden_size"]
    least = 3 * head_bytes / written["limits"]["bytes_per_second"]
    assert one["phases"][1]["limit_seconds"] > least


def test_the_limits_alone_need_no_model(script: Script) -> None:
    output = printed(
        script, "limits.py", "--dtype", "float32", "--read-mib", 16, "--product-seconds", 0
    )
    assert output.count("\n") == 1
    assert " GB/s, multiplies " in output


@pytest.mark.more
@pytest.mark.clock
def test_a_start_is_more_than_its_longest_part_and_the_second_imports_nothing(
    script: Script, model: Path, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    output = printed(script, "start.py", model, "--repeats", 1, "--json", result)
    best = json.loads(result.read_text())["best"]
    for seconds in best.values():
        parts = ("imports", "weights", "tokenizer", "decoder")
        assert all(0 <= seconds[part] < seconds["engine"] for part in parts)
        assert seconds["all"] == pytest.approx(
            seconds["aioserve"] + seconds["engine"] + seconds["first token"]
        )
    assert not clock_counts() or best["again"]["imports"] < best["first"]["imports"] / 10
    assert len(output.splitlines()) == 2 + 8


@pytest.mark.clock
def test_reading_takes_longer_for_more_memory_and_refuses_none() -> None:
    passes = _native.read_seconds(1 << 20, 3)
    assert len(passes) == 3
    assert min(passes) > 0
    assert not clock_counts() or min(passes) < min(_native.read_seconds(64 << 20, 3))
    for num_bytes, count in ((0, 1), ((1 << 20) - 1, 1), (1 << 20, 0)):
        with pytest.raises(ValueError, match="at least 1 MiB and passes at least 1"):
            _native.read_seconds(num_bytes, count)
