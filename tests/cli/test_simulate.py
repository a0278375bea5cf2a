"""`aioserve simulate`: the same figures as a table and as JSON, and errors that help."""

from __future__ import annotations

import functools
import html
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aioserve import RequestView, SchedulerView, SchedulingPolicy
from aioserve.plugins import PluginRegistry
from aioserve.simulation.figures import FIGURES, GROUP_FIGURES
from tests import made_up_traces
from tests.cli.command import Run

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Six requests. Every second one has the prefix of the one before."""
    rows = [
        {
            "timestamp": 1000 * n,
            "input_length": 1200,
            "output_length": 4,
            "hash_ids": [3 * (n // 2), 3 * (n // 2) + 1, 100 + n],
        }
        for n in range(6)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a second policy, `late`, which starts the last request first."""

    class Late(SchedulingPolicy):
        def order(
            self, waiting: Sequence[RequestView], view: SchedulerView
        ) -> Iterable[RequestView]:
            return reversed(waiting)

    found = PluginRegistry.policy
    monkeypatch.setattr(
        PluginRegistry,
        "policy",
        lambda registry, name: Late() if name == "late" else found(registry, name),
    )


def simulated(aioserve: Run, *arguments: object) -> dict[str, Any]:
    done = aioserve("simulate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.usefixtures("late")
def test_json_has_every_figure_of_every_policy(aioserve_here: Run, mooncake: Path) -> None:
    arguments = (mooncake, "--policy", "fcfs", "--policy", "late", "--unbounded-cache")
    found = simulated(aioserve_here, *arguments)
    assert found["trace"]["requests"] == 6
    assert list(found["policies"]) == ["fcfs", "late"]
    fcfs = found["policies"]["fcfs"]
    assert (fcfs["finished"], fcfs["blocks"], fcfs["block_hits"]) == (6, 18, 6)
    assert fcfs["block_hit_share"] == pytest.approx(1 / 3)
    assert fcfs["ttft_seconds"]["p50"] > 0
    assert found == simulated(aioserve_here, *arguments)


@pytest.mark.usefixtures("late")
def test_the_table_has_a_column_for_every_policy(aioserve_here: Run, mooncake: Path) -> None:
    done = aioserve_here("simulate", mooncake, "--policy", "fcfs", "--policy", "late")
    assert done.returncode == 0, done.stderr
    (heading,) = [line for line in done.stdout.splitlines() if "fcfs" in line]
    assert "late" in heading
    assert "prefix blocks found" in done.stdout
    assert "33.3%" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--num-pages=9000", ", 9,000 pages of 16 tokens\n"),
        ("--unbounded-cache", ", KV memory without a limit in pages of 16 tokens\n"),
    ],
)
def test_how_much_memory_there_is_stands_over_the_table(
    aioserve_here: Run, mooncake: Path, option: str, said: str
) -> None:
    assert said in aioserve_here("simulate", mooncake, option).stdout


def test_rate_and_scale_change_the_trace(aioserve_here: Run, mooncake: Path) -> None:
    found = simulated(aioserve_here, mooncake, "--rate", 12, "--scale-lengths", 0.0625)
    assert found["trace"]["seconds"] == pytest.approx(0.5)
    assert found["trace"]["prompt_tokens"] == 6 * 75
    assert found["policies"]["fcfs"]["block_hits"] == 6


def test_a_trace_may_begin_at_any_time(aioserve_here: Run, tmp_path: Path) -> None:
    path = tmp_path / "servegen.csv"
    rows = "".join(f"{1.7e9 + n},a,100,4\n" for n in range(6))
    path.write_text("arrival_s,client,input_tokens,output_tokens\n" + rows)
    arguments = (path, "--num-requests", 5)
    assert simulated(aioserve_here, *arguments)["trace"]["seconds"] == 4.0
    found = simulated(aioserve_here, *arguments, "--rate", 10)
    assert found["trace"]["seconds"] == pytest.approx(0.5)
    # A synthetic workload begins later than 0.
    found = simulated(aioserve_here, "--synthetic", "bursts", "--num-requests", 1)
    assert found["trace"]["seconds"] == 0.0


