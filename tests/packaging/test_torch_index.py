"""Installs of torch from a made-up index. Without an NVIDIA driver torch comes without CUDA, and
constraints.txt fits the build with CUDA."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
TORCH = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
NOWHERE = "http://127.0.0.1:9"


def tool(name: str) -> ModuleType:
    loader = SourceFileLoader(name, str(ROOT / "tools" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def version() -> str:
    assert TORCH is not None
    return TORCH[1]


def write_wheel(directory: Path, version: str) -> None:
    """A torch of a few bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(directory / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A server with the indexes `main`, `cpu`, and `old`, which has CPU builds of another torch."""
    write_wheel(tmp_path / "main" / "torch", version())
    write_wheel(tmp_path / "cpu" / "torch", f"{version()}+cpu")
    write_wheel(tmp_path / "old" / "torch", "1.0.0+cpu")
    handler = partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def environment(**more: str) -> dict[str, str]:
    """A machine without a driver whose pip was told nothing."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PATH": "/nowhere", **more}


def options_of(**more: str) -> tuple[list[str], str]:
    """Run the tool without site-packages, which have a torch. Return the options that it prints,
    and what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "tools" / "torch_index"],
        env=environment(**more),
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return done.stdout.split(), done.stderr


def downloaded(index: str, options: list[str], directory: Path) -> list[str]:
    """The wheel that pip takes with `options`, beside the index `main`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    subprocess.run(
        [*pip, "--index-url", f"{index}/main", *options, "-d", directory, f"torch=={version()}"],
        env=environment(PIP_DISABLE_PIP_VERSION_CHECK="1"),
        check=True,
        timeout=200,
    )
    return [path.name for path in directory.iterdir()]


@pytest.mark.sampled(1)
@pytest.mark.skipif(tool("torch_index").has_nvidia_driver(), reason="this machine has a driver")
@pytest.mark.parametrize(
    ("name", "comes", "says"),
    [
        ("cpu", "+cpu", "No NVIDIA driver is here: torch comes from {index}, without CUDA."),
        ("old", "", f"{{index}} has no CPU build of torch {version()}"),
        ("none", "", "{index} can't be reached (HTTP Error 404"),
        (NOWHERE, "", "{index} can't be reached"),
    ],
)
def test_torch_comes_without_cuda_where_it_can_be_had(
    index: str, tmp_path: Path, name: str, comes: str, says: str
) -> None:
    url = name if name == NOWHERE else f"{index}/{name}"
    options, said = options_of(TORCH_INDEX=url)
    assert said.startswith(says.format(index=url))
    assert options == (["--extra-index-url", url] if comes else [])
    wheels = downloaded(index, options, tmp_path / "wheels")
    assert wheels == [f"torch-{version()}{comes}-py3-none-any.whl"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"])
def test_who_told_pip_where_to_look_is_heard(index: str, variable: str) -> None:
    options, said = options_of(TORCH_INDEX=f"{index}/cpu", **{variable: NOWHERE})
    assert options == []
    assert variable in said or "driver is here" in said


def test_configuration_of_pip_is_heard(index: str, tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = {NOWHERE}\n")
    options, said = options_of(TORCH_INDEX=f"{index}/cpu", PIP_CONFIG_FILE=str(config))
    assert options == []
    assert "global.index-url" in said or "driver is here" in said


def test_with_a_driver_torch_has_cuda(index: str, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    options, said = options_of(TORCH_INDEX=f"{index}/cpu", PATH=str(program.parent))
    assert options == []
    assert "driver is here" in said


def test_no_linker_looks_for_a_driver(index: str, tmp_path: Path) -> None:
    """Called by root, `ld -o /dev/null` removes a /dev/null that is a regular file."""
    asked = tmp_path / "asked"
    for name in ("cc", "gcc", "ld"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n: > {asked}\nexit 1\n")
        program.chmod(0o755)
    options_of(TORCH_INDEX=f"{index}/cpu", PATH=str(program.parent))
    assert not asked.exists()


def test_an_installed_torch_is_left_as_it_is(index: str) -> None:
    command = [sys.executable, ROOT / "tools" / "torch_index"]
    env = environment(TORCH_INDEX=f"{index}/cpu")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=200)
    assert (done.stdout, done.stderr) == ("", "")


def test_an_installed_torch_of_another_version_is_not_the_one(index: str, tmp_path: Path) -> None:
    info = tmp_path / "site" / "torch-1.0.0+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0+cpu\n")
    _, said = options_of(TORCH_INDEX=f"{index}/cpu", PYTHONPATH=str(info.parent))
    assert said


@pytest.mark.more
@pytest.mark.parametrize("place", ["user:s3cret@127.0.0.1:9", "user:s3cret@127.0.0.1"])
def test_a_password_is_shown_nowhere_and_odd_urls_are_no_traceback(place: str) -> None:
    url = f"http://{place}/simple"
    options, said = options_of(TORCH_INDEX=url)
    assert "s3cret" not in said
    assert "Traceback" not in said
    assert options == []
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_install"],
        env=environment(PIP_INDEX_URL=url),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "the index can't be asked" in done.stdout
    assert "s3cret" not in done.stdout + done.stderr


# -- constraints


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return tool("check_install")


def test_constraints_meet_what_torch_with_cuda_declared(check: ModuleType) -> None:
    pins = check.pinned_versions((ROOT / "constraints.txt").read_text())
    record = check.from_record(pins["torch"])
    assert record is not None, "tools/check_install --record, with the new torch"
    every = record["declared"]
    assert list(every) == ["3.11", "3.12", "3.13"]
    for declared in every.values():
        assert any(line.startswith("triton==") for line in declared["torch"])
        assert check.unmet(declared, pins) == []


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"torch": "2.13.0", "triton": "3.9.0"}, "torch 2.13.0 needs triton==3.7.1, there is"),
        ({"torch": "2.13.0"}, "torch 2.13.0 needs triton==3.7.1, which has no version there"),
    ],
)
def test_what_does_not_fit_is_named(check: ModuleType, pins: dict[str, str], says: str) -> None:
    versions = {name: Version(version) for name, version in pins.items()}
    (wrong,) = check.unmet({"torch": ["triton==3.7.1"]}, versions)
    assert wrong.startswith(says)


def test_an_index_that_cannot_be_asked_is_said_to_be(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{NOWHERE}/simple")
    assert check.main([]) == 0
    assert "the index can't be asked" in capsys.readouterr().out
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"torch": "1.0.0", "declared": {}}))
    monkeypatch.setattr(check, "RECORD", record)
    assert check.main([]) == 2
    assert "another version of torch" in capsys.readouterr().err
