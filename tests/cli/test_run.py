"""`aioserve run`: the answer on stdout, all else on stderr, exit codes for scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.testing.random_model import write_random_model
from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.terminal import CTRL_C, Terminal
from tests.waits import LIMIT_SECONDS

COUNTS = re.compile(
    r"\[\d+ prompt tokens? · (\d+) output tokens? · first token \d+ ms · [\d.]+ tokens/s · (\w+)\]"
)


def test_the_answer_goes_to_stdout_and_the_counts_to_stderr(aioserve: Run) -> None:
    done = aioserve("run", "pyhelp", "What does json.dumps do?", "--max-tokens", 12)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    counts = COUNTS.fullmatch(done.stderr.strip())
    assert counts
    assert 1 <= int(counts.group(1)) <= 12


@pytest.mark.more
def test_a_prompt_of_one_hyphen_is_read_from_stdin(aioserve: Run, aioserve_here: Run) -> None:
    options = ("--raw", "--temperature", 0, "--max-tokens", 8)
    given = aioserve_here("run", "pyhelp", "def fibonacci(n):", *options)
    piped = aioserve("run", "pyhelp", "-", *options, stdin="def fibonacci(n):")
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == given.stdout


def test_drafts_change_no_text_and_are_counted(aioserve_here: Run) -> None:
    asked = ("run", "pyhelp", "import json\nimport os\n" * 4, "--raw", "--temperature", 0)
    plain = aioserve_here(*asked, "--max-tokens", 24)
    drafted = aioserve_here(*asked, "--max-tokens", 24, "--speculation", "ngram:min_ngram=1")
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    assert re.search(r"output tokens \(\d+ of \d+ draft tokens? right\)", drafted.stderr)
    assert "draft" not in plain.stderr


def test_a_seed_repeats_a_sampled_answer(aioserve_here: Run, tiny_model: Path) -> None:
    options = ("--max-tokens", 12, "--temperature", 1)
    first, second, other = (
        aioserve_here("run", tiny_model, "x", *options, "--seed", s).stdout for s in (1, 1, 2)
    )
    assert first == second != other


def test_a_stop_string_ends_the_answer(aioserve_here: Run) -> None:
    options = ("--raw", "--temperature", 0, "--max-tokens", 24)
    whole = aioserve_here("run", "pyhelp", "import os\n", *options).stdout.rstrip("\n")
    stop = whole[len(whole) // 2 :][:3]
    stopped = aioserve_here("run", "pyhelp", "import os\n", *options, "--stop", stop)
    assert stopped.stdout.rstrip("\n") == whole[: whole.index(stop)].rstrip("\n")
    assert stopped.stderr.strip().endswith("stop]")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["run", "/no/such/model", "hello"], 2, "/no/such/model"),
        (["run", "pyhelp", ""], 2, "prompt"),
        (["run", "pyhelp", "hello", "--temperature", "-1"], 2, "temperature"),
        (["run", "pyhelp", "hello", "--max-tokens", "0"], 2, "max_tokens"),
        (["run", "pyhelp", "hello", "--raw", "--system", "be brief"], 2, "--system"),
        (["run", "pyhelp", "hello", "--raw", "--chat-template", "x"], 2, "--chat-template"),
        (["run", "pyhelp", "hello", "--chat-template", "/no/such"], 2, "/no/such"),
        (["run", "pyhelp", "x = 1\n" * 20_000, "--raw"], 2, "max_model_len"),
        (["bench", "throughput", "random:9t"], 2, "random:9t"),
        (["bench", "latency", "--json", "/no/such/directory/x"], 2, "/no/such/directory"),
        (["bench", "latency", "pyhelp", "--eviction", "mru"], 2, "eviction"),
        (["bench", "latency", "pyhelp", "--preemption", "swap"], 2, "num_host_pages"),
        (["bench", "latency", "pyhelp", "--policy", "no-such"], 2, "no-such"),
        (["bench", "latency", "--input-len", "4", "--shared-prefix-len", "5"], 2, "input_len=4"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(
    aioserve_here: Run, arguments: list[str], code: int, named: str
) -> None:
    done = aioserve_here(*arguments)
    assert done.returncode == code
    assert not done.stdout
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_chat_template_of_a_file_stands_for_the_models_own(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path
) -> None:
    counts = []
    for times in (1, 3):
        file = tmp_path / f"{times}.jinja"
        file.write_text("{{ messages[0].content }}" * times)
        done = aioserve_here(
            *("run", tiny_model, "abc", "--chat-template", file, "--max-tokens", 1)
        )
        assert done.returncode == 0, done.stderr
        counts.append(int(re.findall(r"\[(\d+) prompt tokens", done.stderr)[0]))
    assert counts[1] == 3 * counts[0]


def test_a_system_message_needs_a_chat_template(aioserve_here: Run, tiny_model: Path) -> None:
    done = aioserve_here("run", tiny_model, "hello", "--system", "be brief")
    assert done.returncode == 2
    assert "chat template" in done.stderr


def test_a_model_without_weights_fails_with_its_own_code(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path
) -> None:
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = aioserve_here("run", tmp_path, "hello")
    assert done.returncode == 1
    assert "safetensors" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.more
def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    options = ("--raw", "import os\n", "--max-tokens", "400")
    process = subprocess.Popen(
        [sys.executable, "-m", "aioserve", "run", "pyhelp", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(LIMIT_SECONDS) == 141, errors
    assert not errors


def test_a_full_disk_is_one_line(forking: Forks, tiny_model: Path) -> None:
    with open("/dev/full", "w") as full:
        done = forking.run_bytes(
            ["run", str(tiny_model), "x", "--raw"],
            environment=os.environ,
            seconds=200,
            streams={1: full.fileno()},
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [b"aioserve: [Errno 28] No space left on device"]


def test_ctrl_c_ends_the_command_without_a_traceback(
    forking: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    # The answer goes on until Ctrl-C comes: the model has no token that ends it.
    config = json.loads((tiny_model / "config.json").read_text())
    del config["eos_token_id"]
    endless = write_random_model(
        tmp_path / "endless", config | {"max_position_embeddings": 2**17}, dtype="float32"
    )
    arguments = ("run", str(endless), "x", "--temperature", "1")
    with Terminal(*arguments, forks=forking) as terminal:
        terminal.expect(r"\S")
        terminal.send(CTRL_C)
        assert terminal.exit_code() == 130
        assert "Traceback" not in terminal.seen


def test_ctrl_c_while_the_model_loads_leaves_at_once(tiny_model: Path) -> None:
    words = ("run", str(tiny_model), "x")
    with Terminal(*words, module="tests.cli.endless_loading", term="xterm") as terminal:
        terminal.expect("loading")
        terminal.send(CTRL_C)
        assert terminal.exit_code() == 130
        assert "Traceback" not in terminal.seen
        assert terminal.seen.rstrip().endswith("\x1b[?25h"), "the cursor stays hidden"