def test_a_larger_model_needs_more_devices(aioserve_here: Run, mooncake: Path) -> None:
    arguments = ("simulate", mooncake, "--model", "llama-3-70b")
    done = aioserve_here(*arguments)
    assert done.returncode == 2
    assert "no room for KV pages on num_devices=1 of h100" in done.stderr
    assert aioserve_here(*arguments, "--num-devices", 4).returncode == 0


def test_answers_are_cut_short_at_max_tokens(aioserve_here: Run, mooncake: Path) -> None:
    found = simulated(aioserve_here, mooncake, "--max-tokens", 3)["policies"]["fcfs"]
    assert (found["finished"], found["cut_short"], found["output_tokens"]) == (6, 6, 18)
    assert simulated(aioserve_here, mooncake)["policies"]["fcfs"]["output_tokens"] == 24


def test_targets_add_goodput(aioserve_here: Run, mooncake: Path) -> None:
    arguments = (mooncake, "--ttft-target-seconds", 60, "--tpot-target-seconds", 1e-9)
    goodput = simulated(aioserve_here, *arguments)["policies"]["fcfs"]["goodput"]
    assert goodput == {"requests": 0, "share": 0.0, "requests_per_second": 0.0}


def test_policies_see_the_targets(aioserve_here: Run) -> None:
    arguments = ("--synthetic", "bursts", "--num-requests", 200, "--rate", 100)
    policies = ("--policy", "fcfs", "--policy", "deadline")
    found = simulated(aioserve_here, *arguments, *policies, "--ttft-target-seconds", 0.1)
    refused = {name: metrics["refused"] for name, metrics in found["policies"].items()}
    good = {name: metrics["goodput"]["requests"] for name, metrics in found["policies"].items()}
    assert refused["fcfs"] == 0 < refused["deadline"]
    assert good["fcfs"] < good["deadline"]
    spread = found["policies"]["deadline"]["ttft_seconds"]
    assert (spread["never"], spread["max"]) == (refused["deadline"], None)


