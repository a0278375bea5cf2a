"""Any words on the command line bring a command to a documented end. It succeeds, or it prints one
line on stderr and exits with 1 or 2.

The words are read and checked as always. What would take long afterwards is not begun.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aioserve import AioserveError, Engine
from aioserve.capacity.models import PRESETS
from aioserve.cli import app, main
from aioserve.cli._models import SHAPES
from tests.attacks.hostile import MAX_MESSAGE_CHARS, hostile_texts
from tests.timing import computing_at_most

VERBS = (
    ("run",),
    ("chat",),
    ("bench", "throughput"),
    ("bench", "latency"),
    ("bench", "serve"),
    ("doctor",),
    ("plan",),
    ("simulate",),
    ("sweep",),
    ("calibrate",),
    ("evaluate",),
    ("quantize",),
    ("plugins",),
    ("plugins", "check"),
    ("plugins", "new"),
)
NO_TEXT = os.fsdecode(b"caf\xe9")
"""A word that is no text, and a directory of that name with a model's config.json."""
MAX_SECONDS = 5.0
PLAIN = (
    *("0", "1", "2", "16", "-1", "0.5", "1e3", "4K", "on", "true", "no", "auto", "float32", "fp8"),
    *("fcfs", "lru", "round_robin:chunk_size=8", "cpu", "bursts", "llama-3-8b", "pyhelp"),
    *("http://127.0.0.1:1", "chat", "text", "gamma:2"),
    *("x.json", "-", "x.csv", "ttft_p99=2", "max_num_seqs=4,8", "1,2,4"),
)
NUMBERS = (
    *("1.5", "0x3", "0b1", "1_000", "١٢", "²", "nan", "inf", "-inf", "1e999", "1e-999", " 1", "1 "),
    *("+1", "--1", "-.5", "1.", "1j", "1:2", str(2**31), str(2**63), str(10**18), "9" * 5000),
)
WORDS = (
    *("", " ", "--", "-", "-h", "--help", "--version", "---", "--=", "=", "@x", "{}", '{"a":1}'),
    *("[]", "[1,2]", "null", "None", ":", ":=", "a:b=c,d", "fcfs:", "fcfs:x=1", "fcfs:=", "../.."),
    *("/", "/dev/null", "/dev/zero", ".", "~nosuchuser/x", "~", "x" * 5000, "\n", "\x1b[31m", "\r"),
    *(NO_TEXT, "\ud800", "random:9t", "random:", "random:30m", "__complete"),
)


class Begun(AioserveError):
    """The words were right, and the command has begun what takes long."""


def begin(*_: object, **__: object) -> NoReturn:
    raise Begun("begun")


@pytest.fixture(scope="module", autouse=True)
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Begin nothing long, and yield the directory in which files are written."""
    directory = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("XDG_CACHE_HOME", str(directory))
        patch.setattr(Engine, "__aenter__", begin)
        patch.setattr("aioserve.cli._models.download", begin)
        patch.setattr("aioserve.cli._http_load.measure.measure_server", begin)
        patch.setattr("aioserve.models.quantization.quantized_copy.beside", begin)
        patch.setattr("aioserve.models.gguf.copy.beside", begin)
        for shape in SHAPES:  # they are there already
            config = directory / "aioserve/random" / f"qwen3-{shape}" / "config.json"
            config.parent.mkdir(parents=True)
            config.write_text("{}")
        patch.setattr("aioserve.testing.trial.simulate", begin)
        patch.setattr("aioserve.cli._sweep_runs.ProcessPoolExecutor", begin)
        for kind in ("policy", "eviction", "observer", "admission"):
            patch.setattr(f"aioserve.testing.check_{kind}", begin)
        patch.setattr("sys.stdin", io.StringIO("a prompt\n"))
        (directory / "text.txt").write_text("Lorem ipsum\n")
        (directory / NO_TEXT).mkdir()
        (directory / NO_TEXT / "config.json").write_text(json.dumps(PRESETS["llama-3-8b"]))
        yield directory


def options_of(verb: tuple[str, ...]) -> list[str]:
    command: Any = app
    for name in verb:
        command = command[name]
    names = {name for one in command.assemble_argument_collection() for name in one.names}
    # `plugins new` writes where it is told: here, and nowhere else.
    return sorted(name for name in names if name.startswith("-") and name != "--dir")


def values() -> st.SearchStrategy[str]:
    texts = st.one_of(hostile_texts(), st.binary(max_size=6).map(os.fsdecode))
    return st.one_of(
        st.sampled_from(PLAIN),
        st.sampled_from(NUMBERS),
        st.sampled_from(WORDS),
        st.integers(-10, 10**7).map(str),
        texts.map(lambda text: text.replace("\x00", "")),
    )


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A verb, options of it with values, some cut short or glued together, and words between."""
    verb = draw(st.sampled_from(VERBS))
    options = options_of(verb)
    words = list(verb)
    if verb == ("run",):
        words.append(draw(st.sampled_from(["pyhelp", "random:30m", NO_TEXT]) | values()))
        words += draw(st.sampled_from([[], ["--"]]))
    if verb[0] in ("run", "plan") or verb[1:] in (("check",), ("new",)):
        words.append(draw(values()))
    if verb == ("bench", "serve"):
        words.append(draw(st.just("http://127.0.0.1:1") | values()))
    if verb == ("calibrate",):
        words += ["-o", "table.json"]
    if verb == ("evaluate",):
        words += [
            draw(st.just("pyhelp") | values()),
            "--text",
            draw(st.just("text.txt") | values()),
        ]
    if verb == ("quantize",):
        words += [
            draw(st.just("pyhelp") | values()),
            draw(st.sampled_from(["copy", "copy.gguf"]) | values()),
            "--method",
            draw(st.sampled_from(["int8", "w4a16", "gptq", "gguf:Q8_0"]) | values()),
        ]
    for _ in range(draw(st.integers(0, 4))):
        option = draw(st.sampled_from([*options, "--no-such-option", "-x"]))
        value = draw(values())
        words += draw(
            st.sampled_from(
                [
                    [option, value],
                    [option, value],
                    [f"{option}={value}"],
                    [option],
                    [option[: draw(st.integers(1, len(option)))], value],
                    [value],
                ]
            )
        )
    # As a process is given them: bytes, of which those that are no text become surrogates.
    return [os.fsdecode(word.encode("utf-8", "surrogatepass")) for word in words]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(command_lines())
