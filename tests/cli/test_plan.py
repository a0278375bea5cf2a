"""`aioserve plan` prints the results of the memory calculator, for people and for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aioserve.capacity.models import PRESETS
from tests.cli.command import Run

ROOT = Path(__file__).resolve().parents[2]


def test_a_table_says_what_fits(aioserve_here: Run) -> None:
    done = aioserve_here("plan", "llama-3-70b", "--num-gpus", 4)
    assert done.returncode == 0
    assert "70.55 billion parameters in bfloat16" in done.stdout
    assert "KV in bfloat16, 4 GPUs of 80.00 GiB" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["weights", "131.42", "GiB", "32.86", "GiB"] in rows
    assert ["KV", "per", "token", "320.00", "KiB", "80.00", "KiB"] in rows
    assert ["4,096", "1.25", "GiB", "256", "135"] in rows
    assert ["131,072", "40.00", "GiB", "8,192", "4"] in rows


def test_a_draft_has_rows_of_its_own(aioserve_here: Run) -> None:
    done = aioserve_here("plan", "llama-3-70b", "--draft", "llama-3-8b", "--num-gpus", 4)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["weights", "of", "the", "draft", "14.96", "GiB", "3.74", "GiB"] in rows
    assert ["draft", "beside", "a", "page", "2.00", "MiB", "512.00", "KiB"] in rows
    assert ["4,096", "1.25", "GiB", "256", "89"] in rows


def test_json_has_every_figure_for_programs(aioserve_here: Run) -> None:
    done = aioserve_here("plan", "llama-3-8b", "--gpu-memory-gib", 24, "--context", "4K", "--json")
    found = json.loads(done.stdout)
    assert found["num_parameters"] == 8_030_261_248
    assert found["weight_bytes"] == 16_060_522_496
    assert found["kv_bytes_per_token"] == 128 * 1024
    assert found["gpu_memory_bytes"] == 24 << 30
    assert found["num_pages"] == int(((24 << 30) - 16_060_522_496) * 0.9) // (2 << 20)
    assert found["fewest_gpus"] == 1
    (row,) = found["contexts"]
    assert row == {
        "context_tokens": 4096,
        "kv_bytes_per_request": 512 << 20,
        "pages_per_request": 256,
        "concurrent_requests": found["num_pages"] // 256,
    }


def test_every_option_counts(aioserve_here: Run) -> None:
    def plan(*options: object) -> dict[str, object]:
        return json.loads(aioserve_here("plan", "llama-3-8b", "--json", *options).stdout)

    usual = plan()
    for option in (
        ("--dtype", "int4"),
        ("--kv-dtype", "fp8"),
        ("--context", "8k"),
        ("--gpu-memory-gib", "79.5"),
        ("--num-gpus", "2"),
        ("--memory-utilization", "0.5"),
        ("--page-size", "32"),
        ("--draft", "llama-3-1b"),
    ):
        assert plan(*option) != usual, option


def test_contexts_are_given_one_by_one_with_k_or_without(aioserve_here: Run) -> None:
    shown = aioserve_here("plan", "llama-3-8b", "--context", "100", "--context", "2K", "--json")
    assert [row["context_tokens"] for row in json.loads(shown.stdout)["contexts"]] == [100, 2048]


def test_a_model_directory_is_planned_for(aioserve_here: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["llama-3-8b"]))
    for name in (tmp_path, tmp_path / "config.json"):
        found = json.loads(aioserve_here("plan", name, "--json").stdout)
        assert found["num_parameters"] == 8_030_261_248


def test_weights_that_do_not_fit_are_an_answer(aioserve_here: Run) -> None:
    done = aioserve_here("plan", "llama-3-70b")
    assert done.returncode == 0
    assert "The weights don't fit: 131.42 GiB per GPU. 4 of these GPUs would hold" in done.stdout
    done = aioserve_here("plan", "llama-3-8b", "--gpu-memory-gib", 16)
    assert "The weights leave no room for a request of 131,072 tokens. 4 of these" in done.stdout
    done = aioserve_here("plan", "llama-3-405b")
    assert "No number of these GPUs that divides its heads holds" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3-8b", "--context", "4.5K"], "context must be a count of tokens .*got '4.5K'"),
        (["llama-3-8b", "--context", "-1"], "context must be a count of tokens .*got '-1'"),
        (["llama-3-8b", "--context", ""], "context must be a count of tokens .*got ''"),
        (["llama-3-8b", "--context", "K"], "context must be a count of tokens .*got 'K'"),
        (["llama-3-8b", "--context", "²"], "context must be a count of tokens .*got '²'"),
        (["llama-3-8b", "--context", "256K"], r"context must be in \[1, 131072\] .*got 262144"),
        (["llama-3-8b", "--gpu-memory-gib", "0"], "gpu_memory_gib must be .*1048576, got 0"),
        (["llama-3-8b", "--gpu-memory-gib", "nan"], "--gpu-memory-gib must be .*got 'nan'"),
        (["llama-3-8b", "--gpu-memory-gib", "inf"], "--gpu-memory-gib must be .*got 'inf'"),
        (["llama-3-8b", "--num-gpus", "16"], "num_gpus must divide .*got 16: .*replication"),
        (["llama-3-8b", "--dtype", "fp7"], "dtype must be one of .*got 'fp7'"),
        (["llama-3-8b", "--draft", "llama-9"], "'llama-9' not found"),
        (["llama-3-8b", "--head", "nowhere"], "nowhere: no such directory"),
        (["llama-3-8b", "--head", "a", "--draft", "b"], "either draft or head, and not both"),
        (["llama-9-8b"], "'llama-9-8b' not found: .*presets are .*llama-3-8b"),
    ],
)
def test_what_makes_no_sense_is_one_line_on_stderr(
    aioserve_here: Run, arguments: list[str], message: str
) -> None:
    done = aioserve_here("plan", *arguments)
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert re.search(message, line)


def test_the_reference_lists_the_presets() -> None:
    page = ROOT / "docs" / "reference" / "cli-models.md"
    shown = page.read_text(encoding="utf-8").split("\n### Presets\n")[1].split("\n#")[0]
    assert set(re.findall(r"`([^`]+)`", shown)) == set(PRESETS)


def test_a_model_that_is_refused_has_its_sizes_and_the_reason(
    aioserve_here: Run, tmp_path: Path
) -> None:
    mixture = PRESETS["llama-3-8b"] | {
        "architectures": ["DbrxForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(mixture))
    done = aioserve_here("plan", tmp_path)
    assert done.returncode == 0
    assert "47.49 billion parameters (13.67 billion for a token) in bfloat16" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("The sizes are those that its config.json tells")
    assert "architecture DbrxForCausalLM is not supported: it is a mixture of experts" in last
    found = json.loads(aioserve_here("plan", tmp_path, "--json").stdout)
    assert "DbrxForCausalLM" in found["refused"]
