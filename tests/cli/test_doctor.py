"""`aioserve doctor` reports what is installed, and survives what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.command import Run
from tests.parity.tiny_models import write

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


@pytest.mark.more
def test_doctor_prints_a_table_for_people(aioserve: Run) -> None:
    shown = aioserve("doctor").stdout
    for fact in ("version", "isa", "threads", "fcfs", "pyhelp"):
        assert fact in shown


def test_what_is_broken_is_named_and_harms_nothing_else(aioserve_anew: Run, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('no driver here')\n")
    (tmp_path / "broken_policies.py").write_text(PLUGIN)
    info = tmp_path / "broken_policies-3.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[aioserve]\nrandom-order = broken_policies\n")
    done = aioserve_anew("doctor", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert "no driver here" in found["cupy"]["error"]
    assert "broken-policies 3.4" in found["policies"]["broken"][0]
    assert "on purpose" in found["policies"]["broken"][0]
    assert "fcfs" in found["policies"]["found"]


def test_digests_are_those_of_the_model_whatever_its_files_are_called(
    aioserve_here: Run, tmp_path: Path
) -> None:
    def told(directory: Path) -> tuple[str, str]:
        facts = json.loads(aioserve_here("doctor", directory, "--digests", "--json").stdout)
        found = facts["model asked for"]
        return found["weights_sha256"], found["computation_sha256"]

    one = write("phi3-longrope", tmp_path / "one")
    other = tmp_path / "other"
    other.mkdir()
    for name, to in (("config.json", "config.json"), ("model.safetensors", "x.safetensors")):
        (other / to).write_bytes((one / name).read_bytes())
    names = load_file(other / "x.safetensors")
    placed = json.dumps({"weight_map": dict.fromkeys(names, "x.safetensors")})
    (other / "model.safetensors.index.json").write_text(placed)
    first = told(one)
    assert told(other) == first
    assert {len(digest) for digest in first} == {64}
    changed = told(write("phi3-longrope", tmp_path / "changed", seed=1))
    assert changed[0] != first[0]
    assert changed[1] == first[1]
    plain = json.loads(aioserve_here("doctor", one, "--json").stdout)["model asked for"]
    assert not [name for name in plain if "sha256" in name]


def test_digests_need_a_model(aioserve_here: Run) -> None:
    done = aioserve_here("doctor", "--digests")
    assert done.returncode == 2
    assert "digests are those of a model: name one" in done.stderr
