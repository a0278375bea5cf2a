"""`benchmarks/speculation.py` and `benchmarks/acceptance.py` run, and count what they say."""

from __future__ import annotations

import gzip
import importlib
import json
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from aioserve import DrafterSpec, hookimpl
from aioserve.plugins import installed
from tests.doubles.drafters import ScriptedDrafter
from tests.examples.test_benchmarks import BENCHMARKS
from tests.plugin_system.planted import entry_point

NAMESPACES: list[bytes] = []
STEPS = [
    {"session": "a", "keep_chars": 0, "append": "one"},
    {"session": "b", "keep_chars": 0, "append": "other"},
    {"session": "a", "keep_chars": 2, "append": " two"},
]


class Repeats(ScriptedDrafter):
    """Drafts that the last token comes again."""

    def __init__(self) -> None:
        super().__init__(lambda sequence, count: [], lambda known, coming, limit: known[-1:])

    def start(self, slot, sequence):
        NAMESPACES.append(sequence.namespace)
        super().start(slot, sequence)


class Plugin:
    @hookimpl
    def aioserve_drafters(self):
        return [DrafterSpec("repeats", Repeats, "the last token again", api=1)]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The modules."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = ("speculation", "speculation_workloads", "speculation_beside", "acceptance")
    return Namespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter `repeats` is installed."""
    bundled = installed.entry_points
    planted = entry_point("repeats", Plugin)
    monkeypatch.setattr(installed, "entry_points", lambda group: [*bundled(group=group), planted])


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    path = tmp_path / "agents.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(step)}\n" for step in STEPS)
    return path


@pytest.mark.more
@pytest.mark.usefixtures("repeats")
def test_all_workloads_run_in_turn_with_the_same_tokens_and_namespaces_of_their_own(
    scripts: Any,
    agents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    NAMESPACES.clear()
    result = tmp_path / "result.json"
    options = ("--drafters", "repeats", "--streams", "2", "--sessions", "3", "--turns", "2")
    options += (
        "--output-tokens",
        "20",
        "--repeats",
        "2",
        "--num-pages",
        "256",
        "--dtype",
        "float32",
    )
    argv = ["speculation.py", *options, "--agents", str(agents), "--json", str(result)]
    monkeypatch.setattr("sys.argv", argv)
    scripts.speculation.main()
    written = json.loads(result.read_text())
    rows = written["rows"]
    workloads = ["questions", "edits", "agents", "random"]
    assert [row["workload"] for row in rows] == [w for w in workloads for _ in ("off", "repeats")]
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        assert (off["drafter"], on["drafter"]) == ("off", "repeats")
        assert (off["drafted"], off["accepted"], off["other"]) == ([], [], 0)
        assert off["steps"] == off["tokens"] == on["tokens"] > 0
        assert on["other"] == 0
        assert on["steps"] == on["tokens"] - sum(on["accepted"])
        rates, others = on["tokens_per_second"], off["tokens_per_second"]
        assert on["ratio"] == pytest.approx(max(rates) / max(others))
        pairs = [one / two for one, two in zip(rates, others, strict=True)]
        assert on["median_ratio"] == pytest.approx(statistics.median(pairs))
    assert rows[-1]["tokens"] == 2 * 3 * 20  # end-of-sequence ids or not
    # Each of three runs of a workload, that to warm up included.
    assert len(set(NAMESPACES)) == 3 * len(workloads)
    printed = capsys.readouterr().out
    assert "tokens of a step that verifies k draft tokens" in printed
    assert all(workload in printed for workload in workloads)


def test_what_steps_are_expected_to_bring_is_a_geometric_sum_beside_what_they_brought(
    scripts: Any,
) -> None:
    row = scripts.speculation.Row
    rows = [
        row("edits", 1, "off"),
        row("edits", 1, "suffix", drafted=[10, 8, 4], accepted=[8, 6, 1]),
        row("edits", 8, "suffix", drafted=[1], accepted=[0]),
        row("random", 1, "suffix", drafted=[0], accepted=[0]),
    ]
    (one,) = scripts.speculation.tokens_by_draft_length(rows)
    assert (one["workload"], one["acceptance"]) == ("edits", 0.8)
    a = 0.8
    assert one["formula"] == pytest.approx([(1 - a ** (k + 1)) / (1 - a) for k in (1, 2, 3)])
    assert one["measured"] == pytest.approx([1.8, 1.8 + 0.75, 1.8 + 0.75 + 0.25])


def test_counters_that_grew_longer_are_added_by_place(scripts: Any) -> None:
    assert scripts.speculation.added([5], (1,), (3, 2)) == [7, 2]
    assert scripts.speculation.added([1, 1], (), ()) == [1, 1]


def test_steps_of_agents_have_what_was_kept_of_the_prompt_before(
    scripts: Any, agents: Path
) -> None:
    workloads = scripts.speculation_workloads
    sizes = workloads.Sizes(output_tokens=4, prompt_tokens=100, turns=2, agents=agents)
    sessions = workloads.sessions_of("agents", 5, False, 300, sizes)
    assert [[turn([]) for turn in one.turns] for one in sessions] == [["one", "on two"], ["other"]]
    missing = workloads.Sizes(4, 100, 2, agents.with_name("nothing"))
    assert workloads.sessions_of("agents", 5, False, 300, missing) == []


def test_questions_come_behind_the_answers_before(scripts: Any) -> None:
    workloads = scripts.speculation_workloads
    sizes = workloads.Sizes(4, 100, 3, Path("nothing"))
    (by_messages,) = workloads.sessions_of("questions", 1, True, 300, sizes)
    last = by_messages.turns[2](["first answer", "second answer"])
    assert [one["role"] for one in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[3]["content"] == "second answer"
    (by_text,) = workloads.sessions_of("questions", 1, False, 300, sizes)
    text = by_text.turns[1](["first answer"])
    assert text.count("Question: ") == 2
    assert "Answer: first answer\n" in text
    assert text.endswith("Answer:")


@pytest.mark.more
def test_edits_are_whole_functions_that_fit_twice(scripts: Any) -> None:
    workloads = scripts.speculation_workloads
    sizes = workloads.Sizes(100, 400, 1, Path("nothing"))
    sessions = workloads.sessions_of("edits", 20, True, 300, sizes)
    prompts = [one.turns[0]([])[0]["content"] for one in sessions]
    assert len(set(prompts)) == 20
    sources = [prompt.split("```python\n")[1].removesuffix("\n```") for prompt in prompts]
    for source in sources:
        compile(source, "function", "exec")
        assert 150 <= len(source) <= 300


def test_random_prompts_and_their_seeds_are_all_different(scripts: Any) -> None:
    workloads = scripts.speculation_workloads
    sizes = workloads.Sizes(100, 400, 1, Path("nothing"))
    sessions = workloads.sessions_of("random", 9, True, 300, sizes)
    assert len({one.params.seed for one in sessions}) == 9
    assert len({tuple(one.turns[0]([])) for one in sessions}) == 9
    assert all(0 <= token < 300 for one in sessions for token in one.turns[0]([]))


@pytest.mark.more
def test_sessions_are_drawn_at_a_temperature_with_a_seed_each(scripts: Any) -> None:
    workloads = scripts.speculation_workloads
    sizes = workloads.Sizes(100, 400, 1, Path("nothing"), temperature=0.5)
    for workload in ("questions", "edits"):
        params = [one.params for one in workloads.sessions_of(workload, 3, True, 300, sizes)]
        assert [one.temperature for one in params] == [0.5] * 3
        assert len({one.seed for one in params}) == 3


@pytest.mark.usefixtures("repeats")
def test_a_kind_of_draft_is_counted_at_each_temperature_with_the_same_tokens(
    scripts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = tmp_path / "result.json"
    options = ("--drafts", "hardly ever right=repeats", "--only", "the model itself")
    options += ("hardly ever right",)
    options += ("--workloads", "questions", "--sessions", "2", "--turns", "2")
    options += ("--output-tokens", "24", "--draft-tokens", "4", "--dtype", "float32")
    monkeypatch.setattr("sys.argv", ["acceptance.py", *options, "--json", str(result)])
    scripts.acceptance.main()
    rows = json.loads(result.read_text())
    drafts = ["none", "the model itself", "hardly ever right"]
    temperatures = [row["temperature"] for row in rows]
    assert temperatures == [0.0] * 3 + [1.0] * 3
    assert [row["draft"] for row in rows] == 2 * drafts
    assert [row["other"] for row in rows] == [0] * 6
    for plain, itself, wrong in (rows[:3], rows[3:]):
        assert (plain["drafted"], plain["steps"]) == ([], plain["tokens"])
        assert itself["tokens"] == wrong["tokens"] == plain["tokens"]
        assert itself["steps"] < wrong["steps"] <= plain["steps"]
        # All of its draft tokens are right, and one of each completion may be its end.
        assert 0 <= sum(itself["drafted"]) - sum(itself["accepted"]) <= 4
        # All steps have a draft token but the first of each completion, and the last isn't counted.
        assert sum(wrong["accepted"]) < 0.2 * wrong["drafted"][0]
        assert wrong["drafted"][0] >= wrong["steps"] - 2 * 4
    printed = capsys.readouterr().out
    assert "tokens/step" in printed
    assert "the model itself" in printed


def test_an_unknown_kind_of_draft_is_refused(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, message in (
        (["--only", "heads"], "no draft is named 'heads', there are the model itself, same "),
        (["--drafts", "suffix"], "expected NAME=DRAFTER, got 'suffix'"),
        (["--model", "/models/other", "--only", "same family"], "no draft is named 'same family'"),
    ):
        monkeypatch.setattr("sys.argv", ["acceptance.py", *given])
        with pytest.raises(SystemExit):
            scripts.acceptance.parse_arguments()
        assert message in capsys.readouterr().err


def test_shares_lengths_and_tokens_are_counted_by_place(scripts: Any) -> None:
    row = scripts.acceptance.Row("edits", 0.0, "suffix", tokens=30, steps=10)
    row.drafted, row.accepted = [10, 8, 0], [8, 6, 0]
    assert row.shares == [0.8, 0.75]
    assert row.accepted_length == 1.4
    assert row.tokens_per_step == 3.0


def test_llama_cpp_is_compared_by_prompt_lookup_alone(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = scripts.speculation_beside
    monkeypatch.setattr("sys.argv", ["speculation_beside.py", "--model", "some.gguf"])
    assert beside.parse_arguments().drafters == ["lookup"]
    monkeypatch.setattr("sys.argv", ["speculation_beside.py"])
    assert beside.parse_arguments().drafters == ["lookup", "model"]
    for given, message in (
        (["--model", "some.gguf", "--drafters", "model"], "has no draft models, so lookup alone"),
        (["--model", "directory"], "--draft is needed: no draft model comes with directory"),
    ):
        monkeypatch.setattr("sys.argv", ["speculation_beside.py", *given])
        with pytest.raises(SystemExit):
            beside.parse_arguments()
        assert message in capsys.readouterr().err
