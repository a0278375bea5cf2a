"""`aioserve quantize` writes models for the other commands, and refuses what it can't write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.models.gguf.mixes import MIXES
from aioserve.models.quantization.storing import METHODS
from tests.cli.command import Run
from tests.waits import LIMIT_SECONDS, block_until


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_is_served(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "copy"
    done = aioserve_here("quantize", tiny_model, out, "--method", method)
    assert (done.returncode, done.stderr) == (0, "")
    file = out / "model.safetensors"
    assert done.stdout.startswith(f"{out}: {method}, {file.stat().st_size} bytes of weights in 1 f")
    assert f" bytes of {tiny_model}\n" in done.stdout
    words = ("run", out, "Hello", "--max-tokens", "4", "--temperature", "0")
    assert aioserve_here(*words).returncode == 0


@pytest.mark.parametrize("kind", MIXES)
def test_a_file_is_served(aioserve_here: Run, tiny_model: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "model.gguf"
    done = aioserve_here("quantize", tiny_model, out, "--method", f"gguf:{kind}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{out}: gguf:{kind}, {out.stat().st_size} bytes of weights in 1")
    run = ("run", out, "Hello", "--max-tokens", "4", "--temperature", "0")
    assert aioserve_here(*run).returncode == 0
    again = aioserve_here("quantize", tiny_model, out, "--method", f"gguf:{kind}")
    assert again.returncode == 2
    assert "out must be a file that is not there yet" in again.stderr


TEXT = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("words", ["gptq --group-size 64", "awq --group-size 64", "w8a8"])
def test_a_copy_that_was_made_with_a_text_is_served(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path, words: str
) -> None:
    out = tmp_path / "copy"
    texts = ("--calibration", TEXT, "--calibration-tokens", 1024)
    done = aioserve_here("quantize", tiny_model, out, *texts, "--method", *words.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{out}: {words.split()[0]}, ")
    run = ("run", out, "Hello", "--max-tokens", "4", "--temperature", "0")
    assert aioserve_here(*run).returncode == 0


def test_the_size_of_groups_is_taken(aioserve_here: Run, tiny_model: Path, tmp_path: Path) -> None:
    words = ("quantize", tiny_model, tmp_path / "copy", "--method", "w4a16", "--group-size", 64)
    assert aioserve_here(*words).returncode == 0
    said = json.loads((tmp_path / "copy/config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["weights"]["group_size"] == 64


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--method", "gptq"], "calibration must be a text file with method gptq"),
        (["--method", "awq", "--calibration", "no/such"], "calibration: no/such can't be read"),
        (["--method", "int8", "--calibration", "README.md"], "goes with method gptq, awq, w8a8"),
        (["--method", "w8a8", "--smoothquant", "0.5"], "w8a8 and --calibration"),
        (
            ["--method", "w8a8", "--smoothquant", "1.5", "--calibration", "README.md"],
            "smoothquant must be in [0, 1], got 1.5",
        ),
        (["--method", "w8a8", "--calibration-tokens", "9"], "goes with --calibration"),
        (["--method", "int9"], "int9"),
        ([], "method"),
        (
            ["--method", "int8", "--group-size", "32"],
            "group_size must be left out with method int8",
        ),
        (["--method", "gguf:Q4_K_M"], "out must end with .gguf"),
        (["--method", "gguf:Q3_K_M"], "gguf:Q3_K_M"),
        (
            ["--method", "gguf:Q8_0", "--group-size", "32"],
            "group_size must be left out with method gguf:Q8_0",
        ),
        (
            ["--method", "gguf:Q8_0", "--calibration", "README.md"],
            "calibration goes with method gptq, awq, w8a8, not with gguf:Q8_0",
        ),
        (["--method", "w4a16", "--group-size", "48"], "group_size must be 32, 64, 128, got 48"),
        (["--method", "w4a16", "--group-size", "128"], "has 64"),
    ],
)
def test_what_can_not_be_is_one_line_and_leaves_nothing(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path, words: list[str], named: str
) -> None:
    done = aioserve_here("quantize", tiny_model, tmp_path / "copy", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
    assert not any(tmp_path.iterdir())


def test_models_and_places_that_can_not_be_are_named(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    for _ in range(2):
        done = aioserve_here("quantize", tiny_model, out, "--method", "int8")
    assert done.returncode == 2
    assert f"out must be a directory that is empty or not there yet, got {out}" in done.stderr
    done = aioserve_here("quantize", out, tmp_path / "again", "--method", "int8")
    assert done.returncode == 2
    assert "quantised already: its quantization_config says compressed-tensors" in done.stderr
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    words = ("quantize", tmp_path / "model.gguf", tmp_path / "again", "--method", "int8")
    done = aioserve_here(*words)
    assert done.returncode == 2
    assert "model must be a directory with .safetensors, got the GGUF file" in done.stderr
    assert {one.name for one in tmp_path.iterdir()} == {"copy", "model.gguf"}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_half_model(
    tiny_model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from aioserve.models.quantization.storing import Compressed\n"
        "encoded = Compressed.encoded\n"
        "def stuck(*args):\n"
        "    if any(Path(sys.argv[3]).parent.rglob('model.safetensors')):\n"
        "        time.sleep(600)\n"
        "    return encoded(*args)\n"
        "Compressed.encoded = stuck\n"
        "from aioserve.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", code, "quantize", str(tiny_model), str(tmp_path / "copy")]
    process = subprocess.Popen([*command, "--method", "int8"], start_new_session=True)
    try:
        written = ".aioserve-quantize-*/model/model.safetensors"
        block_until(lambda: [*tmp_path.glob(written)] or process.poll() is not None)
        process.send_signal(how)
        assert process.wait(LIMIT_SECONDS) == 128 + how
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not any(tmp_path.iterdir())
