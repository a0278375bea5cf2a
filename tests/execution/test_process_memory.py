"""Memory that the process may use, containers included."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioserve.execution import process_memory

MACHINE = 1 << 40


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose cgroups are files that a test puts into this folder."""
    monkeypatch.setattr(process_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(process_memory, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(process_memory, "_meminfo_available", lambda: MACHINE)
    monkeypatch.setattr(process_memory, "_machine", lambda: MACHINE)
    return tmp_path


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


STAT = "anon 1\ninactive_file 200\ntotal_inactive_file 250\nactive_file 7\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MACHINE),
        ({"memory.max": "max\n", "memory.current": "5"}, MACHINE),
        ({"memory.max": "1000\n", "memory.current": "300\n"}, 700),
        ({"memory.max": "1000\n", "memory.current": "3000\n"}, 0),
        ({"memory.max": "1000\n", "memory.current": "1000\n", "memory.stat": STAT}, 200),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "1000\n",
                "memory/memory.stat": STAT,
            },
            250,
        ),
        (
            {
                "own": "0::/system.slice/a:b.service\n",
                "system.slice/memory.max": "900",
                "system.slice/memory.current": "300",
                "system.slice/a:b.service/memory.max": "800",
                "system.slice/a:b.service/memory.current": "100",
            },
            600,
        ),
        (
            {
                "own": "4:cpu,memory:/mine\n0::/other\n",
                "memory/mine/memory.limit_in_bytes": "800",
                "memory/mine/memory.usage_in_bytes": "100",
                "other/memory.max": "max",
                "mine/memory.max": "10",
                "mine/memory.current": "1",
            },
            700,
        ),
        # As seen in a container that shares the names of the outside.
        (
            {"own": "0::/outside/name\n", "memory.max": "1000\n", "memory.current": "300\n"},
            700,
        ),
    ],
)
def test_the_tightest_limit_counts(files: dict[str, str], expected: int, machine: Path) -> None:
    put(machine, files)
    assert process_memory.available_memory_bytes() == expected


def test_this_machine_has_some() -> None:
    assert process_memory.total_memory_bytes() >= process_memory.available_memory_bytes() > 0


def test_the_total_is_the_machines_or_the_containers(machine: Path) -> None:
    put(machine, {"memory.max": "max\n"})
    assert process_memory.total_memory_bytes() == MACHINE
    put(machine, {"memory.max": f"{MACHINE - 1}\n"})
    assert process_memory.total_memory_bytes() == MACHINE - 1
    put(machine, {"own": "0::/one\n", "one/memory.max": f"{MACHINE - 2}\n"})
    assert process_memory.total_memory_bytes() == MACHINE - 2
