"""The benchmarks of drafters run, and what they print is what they say."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

from tests.examples.test_benchmarks import BENCHMARKS


def rows_of(tmp_path: Path, script: str, *options: str) -> list[dict]:
    result = tmp_path / "result.json"
    command = [sys.executable, BENCHMARKS / script, *options, "--json", result]
    subprocess.run(command, check=True, timeout=200, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())


def test_each_drafter_is_measured_at_each_size(tmp_path: Path) -> None:
    sizes = ("--contexts", "64", "200", "--slots", "1", "3")
    rows = rows_of(tmp_path, "drafters.py", *sizes, "--steps", "70", "--limit", "4")
    assert [(row["drafter"], row["context"], row["slots"]) for row in rows] == [
        (name, context, slots)
        for name in ("ngram", "suffix")
        for context in (64, 200)
        for slots in (1, 3)
    ]
    for row in rows:
        assert 0 < row["drafted"] <= 4
        assert min(row["step_us"], row["start_ms"], row["end_ms"], row["bytes_per_token"]) > 0


def test_drafts_are_counted_against_what_was_written(tmp_path: Path) -> None:
    steps = [
        {"session": "a", "keep_chars": 0, "append": "json.dumps(value) ", "output": "is a str. "},
        {"session": "a", "keep_chars": 18, "append": "And? ", "output": "is a str. "},
        {"session": "b", "keep_chars": 0, "append": "json.loads(text) ", "output": "is a str. "},
    ]
    sessions = tmp_path / "sessions.jsonl.gz"
    with gzip.open(sessions, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(step) + "\n" for step in steps)
    drafters = ("ngram", "suffix", "suffix:cache_tokens=0", "suffix:max_factor=8")
    rows = rows_of(
        *(tmp_path, "draft_replay.py", "--agents", str(sessions)),
        *("--files", "1", "--drafter", *drafters),
    )
    by_name = {(row["workload"], row["drafter"]): row for row in rows}
    assert len(by_name) == 3 * len(drafters)
    for row in rows:
        # A step whose last draft token is the end of an answer brings no token behind it.
        assert 0 <= row["steps"] + row["accepted"] - row["tokens"] <= row["answers"]
        assert row["accepted"] <= row["drafted"] <= 8 * row["steps"]
        assert row["tokens_per_step"] == row["tokens"] / row["steps"]
    assert by_name["edits", "suffix"]["tokens_per_step"] > 3
    assert by_name["agents", "suffix:cache_tokens=0"]["accepted"] == 0
    assert by_name["agents", "suffix:max_factor=8"]["accepted"] > 0
