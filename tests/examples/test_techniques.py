"""The benchmark of techniques counts what arithmetic says, and draws what it counted."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EXPLANATION = Path(__file__).resolve().parents[2] / "docs" / "explanation"
PAGE_OF_TECHNIQUES = EXPLANATION / "what-each-technique-buys.md"
PAGE_SIZE = 16
SIZES = {
    "requests": 6,
    "prefix_tokens": 40,
    "output_tokens": 5,
    "seats": 4,
    "chunk_tokens": 64,
    "decoding": 2,
    "long_tokens": 300,
    "short": 3,
    "length_rounds": 2,
}
LENGTHS = [2, 3, 9]
KV_BYTES_PER_TOKEN = 4 * 2 * 128 * 4  # layers, keys and values, width, float32


@pytest.fixture(scope="module")
def teaching() -> Iterator[Any]:
    """The two modules of the benchmark as one namespace, a written model and small sizes."""
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryDirectory() as directory,
    ):
        patch.syspath_prepend(BENCHMARKS)
        workload, runs = map(importlib.import_module, ("teaching", "technique_runs"))
        yield Namespace(
            workload=workload,
            runs=runs,
            model=workload.write_model(Path(directory) / "model"),
            options=Namespace(**SIZES, lengths=LENGTHS),
        )


def test_each_technique_computes_the_steps_and_tokens_that_it_must(teaching: Any) -> None:
    runs = teaching.runs
    rows = runs.run_all(runs.technique_rows(teaching.options), teaching.model, 1)
    table = {row["name"]: row for row in runs.technique_table(rows)}
    prompts = [len(p) for p in teaching.workload.teaching_prompts(6, 40)]
    out, known = 5, sum(prompts) + 6 * 4  # the last token of an answer is never computed
    recomputed = sum(prompt + done for prompt in prompts for done in range(out))
    shared = 5 * (40 // PAGE_SIZE * PAGE_SIZE)
    counted = {
        "one at a time, no KV cache": (6 * out, recomputed),
        "+ KV cache": (6 * out, known),
        "+ static batching": (2 * out, known),
        "+ continuous batching": (2 * out, known),
        "+ paged memory": (out, known),
        "+ prefix cache": (out, known - shared),
    }
    for name, (steps, tokens) in counted.items():
        assert (table[name]["steps"], table[name]["tokens_computed"]) == (steps, tokens), name
    assert table["+ prefix cache"]["hit_share"] == pytest.approx(shared / sum(prompts))
    assert table["+ chunked prefill"]["hit_share"] >= table["+ prefix cache"]["hit_share"]
    chunked = rows["+ chunked prefill"].steps
    assert max(sum(step.tokens.values()) for step in chunked) <= 64
    assert len(chunked) > out


def test_memory_is_counted_in_pages_and_compared_with_a_fixed_share_each(teaching: Any) -> None:
    runs = teaching.runs
    rows = runs.technique_rows(teaching.options)[4:6]
    paged, cached = runs.technique_table(runs.run_all(rows, teaching.model, 1))
    page_bytes = PAGE_SIZE * KV_BYTES_PER_TOKEN
    prompts = [len(p) for p in teaching.workload.teaching_prompts(6, 40)]
    pages = sum(ceil((prompt + 4) / PAGE_SIZE) for prompt in prompts)
    assert paged["peak_kv_bytes"] == pages * page_bytes
    assert cached["peak_kv_bytes"] == (pages - 5 * (40 // PAGE_SIZE)) * page_bytes
    for row in (paged, cached):
        assert row["contiguous_kv_bytes"] == 6 * 2048 * KV_BYTES_PER_TOKEN
        assert row["contiguous_ratio"] == row["contiguous_kv_bytes"] / row["peak_kv_bytes"]


def test_short_requests_pass_a_long_prompt_only_in_rotation(teaching: Any) -> None:
    runs, options = teaching.runs, teaching.options
    table = runs.wait_table(runs.run_all(runs.wait_rows(options), teaching.model, 1), options)
    whole, chunked, rotated = table
    assert whole["largest_step_tokens"] == 2 + 300 + 3 * 32
    assert whole["short_ttft_tokens_p50"] == whole["largest_step_tokens"]
    assert chunked["largest_step_tokens"] == rotated["largest_step_tokens"] == 64
    assert chunked["short_ttft_tokens_p50"] > 300 > rotated["short_ttft_tokens_p50"]


def test_a_static_batch_waits_for_its_longest_answer(teaching: Any) -> None:
    runs, options = teaching.runs, teaching.options
    rows = runs.run_all(runs.length_rows(options), teaching.model, 1)
    static, continuous = runs.length_table(rows, options)
    assert static["steps"] == 2 * 9
    assert static["idle_share"] == pytest.approx(1 - (2 + 3 + 9) / (3 * 9))
    assert static["mean_end_step"] == {"2": 2 + 4.5, "3": 3 + 4.5, "9": 9 + 4.5}
    assert continuous["idle_share_while_any_waits"] == 0
    assert continuous["steps"] < static["steps"]


def test_rows_with_other_answers_are_no_comparison(teaching: Any) -> None:
    runs = teaching.runs
    one, other = runs.length_rows(teaching.options)
    other = replace(other, client=runs.all_at_once([[1, 2], [3, 4]], [3, 3]))
    with pytest.raises(RuntimeError, match="the answers are not those of static"):
        runs.run_all([one, other], teaching.model, 1)


@pytest.mark.more
def test_figures_depend_on_counts_alone(teaching: Any, tmp_path: Path) -> None:
    runs, options = teaching.runs, teaching.options
    figures = importlib.import_module("technique_figures")
    drawn = []
    for directory in (tmp_path / "once", tmp_path / "again"):
        directory.mkdir()
        techniques, waits, lengths = (
            runs.run_all(rows(options), teaching.model, 1)
            for rows in (runs.technique_rows, runs.wait_rows, runs.length_rows)
        )
        figures.draw_techniques(runs.technique_table(techniques), directory)
        figures.draw_waits(waits, options.decoding, directory)
        figures.draw_lengths(lengths, options.lengths, directory)
        drawn.append({path.name: path.read_text() for path in directory.iterdir()})
    once, again = drawn
    assert once.keys() <= {path.name for path in (EXPLANATION / "figures").iterdir()}
    assert once == again
    for figure in once.values():
        assert "<text" in figure
        assert "fill: #ffffff" in figure


@pytest.mark.slow
def test_the_page_shows_what_the_command_counts(tmp_path: Path) -> None:
    result, figures = tmp_path / "result.json", tmp_path / "figures"
    options = ("--repeats=1", "--json", result, "--figures", figures)
    subprocess.run(
        [sys.executable, BENCHMARKS / "techniques.py", *options], check=True, timeout=170
    )
    assert len(list(figures.glob("*.svg"))) == 4
    page = PAGE_OF_TECHNIQUES.read_text(encoding="utf-8")
    shown = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    tables = json.loads(result.read_text())
    for row in tables["techniques"]:
        counts = [f"{row['steps']:,}", f"{row['tokens_computed']:,}"]
        assert [row["name"], *counts] in [cells[1:4] for cells in shown], row
        memory = [f"{row['peak_requests']}", f"{row['peak_kv_bytes'] / 2**20:.1f}"]
        if row["name"].startswith("+"):
            assert [row["name"], *memory] in [cells[1:4] for cells in shown], row
    for row in tables["lengths"]:
        counts = [f"{row['steps']:,}", f"{row['idle_share']:.3f}"]
        assert [row["name"], *counts] in [cells[1:4] for cells in shown], row
    for row in tables["waits"]:
        starts = [(cells[1].replace("`", ""), cells[2]) for cells in shown if len(cells) > 2]
        assert (row["name"], f"{row['largest_step_tokens']:,}") in starts, row
