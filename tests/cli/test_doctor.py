"""`aioserve doctor` tells what is there and survives what is not."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import Run

PLUGIN = """\
raise RuntimeError("this plugin is broken on purpose")
"""
METADATA = "Metadata-Version: 2.1\nName: broken-policies\nVersion: 3.4\n"


def test_doctor_prints_json_for_programs(aioserve: Run) -> None:
    done = aioserve("doctor", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["kernels"]["threads"] >= 1
    assert found["kernels"]["isa"] in found["kernels"]["isas_supported"]
    assert found["torch"]["version"]
    assert "fcfs" in found["policies"]["found"]
    assert found["memory"]["available_gib"] > 0
    assert found["gpu"]["driver"]
    assert "installed" in found["triton"]
    assert "installed" in found["flashinfer"]
    assert not [name for name, facts in found.items() if "error" in facts]


def test_doctor_prints_a_table_for_people(aioserve: Run) -> None:
    shown = aioserve("doctor").stdout
    for fact in ("version", "isa", "threads", "fcfs", "pyhelp"):
        assert fact in shown


def test_what_is_broken_is_named_and_harms_nothing_else(aioserve: Run, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('no driver here')\n")
    (tmp_path / "broken_policies.py").write_text(PLUGIN)
    info = tmp_path / "broken_policies-3.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[aioserve]\nrandom-order = broken_policies\n")
    done = aioserve("doctor", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert "no driver here" in found["cupy"]["error"]
    assert "broken-policies 3.4" in found["policies"]["broken"][0]
    assert "on purpose" in found["policies"]["broken"][0]
    assert "fcfs" in found["policies"]["found"]