def test_steps_may_come_from_a_table(aioserve_here: Run, mooncake: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table = {"prefill_tokens": [0, 1], "decode_batch": [0, 1], "seconds": [[1, 1], [1, 1]]}
    path.write_text(json.dumps(table))
    arguments = (mooncake, "--cost-table", path, "--num-requests", 1, "--no-overlap")
    fcfs = simulated(aioserve_here, *arguments)["policies"]["fcfs"]
    assert fcfs["busy_seconds"] == fcfs["steps"] == 4


def machine_table(path: Path, **fields: object) -> Path:
    """Write a table like `aioserve calibrate`, of a machine with 512 tokens of KV memory."""
    table: dict[str, object] = {
        "prefill_tokens": [0, 2048],
        "decode_batch": [0, 4],
        "seconds": [[0.01, 0.01], [0.02, 0.02]],
        "scatter": [[[0.5, 1.5]] * 2] * 2,
        "max_context_tokens": 40_000,
        "max_attended_pairs": 10**8,
        "kv": {"num_pages": 64, "page_size": 8, "max_model_len": 400, "bytes_per_token": 2},
    }
    path.write_text(json.dumps({k: v for k, v in (table | fields).items() if v is not None}))
    return path


def test_a_table_that_knows_its_machine_says_how_much_fits_it(
    aioserve_here: Run, tmp_path: Path
) -> None:
    path = machine_table(tmp_path / "table.json")
    arguments = ("--synthetic", "bursts", "--num-requests", 20, "--cost-table", path)
    found = simulated(aioserve_here, *arguments)
    fcfs = found["policies"]["fcfs"]
    assert (fcfs["num_pages"], fcfs["page_size"]) == (32, 16)
    assert fcfs["too_long"] > 0
    assert found["machine"] == {
        "device": None,
        "num_pages": 32,
        "max_model_len": 400,
        "noise_seed": 0,
    }
    longer = simulated(aioserve_here, *arguments, "--max-model-len", 500, "--num-pages", 600)
    assert longer["policies"]["fcfs"]["too_long"] < fcfs["too_long"]
    done = aioserve_here("simulate", *map(str, arguments), "--hardware", "a100")
    assert done.returncode == 2
    assert "hardware: the cost table says how long steps take, and the number of" in done.stderr


def test_steps_of_a_table_scatter_by_the_seed_unless_told_not_to(
    aioserve_here: Run, mooncake: Path, tmp_path: Path
) -> None:
    path = machine_table(tmp_path / "table.json", kv=None)
    arguments = (mooncake, "--cost-table", path, "--num-pages", 900)

    def seconds(*more: object) -> float:
        return simulated(aioserve_here, *arguments, *more)["policies"]["fcfs"]["busy_seconds"]

    first, same, other = seconds(), seconds("--seed", 0), seconds("--seed", 3)
    assert first == same != other
    calm = seconds("--no-step-noise")
    assert calm not in (first, other)
    flat = machine_table(tmp_path / "flat.json", kv=None, scatter=None)
    done = simulated(aioserve_here, mooncake, "--cost-table", flat, "--num-pages", 900)
    assert done["policies"]["fcfs"]["busy_seconds"] == calm
    assert "with its noise (seed 0)" in aioserve_here("simulate", *map(str, arguments)).stdout


def test_what_a_table_was_not_measured_for_is_counted_and_said_once(
    aioserve_here: Run, tmp_path: Path
) -> None:
    arguments = ("simulate", "--synthetic", "bursts", "--num-requests", "20", "--rate", "1000")
    policies = ("--policy", "fcfs", "--policy", "shortest_first")
    path = machine_table(tmp_path / "table.json", kv=None)
    done = aioserve_here(*arguments, *policies, "--cost-table", path, "--max-model-len", "9000")
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert re.search(r"table.json was not measured for \d+.\d% of the [\d,]+ steps of", warnings[0])
    assert re.search(r"the first: decode_batch = \d+ \(measured: 0 to 4\)$", warnings[0])
    assert "of those, not measured" in done.stdout
    done = aioserve_here(
        *arguments, "--cost-table", path, "--max-num-seqs", "4", "--num-pages", "4096"
    )
    assert "warning" not in done.stderr


def test_what_a_table_does_not_tell_is_said(aioserve_here: Run, tmp_path: Path) -> None:
    arguments = ("simulate", "--synthetic", "bursts", "--num-requests", "3", "--cost-table")
    old = machine_table(tmp_path / "old.json", kv=None, scatter=None)
    done = aioserve_here(*arguments, old)
    assert done.stderr == (
        f"aioserve: {old} doesn't tell how steps vary, the KV memory, the model's longest "
        "context: each takes its mean, pages are those of llama-3-8b on 1 x h100, none is too long "
        "for it\n"
    )
    done = aioserve_here(*arguments, old, "--no-step-noise")
    assert done.returncode == 2
    assert "old.json has none, so leave out --no-step-noise" in done.stderr
    new = machine_table(tmp_path / "new.json")
    assert aioserve_here(*arguments, new).stderr == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a trace, or a made-up workload with --synthetic"),
        (["a.csv", "--synthetic", "bursts"], "give either a trace or --synthetic, and not both"),
        (
            ["--synthetic", "bursts", "--policy", "fcfs", "priority"],
            "not both: 'priority' is taken for a trace; give --policy anew for each",
        ),
        (["--synthetic", "calm"], "no synthetic workload 'calm'"),
        (["missing.csv"], "missing.csv: No such file or directory"),
        (["--synthetic", "bursts", "--report", "no/where.html"], "report: no/where.html can't be"),
        (["--synthetic", "bursts", "--report", "."], "report: . can't be written: Is a directory"),
        (["--synthetic", "bursts", "--gantt-window", "0:1"], "give --report too"),
        (["--synthetic", "bursts", "--gantt-window", "2:1"], "gantt_window must be START:END"),
        (["--synthetic", "bursts", "--policy", "slowest"], "no scheduling policy 'slowest'"),
        (["--synthetic", "bursts", "--num-requests", "0"], "num_requests must be at least 1"),
        (["--synthetic", "bursts", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["--synthetic", "bursts", "--rate", "0"], "rate must be more than 0"),
        (["--synthetic", "bursts", "--hardware", "tpu"], "no hardware 'tpu'"),
        (["--synthetic", "bursts", "--priority", "a=1"], "TENANT=NUMBER, once for each tenant of"),
        (["--synthetic", "tenants", "--priority", "tenant-0"], "TENANT=NUMBER, once for each"),
        (["--synthetic", "tenants", "--priority", "tenant-0=x"], "tenant-0 must be an int, got"),
        (
            ["--synthetic", "tenants", "--priority", "tenant-0=2147483648"],
            "priority of tenant-0 must be at most 2147483647",
        ),
        (
            ["--synthetic", "tenants", "--priority", "tenant-0=1", "--priority", "tenant-0=1"],
            "priority must be TENANT=NUMBER, once for each tenant",
        ),
        (
            ["--synthetic", "bursts", "--eviction", "mru"],
            "eviction: no strategy 'mru'; did you mean lru? There are: fifo",
        ),
        (["--synthetic", "bursts", "--num-pages", "9", "--unbounded-cache"], "and not both"),
        (
            ["--synthetic", "bursts", "--eviction", "lfu", "--no-prefix-caching"],
            "eviction='lfu' has no effect with prefix_caching=False: no page is cached",
        ),
        (
            ["--synthetic", "bursts", "--eviction", "lfu", "--unbounded-cache"],
            "eviction='lfu' has no effect without a limit of pages: none is ever evicted",
        ),
        (
            ["--synthetic", "bursts", "--ttft-target-seconds", "0"],
            "ttft_target_seconds must be more",
        ),
        (["--synthetic", "bursts", "--cost-table", "missing.json"], "cost table missing.json"),
        (
            ["missing.csv", "--seed", "1"],
            "seed: nothing of a trace is drawn, and no step varies, got 1",
        ),
        (
            ["--synthetic", "bursts", "--no-step-noise"],
            "step_noise: without a cost table steps take",
        ),
        (
            ["--synthetic", "bursts", "--step-noise"],
            "what the roofline says, so leave out --step-noise",
        ),
        (["--synthetic", "bursts", "--max-model-len", "1"], "max_model_len must be at least 2"),
        (
            ["--synthetic", "bursts", "--policy", "fcfs", "--policy", "fcfs"],
            "policy 'fcfs' is given 2 times",
        ),
        (
            ["--synthetic", "bursts", "--num-devices", "3", "--num-pages", "99"],
            "num_devices must divide the model's 8 KV heads, which are shared evenly, got 3",
        ),
        (
            [
                "--synthetic",
                "bursts",
                "--cost-table",
                "t.json",
                "--num-pages",
                "9",
                "--hardware",
                "a100",
            ],
            "hardware: the cost table says how long steps take",
        ),
    ],
)
def test_a_mistake_is_named(aioserve_here: Run, arguments: list[str], message: str) -> None:
    done = aioserve_here("simulate", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.more
def test_an_urgent_tenant_waits_less(aioserve_here: Run) -> None:
    arguments = ["--synthetic", "tenants", "--num-requests", 60, "--rate", 50]
    arguments += ["--max-num-seqs", 4, "--policy", "fcfs", "--policy", "priority"]
    found = simulated(aioserve_here, *arguments, "--priority", "tenant-0=-1")
    fcfs, priority = (
        run["tenants"]["tenant-0"]["ttft_seconds"]["p99"] for run in found["policies"].values()
    )
    assert priority < fcfs / 2


@pytest.mark.usefixtures("late")
def test_every_figure_of_the_table_is_in_the_json(aioserve_here: Run, tmp_path: Path) -> None:
    table = machine_table(tmp_path / "table.json", kv=None)
    arguments = ["--synthetic", "tenants", "--num-requests", 60, "--rate", 50]
    arguments += ["--cost-table", table, "--num-host-pages", 50]
    arguments += ["--speculation-max-tokens", 2, "--acceptance", 0.7]
    arguments += [
        "--deadline-seconds",
        99,
        "--ttft-target-seconds",
        0.5,
        "--policy",
        "fcfs",
        "--policy",
        "late",
    ]
    found = simulated(aioserve_here, *arguments)
    shown = aioserve_here("simulate", *arguments).stdout
    heading, *lines = [line for line in shown.splitlines() if line.strip()]
    for number in (found["trace"]["requests"], found["trace"]["prompt_tokens"]):
        assert f"{number:,}" in heading
    policies = found["policies"]
    expected = [
        (figure.label, [figure.show(part(policy, figure.field)) for policy in policies.values()])
        for figure in FIGURES
    ]
    for figure in GROUP_FIGURES:
        expected.append((f"{figure.label}, by tenant (requests)", []))
        for tenant, theirs in policies["fcfs"]["tenants"].items():
            cells = [
                figure.show(part(policy["tenants"][tenant], figure.field))
                for policy in policies.values()
            ]
            expected.append((f"{tenant} ({theirs['requests']})", cells))
    assert [line.split() for line in lines[1:]] == [
        [*label.split(), *cells] for label, cells in expected
    ]


def part(values: dict[str, Any], field: str) -> Any:
    return functools.reduce(lambda value, name: value[name], field.split("."), values)


def test_many_policies_are_all_shown_where_nobody_sets_a_width(
    aioserve_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"policy-number-{n}" for n in range(12)]
    monkeypatch.setattr(PluginRegistry, "policy", lambda registry, name: SchedulingPolicy())
    monkeypatch.delenv("COLUMNS", raising=False)
    asked = [word for name in names for word in ("--policy", name)]
    shown = aioserve_here("simulate", "--synthetic", "bursts", "--num-requests", 5, *asked).stdout
    assert any(line.split() == names for line in shown.splitlines())


def test_a_window_outside_of_all_runs_is_told_beside_the_table(
    aioserve_here: Run, mooncake: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    plain = aioserve_here("simulate", mooncake)
    options = ("--report", page, "--gantt-window", "100000:100001")
    done = aioserve_here("simulate", mooncake, *options)
    assert (done.returncode, done.stdout) == (2, plain.stdout)
    assert "gantt_window has no step in it, from 100000 to 100001 s" in done.stderr
    assert not page.exists()


def test_a_report_is_written_beside_the_table(
    aioserve_here: Run, mooncake: Path, tmp_path: Path
) -> None:
    page = tmp_path / "a report.html"
    arguments = ("simulate", mooncake, "--policy", "fcfs", "--tpot-target-seconds", 0.05)
    plain = aioserve_here(*arguments)
    done = aioserve_here(*arguments, "--report", page, "--gantt-window", "0:1.5")
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, "")
    first = page.read_text()
    assert ", 0.00 to 1.50 s</h4>" in first
    assert "target 50 ms" in first
    # The command on the page makes the same page again.
    command = html.unescape(re.findall(r"<pre>(.*)</pre>", first)[0])
    program, *words = shlex.split(command)
    assert program == "aioserve"
    page.unlink()
    assert aioserve_here(*words).returncode == 0
    assert page.read_text() == first


def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    aioserve_here: Run, mooncake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("aioserve.testing.trial.simulate", run)
    done = aioserve_here("simulate", mooncake, "--report", tmp_path / "none" / "a.html")
    assert done.returncode == 2
    assert "a.html can't be written: No such file or directory" in done.stderr


def test_figures_are_printed_even_where_the_page_fails(
    aioserve_here: Run, mooncake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    arguments = ("simulate", mooncake, "--report", tmp_path / "a.html")
    monkeypatch.setattr(Path, "write_text", full)
    done = aioserve_here(*arguments)
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "time to first token p50, s" in done.stdout


def test_a_report_never_takes_the_place_of_the_trace(aioserve_here: Run, mooncake: Path) -> None:
    before = mooncake.read_text()
    done = aioserve_here("simulate", mooncake, "--report", mooncake.parent / "." / mooncake.name)
    assert done.returncode == 2
    assert "is the trace" in done.stderr
    assert mooncake.read_text() == before


def test_a_report_of_before_stays_when_the_run_fails(
    aioserve_here: Run, mooncake: Path, tmp_path: Path
) -> None:
    page = tmp_path / "a.html"
    arguments = ("simulate", mooncake, "--report", page, "--num-pages", 0)
    assert aioserve_here(*arguments).returncode == 2
    assert not page.exists()
    page.write_text("before")
    assert aioserve_here(*arguments).returncode == 2
    assert page.read_text() == "before"


def test_a_trace_that_is_none_is_named_with_its_line(
    aioserve_here: Run, mooncake: Path, tmp_path: Path
) -> None:
    mooncake.write_text(mooncake.read_text() + '{"timestamp": "noon"}\n')
    done = aioserve_here("simulate", mooncake)
    assert done.returncode == 2
    assert done.stderr.startswith(f"aioserve: {mooncake}:7: Expected `float`, got `str`")
    assert done.stderr.count("\n") == 1
    assert aioserve_here("simulate", tmp_path).returncode == 2


@pytest.mark.parametrize("write", [made_up_traces.mooncake, made_up_traces.agentic])
def test_an_unbounded_cache_finds_what_was_seen_before_in_a_made_up_trace(
    aioserve_here: Run, write: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = write(tmp_path)
    found = simulated(aioserve_here, path, "--unbounded-cache")
    share = found["policies"]["fcfs"]["block_hit_share"]
    assert share == pytest.approx(made_up_traces.share_seen_before(path))


@pytest.mark.parametrize("write", [made_up_traces.azure, made_up_traces.servegen])
def test_a_made_up_trace_without_blocks_is_simulated(
    aioserve_here: Run, write: Callable[[Path], Path], tmp_path: Path
) -> None:
    found = simulated(aioserve_here, write(tmp_path), "--num-requests", 100)
    assert found["trace"]["requests"] == found["policies"]["fcfs"]["finished"] == 100
    assert found["policies"]["fcfs"]["block_hit_share"] is None


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("mooncake_synthetic", 0.1696),
        ("agentic_coding", 0.9453),
        ("mooncake_conversation", 0.3035),
    ],
)
def test_an_unbounded_cache_finds_what_was_seen_before(
    aioserve_here: Run, name: str, share: float
) -> None:
    path = SHARED / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the repository")
    found = simulated(aioserve_here, path, "--unbounded-cache")
    assert round(found["policies"]["fcfs"]["block_hit_share"], 4) == share


def test_drafts_are_in_the_results_where_something_drafts_and_only_there(
    aioserve_here: Run, mooncake: Path
) -> None:
    pages = ("--num-pages", "400")
    plain = simulated(aioserve_here, mooncake, *pages)
    draft_options = ("--speculation-max-tokens", "3", "--acceptance", "1,0.5", "--seed", "4")
    drafting = simulated(aioserve_here, mooncake, *pages, *draft_options)
    assert "speculation_max_tokens" not in plain["options"]
    assert "acceptance" not in plain["options"]
    assert drafting["options"]["speculation_max_tokens"] == 3
    assert drafting["options"]["acceptance"] == "1,0.5"
    assert "speculation" not in plain["policies"]["fcfs"]
    found = drafting["policies"]["fcfs"]["speculation"]
    assert found["drafted_tokens"] == sum(found["drafted"]) > 0
    assert drafting["policies"]["fcfs"]["steps"] < plain["policies"]["fcfs"]["steps"]
    done = aioserve_here("simulate", mooncake, *pages, "--acceptance", "0.5")
    assert done.returncode != 0
    assert "acceptance='0.5' has no effect with speculation_max_tokens=0" in done.stderr