@example(["run", "pyhelp", "x", "--max-tokens", "1.5"])
@example(["run", "pyhelp", "x", "--max-tokens", "0x3"])
@example(["run", "What does json.dumps do?"])
@example(["run", "owner/name", "x"])
@example(["run", "x" * 5000, "pyhelp"])
@example(["run", "~nosuchuser"])
@example(["run", "\ud800"])
@example(["run"])
@example(["plan", "llama-3-8b", "--json", "--context", "1" * 13])
@example(["plugins", "check", "fcfs", "--examples", "9" * 20])
@example(["bench", "throughput", "--output-len", "1000000", "--num-prompts", "1" * 19])
@example(["sweep", "--synthetic", "bursts", "--csv", f"{NO_TEXT}/runs.csv", "--jobs", "1"])
@example(["sweep", "--synthetic", "bursts", "--vary", f"eviction={NO_TEXT}"])
@example(["sweep", "--synthetic", "bursts", "--vary", "seed=1"])
@example(["sweep", "--synthetic", "bursts", "--rates", "9" * 5000])
@example(["sweep", "--synthetic", "bursts", "--vary", "max_num_seqs=" + "9" * 5000])
@example(["calibrate", "-o", f"{NO_TEXT}/table.json"])
@example(["evaluate", "pyhelp", "--text", "/dev/zero"])
@example(["evaluate", "pyhelp", "--text", NO_TEXT, "--reference", NO_TEXT])
@example(["quantize", "pyhelp", NO_TEXT, "--method", "int8"])
@example(["quantize", NO_TEXT, "copy", "--method", "w4a16", "--group-size", "9" * 5000])
@example(["quantize", "pyhelp", "copy", "--method", "gptq", "--calibration", "/dev/zero"])
@example(["quantize", "pyhelp", "copy", "--method", "awq", "--calibration", NO_TEXT])
@example(["quantize", "pyhelp", "copy", "--method", "w8a8", "--smoothquant", "nan"])
@example(["quantize", "pyhelp", "\ud800.gguf", "--method", "gguf:Q4_K_M"])
@example(["quantize", NO_TEXT, "copy.gguf", "--method", "gguf:Q8_0"])
@example(["plan", NO_TEXT, "--json"])
@example(["plan", NO_TEXT])
@example(["bench", "latency", NO_TEXT])
def test_fuzz_a_command_line_comes_to_a_documented_end(words: list[str]) -> None:
    output, errors = io.StringIO(), io.StringIO()
    with (
        computing_at_most(MAX_SECONDS),
        redirect_stdout(output),
        redirect_stderr(errors),
        pytest.raises(SystemExit) as leaving,
    ):
        main(words)
    assert leaving.value.code in (0, 1, 2)
    if leaving.value.code:
        (line,) = errors.getvalue().splitlines()
        assert line.startswith("aioserve: ")
        assert len(line) <= MAX_MESSAGE_CHARS
        assert line.isprintable()
    else:
        assert output.getvalue()


@st.composite
def numbers(draw: st.DrawFn) -> tuple[str, str]:
    option = draw(st.sampled_from(["--max-tokens", "--top-k", "--seed", "--temperature"]))
    value = draw(
        st.one_of(st.sampled_from(NUMBERS), st.text("0123456789+-._exnaifjb ", max_size=8))
    )
    return option, value


@settings(deadline=None)
@given(numbers())
def test_fuzz_a_number_is_plain_or_refused_by_its_option(one: tuple[str, str]) -> None:
    option, value = one
    errors = io.StringIO()
    with redirect_stderr(errors), pytest.raises(SystemExit):
        main(["run", "pyhelp", "x", f"{option}={value}"])
    text = errors.getvalue()
    digits = value[1:] if value[:1] in ("+", "-") and value[1:] else value
    if option != "--temperature" and not (digits.isascii() and digits.isdigit()):
        assert text.startswith(f"aioserve: {option} must be a whole number of at most 20 digits")
    elif option == "--temperature" and set(digits) - set("0123456789.e+-E"):
        assert text.startswith(f"aioserve: {option} must be a decimal number, got ")
    assert text.count("\n") == 1
