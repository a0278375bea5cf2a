"""Claims of the files for operators about the server, checked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.server import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"


def test_a_linter_finds_nothing_in_the_dockerfile() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("there is no hadolint for this machine")
    done = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Dockerfile", "aioserve.service", "nginx.conf"])
def test_flags_that_a_file_names_are_there(name: str) -> None:
    written = (DEPLOY / name).read_text(encoding="utf-8")
    named = set(re.findall(r"--(?:host|port|api|drain|allowed|tls|uds)[a-z-]*", written))
    assert named
    settings = (ROOT / "docs" / "reference" / "server-settings.md").read_text(encoding="utf-8")
    cli = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    for flag in named:
        field = flag.removeprefix("--").replace("-", "_")
        assert f"`{flag}" in cli or f"`{field}`" in settings, flag


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    named = set(re.findall(r"aioserve_[a-z0-9_]+", asked))
    reference = (ROOT / "docs" / "reference" / "server-metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`(aioserve_[a-z0-9_]+)`", reference))
    assert {name.removesuffix("_bucket") for name in named} <= known
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places) == 12


def test_the_proxy_lets_in_what_the_server_takes() -> None:
    written = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    limit = re.search(r"client_max_body_size (\d+)m;", written)
    assert limit is not None
    assert int(limit[1]) * 2**20 == ServerSettings().max_body_bytes
