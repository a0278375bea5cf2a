"""The script that counts how far a change reaches tells files, rooms and what is outside of one."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.test_benchmarks import BENCHMARKS

FILES = {
    "aioserve/kv/groups/state.py": "a\nb\n",
    "aioserve/kv/lease.py": "a\n",
    "aioserve/errors.py": "a\n",
    "tests/kv/test_groups.py": "a\n",
}


@pytest.fixture
def files_touched(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("files_touched")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    for text in ("", "more\n"):
        for file, lines in FILES.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(lines + text)
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "--quiet", "--message", f"commit {text}")
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def test_a_file_of_two_commits_counts_once(files_touched: ModuleType, repository: Path) -> None:
    found = files_touched.touched(["HEAD", "HEAD~1"], repository)
    assert [one.file for one in found] == sorted(FILES)
    assert [(one.added, one.removed) for one in found] == [(2, 0), (3, 0), (2, 0), (2, 0)]
    assert [one.room for one in found] == ["aioserve", "aioserve/kv", "aioserve/kv", "tests"]


def test_what_is_outside_of_a_room_is_counted_apart(
    files_touched: ModuleType,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(files_touched.touched, "__defaults__", (repository,))
    written = repository / "touched.json"
    files_touched.main(["HEAD", "--room", "aioserve/kv/groups", "--json", str(written)])
    told = capsys.readouterr().out
    assert "aioserve/kv                2 files     +2     +0" in told
    assert "4 files, 3 of the package" in told
    assert "2 of the package outside of aioserve/kv/groups" in told
    assert [one["file"] for one in json.loads(written.read_text())] == sorted(FILES)


def test_a_commit_that_is_not_known_is_named(files_touched: ModuleType, repository: Path) -> None:
    with pytest.raises(SystemExit, match="commit nothing: "):
        files_touched.touched(["nothing"], repository)
