"""Memory that the process may use, containers included."""

from __future__ import annotations

import pytest

from aioserve.execution import process_memory


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1 << 40),
        ({"memory.max": "max\n", "memory.current": "5"}, 1 << 40),
        ({"memory.max": "1000\n", "memory.current": "300\n"}, 700),
        ({"memory.max": "1000\n", "memory.current": "3000\n"}, 0),
    ],
)
def test_the_tightest_limit_counts(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(process_memory, "CGROUP_V2", tmp_path)
    monkeypatch.setattr(process_memory, "CGROUP_V1", tmp_path / "none")
    monkeypatch.setattr(process_memory, "_meminfo_available", lambda: 1 << 40)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert process_memory.available_memory_bytes() == expected


def test_this_machine_has_some():
    assert process_memory.available_memory_bytes() > 0


def test_the_total_is_the_machines_or_the_containers(tmp_path, monkeypatch):
    monkeypatch.setattr(process_memory, "CGROUP_V1", tmp_path / "none")
    monkeypatch.setattr(process_memory, "CGROUP_V2", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    machine = process_memory.total_memory_bytes()
    assert machine >= process_memory.available_memory_bytes() > 0
    (tmp_path / "memory.max").write_text(f"{machine - 1}\n")
    assert process_memory.total_memory_bytes() == machine - 1
