"""Tables out of a latency profile are what was measured, and say what a setup is called."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from aioserve.errors import ConfigError
from aioserve.simulation.calibration import read_cost, read_latency_profile
from aioserve.simulation.cost import StepLoad
from tests import made_up_traces

REAL = Path(__file__).parents[3] / "shared" / "traces" / "splitwise_latency_profile.jsonl.gz"
COLUMNS = (
    *("model", "hardware", "prompt_size", "batch_size", "token_size", "peak_power"),
    *("prompt_time", "token_time", "e2e_time", "tensor_parallel"),
)


def run(prompt: int, batch: int, prompt_ms: float, token_ms: float, **more: Any) -> dict[str, Any]:
    row = {
        "model": "small",
        "hardware": "gpu",
        "prompt_size": prompt,
        "batch_size": batch,
        "token_size": 10,
        "peak_power": 0.0,
        "prompt_time": prompt_ms,
        "token_time": token_ms,
        "e2e_time": prompt_ms + 10 * token_ms,
        "tensor_parallel": 2,
    }
    return row | more


RUNS = [
    run(100, 1, 19.0, 10.0),
    run(100, 1, 20.0, 10.0),
    run(100, 1, 90.0, 10.0),
    run(300, 1, 60.0, 11.0),
    run(100, 4, 80.0, 14.0),
    run(100, 8, 40.0, 12.0, e2e_time=5000.0),
    run(100, 1, 30.0, 20.0, model="large"),
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        if ".csv" in path.name:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(rows)
        else:
            file.writelines(json.dumps({k: str(v) for k, v in row.items()}) + "\n" for row in rows)
    return path


@pytest.mark.parametrize("name", ["p.csv", "p.csv.gz", "p.jsonl", "p.jsonl.gz"])
def test_prompt_and_token_times_are_found_again(tmp_path: Path, name: str) -> None:
    table = read_latency_profile(written(tmp_path / name, RUNS), "small, gpu, 2")

    def seconds(prefill: int, decode: int) -> float:
        return table.seconds(StepLoad(prefill, decode, 0, 0))

    assert seconds(100, 0) == pytest.approx(0.020)
    assert seconds(7, 0) == pytest.approx(0.020)
    assert seconds(200, 0) == pytest.approx(0.040)
    assert seconds(400, 0) == pytest.approx(0.080)
    assert seconds(500, 0) == pytest.approx(0.100)
    assert seconds(0, 1) == pytest.approx(0.010)
    assert seconds(0, 4) == pytest.approx(0.014)
    # Both at once: as all tokens of prompts would, and never less than decoding alone.
    assert seconds(300, 4) == pytest.approx(0.0608)
    assert seconds(100, 4) == pytest.approx(0.0208)


def test_runs_that_were_not_one_batch_are_left_out(tmp_path: Path) -> None:
    table = read_latency_profile(written(tmp_path / "p.csv", RUNS), "small,gpu,2")
    assert table.seconds(StepLoad(800, 0, 0, 0)) == pytest.approx(0.160)
    assert table.seconds(StepLoad(0, 8, 0, 0)) > 0.014


@pytest.mark.parametrize("setup", ["small,gpu,4", "small", "", "gpu,small,2"])
def test_a_setup_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, setup: str
) -> None:
    path = written(tmp_path / "p.csv", RUNS)
    with pytest.raises(ConfigError, match=r"no setup .*there are: large,gpu,2; small,gpu,2$"):
        read_latency_profile(path, setup)


def test_one_size_makes_no_table(tmp_path: Path) -> None:
    path = written(tmp_path / "p.csv", RUNS)
    with pytest.raises(ConfigError, match="large,gpu,2 has not two prompt and two batch sizes"):
        read_latency_profile(path, "large,gpu,2")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.csv", b"a,b\n1,2\n", "p.csv:2: no latency profile: .*missing required field `model`"),
        ("p.jsonl", b'{"model": "m"\n', "p.jsonl:1: no latency profile"),
        ("p.csv", b"\xff\xfe", "p.csv:1: .*can.t decode"),
        ("p.csv.gz", b"plain", "Not a gzipped file"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_latency_profile(tmp_path / name, "small,gpu,2")


def test_times_that_are_none_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "p.csv", [*RUNS, run(100, 2, 0.0, 10.0)])
    with pytest.raises(ConfigError, match=rf"p.csv:{len(RUNS) + 2}: .*prompt_time"):
        read_latency_profile(path, "small,gpu,2")


def check_tables(profile: Path, hardware: str) -> None:
    """Eight devices are quicker than two, and a long prompt takes longer than many decodes."""
    two, eight = (read_latency_profile(profile, f"llama2-70b,{hardware},{n}") for n in (2, 8))
    prompt, decode = StepLoad(2048, 0, 0, 0), StepLoad(0, 32, 0, 0)
    assert 0.02 < eight.seconds(decode) < eight.seconds(prompt) < two.seconds(prompt) < 1.0
    both = StepLoad(512, 16, 0, 0)
    assert eight.seconds(StepLoad(0, 16, 0, 0)) < eight.seconds(both) < eight.seconds(prompt)


@pytest.mark.parametrize("hardware", ["a100-80gb", "h100-80gb"])
def test_a_made_up_profile_of_the_published_format_makes_a_table(
    tmp_path: Path, hardware: str
) -> None:
    check_tables(made_up_traces.splitwise(tmp_path), hardware)


@pytest.mark.parametrize("hardware", ["a100-80gb", "h100-80gb"])
def test_the_published_profile_makes_a_table(hardware: str) -> None:
    if not REAL.exists():
        pytest.skip(f"no {REAL.name} beside the repository")
    check_tables(REAL, hardware)


def test_a_cost_is_a_table_or_a_setup_of_a_profile(tmp_path: Path) -> None:
    profile = written(tmp_path / "a:b.csv", RUNS)
    load = StepLoad(0, 4, 0, 0)
    assert read_cost(f"{profile}:small,gpu,2").seconds(load) == pytest.approx(0.014)
    table = tmp_path / "table.json"
    table.write_text('{"prefill_tokens":[0,1],"decode_batch":[0,1],"seconds":[[1,1],[1,1]]}')
    assert read_cost(str(table)).seconds(load) == 1.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("profile.csv", "no setup ''; there are: large,gpu,2; small,gpu,2"),
        ("profile.csv:", "no setup ''; there are: large,gpu,2; small,gpu,2"),
        ("profile.csv:gpu", "no setup 'gpu'; there are"),
        ("missing.csv:small,gpu,2", "cost table missing.csv: .*No such file"),
        ("missing.json", "cost table missing.json: .*No such file"),
    ],
)
def test_a_cost_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("profile.csv"), RUNS)
    with pytest.raises(ConfigError, match=message):
        read_cost(source)
