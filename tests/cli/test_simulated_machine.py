"""Machine in a cost table, and the options that it replaces or limits.

Options are refused if the table leaves them nothing to say, or if they ask for more than was
measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aioserve.errors import ConfigError
from aioserve.simulation.cost import CostTable
from aioserve.testing import replay
from tests.cli.command import Run

WORKLOAD = ("--synthetic", "bursts", "--num-requests", 9)
KV = {"num_pages": 4096, "page_size": 16, "max_model_len": 8192}
DEFAULTS = [("model", "llama-3-8b"), ("hardware", "h100"), ("num_devices", 1)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Table of step times alone, without a machine, noise or a longest context."""
    return written(tmp_path / "table.json")


def written(path: Path, **more: object) -> Path:
    grid = {"prefill_tokens": [0, 9999], "decode_batch": [0, 999], "seconds": [[0.1, 0.1]] * 2}
    path.write_text(json.dumps({**grid, **more}))
    return path


@pytest.mark.parametrize(("name", "default"), DEFAULTS)
@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_what_leaves_nothing_to_ask_of_a_device_refuses_one_the_default_too(
    aioserve_here: Run, tmp_path: Path, verb: str, name: str, default: object
) -> None:
    flag = f"--{name.replace('_', '-')}"
    for more, why in (({}, "is given too"), ({"kv": KV}, "is in it too")):
        path = written(tmp_path / "table.json", **more)
        pages = () if more else ("--num-pages", 999)
        done = aioserve_here(verb, *WORKLOAD, "--cost-table", path, *pages, flag, default)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{name}: the cost table says how long steps take" in done.stderr
        assert f"{why}, so leave it out, got {default!r}\n" in done.stderr


@pytest.mark.parametrize(("name", "default"), DEFAULTS)
def test_a_cost_model_of_ones_own_refuses_it_likewise(name: str, default: str | int) -> None:
    cost = CostTable([0, 99], [0, 9], [[0.1, 0.1]] * 2)
    given: dict[str, object] = {name: default}
    with pytest.raises(ConfigError, match=f"^{name}: the cost model says how long steps take"):
        replay("bursts", "fcfs", num_requests=9, cost=cost, num_pages=999, **given)  # type: ignore[arg-type]
    assert replay("bursts", "fcfs", num_requests=9, cost=cost, num_pages=999).finished == 9


def test_the_device_is_used_where_a_table_tells_no_memory(aioserve_here: Run, table: Path) -> None:
    def pages(*options: object) -> int:
        done = aioserve_here("simulate", *WORKLOAD, "--cost-table", table, *options, "--json")
        found = json.loads(done.stdout)
        device = found["machine"]["device"]
        assert f"{device['model']} on {device['num_devices']} x {device['hardware']}" in done.stderr
        return found["machine"]["num_pages"]

    assert pages() == pages("--model", "llama-3-8b", "--hardware", "h100", "--num-devices", 1)
    assert pages("--num-devices", 2) > 2 * pages()


def test_a_scatter_that_there_is_none_of_is_refused(aioserve_here: Run, table: Path) -> None:
    done = aioserve_here("simulate", *WORKLOAD, "--cost-table", table, "--step-noise")
    assert done.returncode == 2
    assert "step_noise: " in done.stderr
    assert "has none, so leave out --step-noise" in done.stderr


@pytest.mark.parametrize(
    ("more", "longest", "limit"),
    [
        ({"kv": KV}, 8193, "kv.max_model_len is 8,192"),
        ({"kv": KV, "max_context_tokens": 4000}, 4001, "max_context_tokens is 4,000"),
        ({"max_context_tokens": 4000}, 4001, "max_context_tokens is 4,000"),
        ({"kv": KV, "max_context_tokens": 40_000}, 9000, "kv.max_model_len is 8,192"),
    ],
)
def test_a_longer_context_than_a_table_was_measured_with_is_told_before_all_else(
    aioserve_here: Run, tmp_path: Path, more: dict[str, object], longest: int, limit: str
) -> None:
    path = written(tmp_path / "table.json", **more)
    arguments = (*WORKLOAD, "--cost-table", path)
    warning = (
        f"aioserve: warning: max_model_len: {longest:,} tokens are more than {path} was measured "
        f"with ({limit}), and what steps with such contexts take is a guess"
    )
    for verb, asked in (
        ("simulate", ("--max-model-len", longest)),
        ("sweep", ("--max-model-len", longest, "--jobs", 1)),
        ("sweep", ("--vary", f"max_model_len=2000,{longest},3000", "--jobs", 1)),
    ):
        done = aioserve_here(verb, *arguments, *asked)
        assert done.returncode == 0
        lines = [line for line in done.stderr.splitlines() if "warning: max_model_len" in line]
        assert lines == [warning]
    done = aioserve_here("simulate", *arguments, "--max-model-len", longest - 2000)
    assert (done.returncode, "max_model_len" in done.stderr) == (0, False)


def test_each_table_of_a_sweep_is_told_of_by_itself(aioserve_here: Run, tmp_path: Path) -> None:
    short = written(tmp_path / "short.json", kv=KV)
    long = written(tmp_path / "long.json", kv=KV | {"max_model_len": 99_999})
    done = aioserve_here(
        *("sweep", *WORKLOAD, "--vary", f"cost_table={long},{short}", "--jobs", 1),
        *("--max-model-len", 9000),
    )
    assert done.returncode == 0
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert [f"than {short} was measured" in line for line in warnings] == [True]
