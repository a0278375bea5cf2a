"""`aioserve calibrate` writes a table for `aioserve simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aioserve.cli._busy import Busy
from aioserve.models.config import DecoderConfig
from aioserve.paging.format import KV_FORMATS
from aioserve.paging.layout import kv_layout
from aioserve.paging.pages import pages_of_sequence
from aioserve.simulation.calibration import PredictionError
from aioserve.simulation.cost_table_file import CostTableFile
from aioserve.testing.random_model import write_random_model
from tests.cli.command import Run
from tests.parity.tiny_models import CONFIGS, write

SMALL = ("--max-num-seqs", 2, "--max-num-batched-tokens", 64)


@pytest.mark.more
def test_a_model_is_measured_and_its_table_simulated(
    aioserve: Run, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    done = aioserve("calibrate", tiny_model, "-o", path, *SMALL)
    # If other work slows the machine, the table is written, and is as poor as it says.
    assert done.returncode == (1 if "far off" in done.stderr else 0), done.stderr
    assert "random mixes are told with an error of" in done.stdout
    table = json.loads(path.read_text())
    assert table["version"] == 1
    assert table["prefill_tokens"] == [0, 16, 32, 64]
    assert table["decode_batch"] == [0, 1, 2]
    assert min(map(min, table["seconds"])) > 0
    assert {len(point) for row in table["scatter"] for point in row} == {32}
    kv = table["kv"]
    assert kv["max_model_len"] <= kv["num_pages"] * kv["page_size"]
    assert kv["bytes_per_token"] > 0
    # Two sequences come close to the end of the model's context.
    assert table["max_context_tokens"] > 1.5 * kv["max_model_len"]
    assert table["max_attended_pairs"] > 64 * kv["max_model_len"] / 2
    measured = table["measured"]
    assert measured["model"] == tiny_model.name
    assert (measured["device"], measured["dtype"], measured["overlap"]) == ("cpu", "float32", True)
    assert measured["steps"] > 2 * 3 * 2 * 6
    assert measured["held_out_steps"] > 0
    assert str(tmp_path) not in path.read_text()

    done = aioserve("simulate", "--synthetic", "bursts", "--num-requests", 5, "--cost-table", path)
    assert done.returncode == 0, done.stderr
    assert "doesn't tell" not in done.stderr


def test_a_machine_that_was_busy_is_told_by_name_and_number(
    aioserve_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"model": "m", "dtype": "float32", "device": "cpu", "threads": 1, "steps": 9}
    table = CostTableFile(
        prefill_tokens=(0, 16), decode_batch=(0, 1), seconds=((1, 1), (1, 1)), measured=facts
    )

    async def measured(*_: object) -> tuple[CostTableFile, PredictionError, Busy]:
        return table, PredictionError(9, 0.1, 0.2, 0.0), Busy(2, 1.5, 0.31, 0.0, (0.01, 0.011))

    monkeypatch.setattr("aioserve.cli.calibrate._measured", measured)
    path = tmp_path / "table.json"
    done = aioserve_here("calibrate", "-o", path)
    assert done.returncode == 0
    assert done.stderr == (
        f"aioserve: warning: the machine was busy, and {path} may be off: load 1.5 on 2 processors "
        "before; other programs took 31% of the processors\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "nowhere/table.json"), "output: nowhere/table.json can't be written: No such"),
        (("-o", "."), "output: . can't be written: Is a directory"),
        (("-o", "table.json", "--max-num-seqs", 0), "max_num_seqs must be in [1, 1023], so"),
        (("-o", "table.json", "--max-num-seqs", 1024), "max_num_seqs must be in [1, 1023], so"),
        (
            ("-o", "table.json", "--max-num-batched-tokens", 1),
            "max_num_batched_tokens must be at least 16 to be measured, got 1",
        ),
        (
            ("-o", "table.json", "--max-num-batched-tokens", 40, "--max-num-seqs", 24),
            "in one step of max_num_batched_tokens = 40, got 24",
        ),
        (("-o", "table.json", "--seed", -1), "seed must be at least 0, got -1"),
        (
            ("-o", "table.json", "--max-model-len", 32),
            "max_model_len must be at least 33 to be measured, got 32",
        ),
        (("no-such-model", "-o", "table.json"), "no-such-model"),
    ],
)
def test_a_mistake_is_named(
    aioserve_here: Run,
    arguments: tuple[object, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = aioserve_here("calibrate", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not Path("table.json").exists()


def test_a_context_that_is_too_short_to_be_measured_is_named(
    aioserve_here: Run, tmp_path: Path
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
    }
    model = write_random_model(tmp_path / "short", config, dtype="float32")
    done = aioserve_here("calibrate", model, "-o", tmp_path / "table.json")
    assert done.returncode == 2
    assert "max_model_len must be at least 33 to be measured, got 32" in done.stderr


def test_a_table_that_is_far_off_is_written_and_no_success(
    aioserve_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"model": "m", "dtype": "float32", "device": "cpu", "threads": 1, "steps": 9}
    table = CostTableFile(
        prefill_tokens=(0, 16), decode_batch=(0, 1), seconds=((1, 1), (1, 1)), measured=facts
    )

    async def measured(*_: object) -> tuple[CostTableFile, PredictionError, Busy]:
        return table, PredictionError(9, 0.86, 0.9, -0.8), Busy(2, 0.1, 0.0, 0.0, (0.5,))

    monkeypatch.setattr("aioserve.cli.calibrate._measured", measured)
    path = tmp_path / "table.json"
    done = aioserve_here("calibrate", "-o", path)
    assert done.returncode == 1
    assert "told with an error of 86.0% (median)" in done.stdout
    assert done.stderr.startswith(f"aioserve: {path} is written, but is far off: ")
    assert "at most 50%, and of the sum at most 25%" in done.stderr
    assert json.loads(path.read_text())["measured"] == facts


def test_steps_may_come_from_a_setup_of_a_published_profile(
    aioserve_here: Run, tmp_path: Path
) -> None:
    path = tmp_path / "profile.csv"
    columns = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,e2e_time"
    runs = ("m,gpu,100,1,9,20,1000,9020,4", "m,gpu,100,2,9,30,1000,9030,4")
    path.write_text("\n".join([f"{columns},tensor_parallel", *runs]) + "\n")
    arguments = ("simulate", "--synthetic", "bursts", "--num-requests", 3, "--json")
    done = aioserve_here(*arguments, "--cost-table", f"{path}:m,gpu,4")
    assert done.returncode == 0, done.stderr
    tpot = json.loads(done.stdout)["policies"]["fcfs"]["tpot_seconds"]
    assert tpot["p50"] >= 0.999
    done = aioserve_here(*arguments, "--cost-table", f"{path}:m,gpu,8")
    assert done.returncode == 2
    assert "no setup 'm,gpu,8'; there are: m,gpu,4" in done.stderr


@pytest.mark.more
def test_a_table_has_the_window_groups_of_the_measured_engine(
    aioserve: Run, aioserve_here: Run, tmp_path: Path
) -> None:
    model, path = write("gemma3", tmp_path / "gemma3"), tmp_path / "table.json"
    done = aioserve("calibrate", model, "-o", path, *SMALL)
    assert done.returncode == (1 if "far off" in done.stderr else 0), done.stderr
    kv = json.loads(path.read_text())["kv"]
    config = DecoderConfig.from_dict(CONFIGS["gemma3"])
    layout = kv_layout(config.kv_layers(KV_FORMATS["float32"]), config.max_position_embeddings)
    assert layout.num_window_groups
    assert (kv["num_window_groups"], kv["window"]) == (layout.num_window_groups, layout.window)
    assert kv["bytes_per_token"] == layout.bytes_per_token
    # Two sequences of the longest context, and the window pages of one step's prompts.
    groups = layout.num_window_groups, layout.window
    pages = 2 * pages_of_sequence(config.max_position_embeddings, 16, *groups)
    assert kv["num_pages"] == pages + groups[0] * 4

    done = aioserve_here(
        *("simulate", "--synthetic", "bursts", "--num-requests", 5, "--scale-lengths", 0.05),
        *("--cost-table", path, "--json"),
    )
    machine = json.loads(done.stdout)["machine"]
    assert (machine["num_window_groups"], machine["window"]) == groups
    assert machine["num_pages"] == kv["num_pages"]
