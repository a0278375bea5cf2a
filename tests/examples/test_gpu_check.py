"""The command for a machine with a GPU: its parts, their time, and what it leaves behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.waits import LIMIT_SECONDS, block_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_check"
FETCHED_OTHERWISE = {"huggingface-hub"}
"""tokenizers names it, and imports it where a tokenizer is downloaded alone."""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The script as a module that runs commands with this Python."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    loader = SourceFileLoader("gpu_check", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(module, "PLACE", place)
    yield module
    sys.modules.pop("gpu_wheels", None)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def part(tool: ModuleType, name: str, *programs: str, **fields: Any) -> Any:
    """One that runs Python programs."""
    commands = [[sys.executable, "-c", program] for program in programs]
    values = {"what": name, "share": 1.0, **fields}
    return tool.Part(name=name, commands=lambda options, seconds: commands, **values)


def check(tool: ModuleType, out: Path, parts: list[Any], minutes: float = 4.0) -> dict[str, Any]:
    tool.check(parts, tool.Options(out, None), minutes)
    return json.loads((out / "check.json").read_text())


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def hanging(pids: Path) -> str:
    """A program that doesn't end, nor does its child, and both ignore a polite request."""
    return (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.fork()\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "print('it hangs', flush=True)\n"
        "time.sleep(300)\n"
    )


@pytest.mark.more  # each part has three seconds
def test_a_part_that_hangs_is_ended_with_its_children_and_the_next_begins(
    tool: ModuleType, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "KILL_SECONDS", 0.2)
    pids = tmp_path / "pids"
    parts = [part(tool, "hangs", hanging(pids)), part(tool, "works", "print('fine')")]
    written = check(tool, out, parts, minutes=0.1)
    hangs, works = written["parts"]
    assert (hangs["state"], hangs["exit_code"]) == ("out of time", None)
    assert 2.5 < hangs["seconds"] < 6
    assert (works["state"], works["exit_code"]) == ("passed", 0)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 2
    block_until(lambda: not any(map(is_alive, started)))
    assert "it hangs" in (out / "hangs.log").read_text()
    assert "fine" in (out / "works.log").read_text()


def test_a_part_that_fails_is_told_and_its_result_is_no_old_one(
    tool: ModuleType, out: Path
) -> None:
    (tool.PLACE / "old.json").write_text("[1]")
    brought = tool.site_packages() / "msgspec-9.8.7.dist-info"
    brought.mkdir(parents=True)
    (brought / "METADATA").write_text("Metadata-Version: 2.1\nName: msgspec\nVersion: 9.8.7\n")
    writes = f"open({str(tool.PLACE / 'new.json')!r}, 'w').write('[2]')"
    parts = [
        part(tool, "fails", "print('one')", "import sys; sys.exit('the card is on fire')", "1/0"),
        part(tool, "measures", writes, result="new.json"),
        part(tool, "forgets", "pass", result="old.json"),
    ]
    written = check(tool, out, parts)
    fails, measures, forgets = written["parts"]
    assert (fails["state"], fails["exit_code"]) == ("failed", 1)
    assert fails["why"] == "the card is on fire"
    assert len(fails["commands"]) == 3
    assert "ZeroDivisionError" not in (out / "fails.log").read_text()
    assert measures["state"] == forgets["state"] == "passed"
    assert written["results"] == {"measures": [2]}
    assert written["packages"]["torch"] == metadata.version("torch")
    assert written["packages"]["msgspec"] == "9.8.7"
    assert written["machine"]["cpus"] == os.cpu_count()


