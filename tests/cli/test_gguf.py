"""GGUF files are named like directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aioserve.formats.weights import NATIVE
from aioserve.models.files import model_files
from aioserve.models.reading import WeightReading
from aioserve.simulation.machine import machine_of
from aioserve.simulation.options import TrialOptions
from aioserve.simulation.roofline import RooflineCost
from aioserve.testing.random_model import write_random_model
from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.server_process import ServerProcess
from tests.models.gguf.conversion import convert, with_bytes_vocabulary
from tests.models.test_weight_memory import held_bytes
from tests.parity.tiny_models import CONFIGS


@pytest.fixture
def both(tiny_model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A directory, and the same model as a file."""
    directory = with_bytes_vocabulary(tiny_model, tmp_path / "hf")
    file = tmp_path / "files" / "tiny.gguf"
    file.parent.mkdir()
    return directory, convert(directory, file)


def test_a_file_and_a_directory_that_holds_it_answer_as_the_model_does(
    aioserve_here: Run, both: tuple[Path, Path]
) -> None:
    directory, file = both
    said = [
        aioserve_here("run", model, "def f", "--max-tokens", 12, "--temperature", 0)
        for model in (directory, file, file.parent)
    ]
    assert [done.returncode for done in said] == [0, 0, 0], said[1].stderr
    assert said[0].stdout
    assert said[1].stdout == said[2].stdout == said[0].stdout


def test_a_file_that_is_not_there_is_said_and_no_hub_is_named(
    aioserve_here: Run, both: tuple[Path, Path]
) -> None:
    _, file = both
    for name in ("nothere.gguf", "./nothere.gguf", file.with_name("tiny-q8.gguf")):
        done = aioserve_here("run", name, "hello")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"there is no file {Path(name)}" in done.stderr
        assert "hf download" not in done.stderr
        assert "hub" not in done.stderr
    assert done.stderr.endswith("near it in name: tiny.gguf\n")


def test_doctor_and_plan_know_what_is_in_a_file(
    aioserve_here: Run, both: tuple[Path, Path]
) -> None:
    _, file = both
    facts = json.loads(aioserve_here("doctor", file, "--json").stdout)["model asked for"]
    assert facts["architecture"] == "Qwen3ForCausalLM"
    assert facts["tokenizer"] is True
    assert facts["weight_files"] == 1
    assert facts["formats"].keys() == {"float32"}
    assert aioserve_here("plan", file).returncode == 0


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """File in the formats of "Q4_K_M", which are several."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    directory = write_random_model(tmp_path / "wide", CONFIGS["llama"] | shape, dtype="float32")
    formats = {"attn_v": "Q6_K", "token_embd": "Q8_0"}
    return convert(directory, tmp_path / "mixed.gguf", weights="Q4_K", formats=formats)


def test_plan_tells_the_formats_and_their_bytes(aioserve_here: Run, mixed: Path) -> None:
    text = aioserve_here("plan", mixed).stdout
    assert "parameters in Q4_K, Q8_0, Q6_K, float32, KV in bfloat16" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["Q6_K"][1] == "2"
    found = json.loads(aioserve_here("plan", mixed, "--json").stdout)
    on_cpu, on_gpu = (found["weights"][where]["formats"] for where in ("on_cpu", "on_gpu"))
    assert sum(one["parameters"] for one in on_cpu) == found["num_parameters"]
    assert sum(one["held_bytes"] for one in on_gpu) == found["weight_bytes"]
    with WeightReading(model_files(mixed), formats=NATIVE) as reading:
        weights = reading.read()
    assert sum(one["held_bytes"] for one in on_cpu) == held_bytes(weights)


def test_plan_tells_what_rounding_makes_of_a_model(aioserve_here: Run, mixed: Path) -> None:
    directory = mixed.parent / "wide"
    text = aioserve_here("plan", directory, "--quantization", "int4").stdout
    assert "in int4-g32, int8-g128, float32, KV in float32" in text
    for more, says in (
        ((directory, "--quantization", "int3"), "quantization must be one of int8, int4"),
        (("llama-3-8b", "--quantization", "int4"), "needs a model whose weights are here"),
        (
            (directory, "--quantization", "int4", "--dtype", "int4"),
            "dtype or quantization, and not",
        ),
        ((mixed, "--quantization", "int4"), "must be left out with a model whose weights are"),
    ):
        done = aioserve_here("plan", *more)
        assert done.returncode == 2
        assert says in done.stderr


def test_a_simulated_step_reads_the_bytes_that_are_held(mixed: Path) -> None:
    directory = str(mixed.parent / "wide")
    cost, plain = (
        machine_of(TrialOptions(model=model, hardware="cpu", page_size=16, num_pages=64)).cost
        for model in (str(mixed), directory)
    )
    with WeightReading(model_files(mixed), formats=NATIVE) as reading:
        expected = reading.expected_memory.step_bytes
    assert isinstance(cost, RooflineCost)
    assert isinstance(plain, RooflineCost)
    assert cost.model.weight_bytes(1) == expected
    assert plain.model.weight_bytes(1) > 4 * expected, "its weights are float32"


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_run_says_that_a_file_has_no_chat_template_and_what_to_do(
    aioserve_here: Run, both: tuple[Path, Path], tmp_path: Path
) -> None:
    file = both[1]
    (template := tmp_path / "x.jinja").write_text(TEMPLATE)
    for more, told in (((), True), (("--raw",), False), (("--chat-template", template), False)):
        done = aioserve_here("run", file, "def f", "--max-tokens", 2, *more)
        assert done.returncode == 0, done.stderr
        assert (f"{file} has no chat template: the prompt is completed" in done.stderr) is told
        assert ("--chat-template FILE gives it one" in done.stderr) is told


def test_chat_says_that_a_file_has_no_chat_template_and_what_to_do(
    aioserve_here: Run, both: tuple[Path, Path]
) -> None:
    done = aioserve_here("chat", both[1])
    assert done.returncode == 2
    assert "which completes it, or give a template with --chat-template FILE" in done.stderr


@pytest.mark.more
def test_serve_says_that_a_file_has_no_chat_template_and_what_to_do(
    forking: Forks, both: tuple[Path, Path], tmp_path: Path
) -> None:
    (template := tmp_path / "x.jinja").write_text(TEMPLATE)
    said = "has no chat template: texts are completed, and messages are refused"
    for more, told in (((), True), (("--chat-template", template), False)):
        with ServerProcess(both[1], *more, forks=forking) as server:
            seen = server.expect(r"(?s).*try: curl")[0]
        assert (said in seen) is told


@pytest.mark.parametrize(
    "words",
    [
        *((verb,) for verb in ("run", "chat", "serve", "plan", "doctor", "evaluate", "calibrate")),
        ("bench", "latency"),
        ("bench", "throughput"),
    ],
    ids=" ".join,
)
def test_help_names_files_of_gguf(words: tuple[str, ...], aioserve_here: Run) -> None:
    shown = " ".join(aioserve_here(*words, "--help").stdout.split())
    assert "GGUF file" in shown.replace("│ │ ", "")
