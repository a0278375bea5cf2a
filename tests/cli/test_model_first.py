"""`run MODEL [PROMPT]`: the word that is the model, and the message if there is none."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from aioserve.cli import app
from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.terminal import CTRL_D, Terminal

TYPE = "for the embedded model type: aioserve run pyhelp"


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a directory where no word is a name by chance."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_directory_is_the_model_and_not_a_prompt(aioserve_here: Run, tiny_model: Path) -> None:
    done = aioserve_here("run", tiny_model, "x", "--max-tokens", 2, "--verbose")
    assert done.returncode == 0, done.stderr
    served = aioserve_here("run", "./llama")
    assert (served.returncode, served.stdout) == (2, "")
    assert "no directory llama" in served.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["What does x do?"], f"'What does x do?' is no model; {TYPE} 'What does x do?'"),
        (["hello"], f"; if it is a prompt, {TYPE} hello"),
        (["what is a/b?"], f"'what is a/b?' is no model; {TYPE} 'what is a/b?'"),
        (["x\ny"], rf"'x\ny' is no model; {TYPE} " '"..."'),
        (["it's " * 50], f'{TYPE} "..."'),
        (["pyhlep"], "'pyhlep' is no model; did you mean: aioserve run pyhelp"),
        (["Pyhelp", "x y"], "'Pyhelp' is no model; did you mean: aioserve run pyhelp 'x y'"),
        (
            ["What is x?", "pyhelp"],
            "'What is x?' is no model; the model comes first, type: aioserve run pyhelp "
            "'What is x?'",
        ),
        (["./absent", "x"], "no directory absent"),
        (["random:9t", "x"], "there are: random:30m, random:0.6b"),
        (["", "x"], "a model must be named, got an empty string"),
        (["pyhelp", ""], "the prompt must not be empty"),
        ([], "MODEL is missing; usage: aioserve run MODEL [PROMPT] [OPTIONS]"),
        (["--max-tokens", "2"], "MODEL is missing; usage: aioserve run MODEL [PROMPT] [OPTIONS]"),
        (["--model", "pyhelp", "x"], "the model comes first, without --model; usage: aioserve run"),
        (["--model=pyhelp", "x"], "the model comes first, without --model; usage: aioserve run"),
        (["--", "-x"], f"; if it is a prompt, {TYPE} -- -x"),
        (["gpt2"], "or OWNER/NAME at the Hugging Face hub, as Qwen/Qwen3-0.6B"),
        (["and/or", "pyhelp"], "the model comes first, type: aioserve run pyhelp and/or"),
        (["pyhelp", "-x y"], "A prompt that begins with a hyphen comes after --, as in: "),
        (["pyhelp", "--no-such"], "Unknown option: --no-such"),
        (
            ["pyhelp", "--", "x", "--max-tokens", "2"],
            "'--max-tokens' is one word too many: options come before --",
        ),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_a_word_that_is_no_model_is_told_with_what_to_type(
    aioserve_here: Run, words: list[str], told: str
) -> None:
    done = aioserve_here("run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_prompt_of_the_name_of_a_directory_is_a_prompt(
    aioserve_here: Run, empty_directory: Path
) -> None:
    (empty_directory / "llama").mkdir()
    for prompt in ("llama", "./llama"):
        done = aioserve_here("run", "pyhelp", prompt, "--max-tokens", 2)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("prompt", ["-5 + 3", "--help", "-", "--"])
def test_what_comes_after_two_hyphens_is_the_prompt(
    aioserve_here: Run, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    done = aioserve_here("run", "pyhelp", "--max-tokens", "1", "--", prompt)
    assert done.returncode == 0, done.stderr
    assert "1 output token " in done.stderr


def test_a_prompt_that_is_not_given_is_read_from_stdin(
    aioserve_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--raw", "--temperature", 0, "--max-tokens", 8)
    given = aioserve_here("run", "pyhelp", "def fibonacci(n):", *options)
    monkeypatch.setattr("sys.stdin", io.StringIO("def fibonacci(n):"))
    piped = aioserve_here("run", "pyhelp", *options)
    assert (piped.returncode, piped.stdout) == (0, given.stdout)


def test_an_empty_stdin_is_an_error_and_a_model_comes_before_it(
    aioserve_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    done = aioserve_here("run", "pyhelp")
    assert done.returncode == 2
    assert done.stderr == "aioserve: the prompt on stdin must not be empty\n"
    assert "is no model" in aioserve_here("run", "hello there").stderr


def test_without_a_prompt_a_terminal_gets_a_chat(forking: Forks) -> None:
    with Terminal("run", "pyhelp", "--max-tokens", "4", forks=forking) as terminal:
        terminal.expect("> ")
        terminal.send("What does os.listdir do?\n")
        terminal.expect(r"\[\d+ prompt tokens .*\]")
        terminal.expect("> ")
        terminal.send(CTRL_D)
        assert terminal.exit_code() == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "What does x do?"), "is no model; for the embedded model type: "),
        (("run", "pyhelp", "--raw"), "--raw needs a prompt"),
        (("run", "{model}"), "has no chat template: type a prompt behind it, as in aioserve run "),
        (("chat", "{model}"), "has no chat template: type a prompt behind it, as in aioserve run "),
    ],
    ids=" ".join,
)
def test_what_cant_be_a_chat_is_told_on_a_terminal(
    forking: Forks, words: tuple[str, ...], told: str, tiny_model: Path
) -> None:
    filled = [word.format(model=tiny_model) for word in words]
    with Terminal(*filled, forks=forking) as terminal:
        assert terminal.exit_code() == 2
        assert told in terminal.seen
        assert "Traceback" not in terminal.seen


@pytest.mark.parametrize("verb", [("run",), ("plan",), ("bench", "latency")])
@pytest.mark.parametrize("name", ["model.gguf", "models"])
def test_a_gguf_file_that_is_broken_is_one_line(
    aioserve_here: Run, empty_directory: Path, verb: tuple[str, ...], name: str
) -> None:
    (empty_directory / "models").mkdir()
    for file in ("model.gguf", "models/Q4.GGUF"):
        (empty_directory / file).write_bytes(b"GGUF")
    done = aioserve_here(*verb, name, *(["x"] if verb == ("run",) else []))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "not a complete GGUF file: the version ends at byte 8" in done.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("run", "aioserve run MODEL [PROMPT] [OPTIONS]"),
        ("chat", "aioserve chat [MODEL] [OPTIONS]"),
        ("serve", "aioserve serve [MODEL] [OPTIONS]"),
        ("doctor", "aioserve doctor [MODEL] [OPTIONS]"),
        ("plan", "aioserve plan MODEL [OPTIONS]"),
        ("calibrate", "aioserve calibrate [MODEL] --output FILE [OPTIONS]"),
        ("evaluate", "aioserve evaluate MODEL --text FILE [OPTIONS]"),
        ("quantize", "aioserve quantize MODEL OUT --method METHOD [OPTIONS]"),
        ("bench throughput", "aioserve bench throughput [MODEL] [OPTIONS]"),
        ("bench latency", "aioserve bench latency [MODEL] [OPTIONS]"),
    ],
)
def test_help_shows_where_the_model_goes(aioserve_here: Run, verb: str, usage: str) -> None:
    assert aioserve_here(*verb.split(), "--help").stdout.startswith(f"Usage: {usage}\n")


def test_only_verbs_that_run_a_trace_have_an_option_for_a_model() -> None:
    def options(*chain: str) -> set[str]:
        command = app
        for name in chain:
            command = command[name]
        return {name for one in command.assemble_argument_collection() for name in one.names}

    verbs = [name for name in app if not name.startswith("-") and name not in ("bench", "plugins")]
    chains = [(name,) for name in verbs] + [("bench", "throughput"), ("bench", "latency")]
    assert {chain for chain in chains if "--model" in options(*chain)} == {
        ("simulate",),
        ("sweep",),
    }


def test_doctor_tells_of_the_model_that_it_is_given(
    aioserve_here: Run, tiny_model: Path, tmp_path: Path
) -> None:
    shown = json.loads(aioserve_here("doctor", tiny_model, "--json").stdout)["model asked for"]
    assert shown["path"] == str(tiny_model)
    assert shown["architecture"] == "Qwen3ForCausalLM"
    assert (shown["weight_files"], shown["chat_template"]) == (1, False)
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    shown = json.loads(aioserve_here("doctor", tmp_path, "--json").stdout)["model asked for"]
    assert "NoSuchForCausalLM" in shown["error"]
    absent = aioserve_here("doctor", "./absent")
    assert (absent.returncode, absent.stdout) == (2, "")


def test_a_terminal_is_what_stdin_is_and_not_stdout(
    aioserve_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    done = aioserve_here("run", "pyhelp", "--max-tokens", 1)
    assert "1 output token " in done.stderr