def test_commands_at_once_all_run_and_one_that_fails_is_told(
    tool: ModuleType, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that wait for each other, and one that begins when there is a processor for it."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    meets = "import pathlib, time\nopen({0!r}, 'w')\nwhile not pathlib.Path({1!r}).exists(): pass"
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    programs = [meets.format(one, two), meets.format(two, one) + "\n1/0", "print('third')"]
    (found,) = check(tool, out, [part(tool, "tests", *programs, at_once=True)])["parts"]
    assert (found["state"], found["exit_code"]) == ("failed", 1)
    log = (out / "tests.log").read_text()
    assert log.index("ZeroDivisionError") < log.index("third")
    assert sorted(path.name for path in tool.PLACE.iterdir()) == []


def test_every_file_of_tests_for_a_card_is_run_by_one_part(tool: ModuleType) -> None:
    options = tool.Options(Path("out"), None)
    commands = [*tool.alone_commands(options, 1.0), *tool.test_commands(options, 1.0)]
    named = [word for command in commands for word in command if word.startswith("tests/")]
    files = [*(ROOT / "tests/gpu").glob("test_*.py"), *(ROOT / "tests/ops/gpu").glob("test_*.py")]
    assert sorted([*named, *tool.NEED_NO_CARD]) == sorted(str(p.relative_to(ROOT)) for p in files)


def test_without_its_base_no_later_part_is_run(tool: ModuleType, out: Path) -> None:
    parts = [
        part(tool, "before", "pass"),
        part(tool, "build", "raise SystemExit(3)", is_base=True),
        part(tool, "tests", "pass"),
    ]
    before, build, tests = check(tool, out, parts)["parts"]
    assert before["state"] == "passed"
    assert (build["state"], build["exit_code"]) == ("failed", 3)
    assert tests["state"] == "not run"
    assert tests["why"] == "build has not passed"


def test_what_is_missing_is_named_where_there_are_no_wheels(
    tool: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "missing", lambda: ["msgspec", "pytest-asyncio"])
    (build,) = check(tool, out, [tool.PARTS[0]])["parts"]
    assert build["state"] == "failed"
    assert "missing: msgspec, pytest-asyncio" in build["why"]
    install, itself = tool.build_commands(tool.Options(out, Path("/wheels")), 1.0)
    assert "--no-index" in install
    assert "--no-deps" in install
    assert install[-4:-2] == ["--find-links", "/wheels"]
    assert [word.partition("==")[0] for word in install[-2:]] == ["msgspec", "pytest-asyncio"]
    assert itself[-2:] == ["--editable", str(ROOT)]


def test_time_that_a_part_leaves_is_for_those_behind_it(tool: ModuleType) -> None:
    one, two, three = (
        part(tool, name, share=share) for name, share in zip("abc", (1, 1, 2), strict=True)
    )
    assert tool.limit_of(one, [two, three], 400.0) == 100.0
    assert tool.limit_of(two, [three], 399.0) == 133.0
    assert tool.limit_of(three, [], 390.0) == 390.0
    assert tool.limit_of(three, [], -1.0) == 0.0
    assert len({each.name for each in tool.PARTS}) == len(tool.PARTS)


def test_few_files_come_of_it_and_none_is_large(
    tool: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(tool.PARTS) + 1 <= 8
    monkeypatch.setattr(tool, "MAX_LOG_BYTES", 1000)
    check(tool, out, [part(tool, "talks", "for i in range(999): print('line', i)")])
    assert sorted(path.name for path in out.iterdir()) == ["check.json", "talks.log"]
    log = (out / "talks.log").read_text()
    assert len(log) < 1100
    assert log.endswith("line 998\n")
    assert "the beginning was too long" in log


def test_a_check_that_is_ended_ends_what_runs_and_says_so(out: Path, tmp_path: Path) -> None:
    """The signal is SIGTERM, as a machine with too little time sends it."""
    pids = tmp_path / "pids"
    program = (
        "import sys\n"
        "from importlib.machinery import SourceFileLoader\n"
        "from importlib import util\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "sys.dont_write_bytecode = True\n"
        f"loader = SourceFileLoader('gpu_check', {str(SCRIPT)!r})\n"
        "tool = util.module_from_spec(util.spec_from_loader('gpu_check', loader))\n"
        "sys.modules['gpu_check'] = tool\n"
        "loader.exec_module(tool)\n"
        "tool.KILL_SECONDS = 0.2\n"
        f"tool.PLACE, tool.PYTHON = Path({str(tmp_path)!r}), Path(sys.executable)\n"
        f"command = [sys.executable, '-c', {hanging(pids)!r}]\n"
        "commands = lambda options, seconds: [command]\n"
        "tool.PARTS = [tool.Part(name, '', 1.0, commands) for name in ('hangs', 'later')]\n"
        f"sys.argv = ['gpu_check', '--out', {str(out)!r}]\n"
        "tool.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        block_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_SECONDS) != 0
    finally:
        process.kill()
    started = [int(line) for line in pids.read_text().split()]
    block_until(lambda: not any(map(is_alive, started)))
    hangs, later = json.loads((out / "check.json").read_text())["parts"]
    assert (hangs["state"], hangs["why"]) == ("failed", "the check was ended")
    assert later["state"] == "not run"


def test_the_wheels_are_all_that_it_needs_in_the_versions_that_are_tested(
    tool: ModuleType,
) -> None:
    import gpu_wheels  # pyright: ignore[reportMissingImports]

    normal = gpu_wheels.normal
    carried = set(map(normal, gpu_wheels.WHEELS))
    there = carried | set(map(normal, gpu_wheels.GIVEN)) | FETCHED_OTHERWISE
    pins = gpu_wheels.pins()
    assert carried <= pins.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    assert {normal(Requirement(line).name) for line in named} <= there
    for name in gpu_wheels.WHEELS:
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            where = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.3"}
            if needed.marker is None or needed.marker.evaluate(where):
                assert normal(needed.name) in there, f"{name} needs {line}"
    shown = gpu_wheels.fetching(gpu_wheels.WHEELS, "3.12")
    assert all(f" {name}=={pins[normal(name)]}" in shown for name in gpu_wheels.WHEELS)


def test_what_is_older_than_the_floor_is_missing(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_wheels  # pyright: ignore[reportMissingImports]

    versions = {"pytest": "8.3.9", "msgspec": "0.20", "torch": "2.11.0+cu130", "rich": "13"}
    monkeypatch.setattr(gpu_wheels, "installed", versions.get)
    assert gpu_wheels.missing(list(versions)) == ["pytest"]
    assert gpu_wheels.missing(["anyio", "pytest"]) == ["anyio", "pytest"]
    assert gpu_wheels.missing_given() == ["triton", "numpy", "cupy-cuda13x or cupy-cuda12x"]
    versions |= {"triton": "3.6.0", "numpy": "2.5.2", "cupy-cuda13x": "14.2.0"}
    assert gpu_wheels.missing_given() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--out DIR"),
        (["--out", "OUT", "--wheels", "nowhere"], "nowhere is no folder"),
        (["--out", "OUT", "--minutes", "0"], "must be a number of minutes above 0, got '0'"),
        (["--out", "OUT", "--only", "everything"], "invalid choice: 'everything'"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, out: Path) -> None:
    given = [str(out) if word == "OUT" else word for word in words]
    done = subprocess.run([sys.executable, SCRIPT, *given], capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_parts_are_listed_with_their_time() -> None:
    command = [sys.executable, SCRIPT, "--list", "--minutes", "5", "--only", "tests", "wait"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^(\w+) +(\d+) s ", shown, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["tests", "wait"]
    assert sum(int(seconds) for _, seconds in rows) == 300
