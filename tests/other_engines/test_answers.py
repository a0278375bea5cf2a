"""Names of other engines' arguments and options are answered with the name here."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
from cyclopts import App

from aioserve import Engine, SamplingParams, Speculation, StructuredOutput
from aioserve.cli import app, option_names
from aioserve.cli.serve import SETTINGS
from aioserve.config import EngineConfig
from aioserve.other_engines.answers import (
    ROWS,
    named_in,
    on_command_line,
    own_names,
    unknown_in_python,
)
from aioserve.other_engines.families import FAMILIES, SHORT
from aioserve.other_engines.rows import DOORS, Home, Row
from aioserve.testing import FakeModel
from tests.other_engines import documented

CALLS = ("stream", "generate", "chat")
COMMANDS = {
    Home.SERVE: ("serve",),
    Home.RUN: ("run",),
    Home.LOAD: ("bench", "serve"),
    Home.BENCH: ("bench", "throughput"),
    Home.PLAN: ("plan",),
}
HELP = {"-h", "--help", "--usage", "--version"}


def arguments_of(call: Any) -> set[str]:
    return set(inspect.signature(call).parameters) - {"self"}


KNOWN: dict[str, set[str]] = {
    "Engine": arguments_of(Engine),
    "EngineConfig": set(EngineConfig.__struct_fields__),
    "SamplingParams": set(SamplingParams.__struct_fields__),
    "StructuredOutput": set(StructuredOutput.__struct_fields__),
    "Speculation": set(Speculation.__struct_fields__),
    **{call: arguments_of(getattr(Engine, call)) for call in (*CALLS, "embed", "beam_search")},
}


def options_of(*commands: str) -> set[str]:
    found: App = app
    for command in commands:
        found = found[command]
    return option_names(found.default_command)


def names_at(home: Home) -> set[str]:
    if home in COMMANDS:
        return options_of(*COMMANDS[home])
    if home is Home.CALL:
        return set().union(*[KNOWN[call] for call in CALLS])
    if home is Home.ENGINE:
        # Those of speculation are options of commands, and fields of `Speculation` in Python.
        return KNOWN["Engine"] | {one for one in options_of("serve") if "speculation" in one}
    return KNOWN[home.value] if home is not Home.ANY else set()


@pytest.mark.parametrize("row", [*ROWS, *FAMILIES], ids=lambda row: row.names.split()[0])
def test_every_answer_names_what_there_is_where_it_says(row: Row) -> None:
    assert named_in(row.answer) <= names_at(row.home)
    assert bool(named_in(row.answer)) == (row.home is not Home.ANY)
    assert row in FAMILIES or not set(row.names.split()) & names_at(row.home)


def test_no_name_stands_twice_for_one_place() -> None:
    places = Counter((row.home, name) for row in ROWS for name in row.names.split())
    assert [place for place, count in places.items() if count > 1] == []


def test_our_own_names_are_those_that_there_are() -> None:
    serve = {setting.name for setting in SETTINGS if setting.table == "server"}
    assert own_names(Home.SERVE) == serve
    for home in DOORS:
        assert own_names(home) == {
            name
            for name in names_at(home)
            if home is not Home.ENGINE or not name.startswith("speculation_")
        }


def test_short_options_stand_for_names_that_are_answered() -> None:
    known = options_of("serve")
    for option in SHORT:
        assert option not in HELP
        assert SHORT[option] in known or on_command_line(option, known), option


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("Engine", documented.VLLM_ENGINE),
        ("Engine", documented.LLAMA_ENGINE),
        ("Engine", documented.SGLANG_ENGINE),
        ("Engine", documented.TRANSFORMERS_LOADING),
        ("Engine", documented.OLLAMA_OPTIONS),
        ("EngineConfig", documented.VLLM_ENGINE),
        ("StructuredOutput", documented.VLLM_FORMS),
        ("SamplingParams", documented.VLLM_SAMPLING),
        ("SamplingParams", documented.VLLM_BEAMS),
        ("SamplingParams", documented.SGLANG_SAMPLING),
        ("SamplingParams", documented.LLAMA_CALLS),
        ("SamplingParams", documented.OLLAMA_OPTIONS),
        ("SamplingParams", documented.TRANSFORMERS_CALLS),
        *[
            (call, names)
            for call in CALLS
            for names in (
                documented.VLLM_CALLS,
                documented.VLLM_SAMPLING,
                documented.LLAMA_CALLS,
                documented.SGLANG_CALLS,
                documented.OLLAMA_OPTIONS,
                documented.TRANSFORMERS_CALLS,
            )
        ],
    ],
)
def test_what_others_document_in_python_is_taken_or_answered(call: str, names: str) -> None:
    known = KNOWN[call] | (KNOWN["SamplingParams"] if call in CALLS else set())
    for name in set(names.split()) - known:
        said = unknown_in_python(call, name, known)
        assert said.startswith(f"{call}() takes no {name!r}: "), said
        assert "{" not in said.replace('{"enable_thinking": False}', ""), said


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("serve", documented.VLLM_ENGINE),
        ("serve", documented.VLLM_SERVER),
        ("serve", documented.SGLANG_ENGINE),
        ("serve", documented.SGLANG_FLAGS),
        ("serve", documented.LLAMA_SERVER_FLAGS),
        ("serve", documented.MLX_FLAGS),
        ("serve", documented.TGI_FLAGS),
        ("run", documented.LLAMA_CLI_FLAGS),
        ("run", documented.OLLAMA_FLAGS),
        ("run", documented.OLLAMA_OPTIONS),
        ("chat", documented.LLAMA_CLI_FLAGS),
        ("chat", documented.OLLAMA_FLAGS),
        ("plan", documented.VLLM_ENGINE),
    ],
)
def test_what_others_document_for_commands_is_taken_or_answered(command: str, names: str) -> None:
    known = options_of(command)
    for name in names.split():
        option = name if name.startswith("-") else f"--{name.replace('_', '-')}"
        own = option.removeprefix("--no-").removeprefix("--").replace("-", "_")
        # `--model` has an answer of its own.
        if option in HELP or own in known or own == "model":
            continue
        said = on_command_line(option, known)
        assert said is not None, option
        assert said.startswith(f"{option} isn't an option here: "), said
        assert "{" not in said.replace('{"enable_thinking": False}', ""), said


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        ("Engine", "n_ctx", "it is max_model_len"),
        ("Engine", "context_length", "it is max_model_len"),
        (
            "Engine",
            "tensor_parallel_size",
            "a model runs on one device: several GPUs aren't suppor",
        ),
        ("Engine", "max_batch_size", "it is max_num_seqs"),
        ("Engine", "max_chunk_size", "it is max_num_batched_tokens, of a step"),
        ("Engine", "timeout", "it is deadline_seconds (an argument of stream, generate and chat)"),
        ("Engine", "temperature", "it is an argument of SamplingParams"),
        (
            "Engine",
            "served_model_name",
            "it is --served-model-names (an option of `aioserve serve`)",
        ),
        ("Engine", "num_speculative_tokens", "it is max_tokens of Speculation"),
        ("Engine", "enforce_eager", "it is capture_graphs=False"),
        ("Engine", "draft_model", 'it is speculation="model:path=PATH"'),
        ("Speculation", "n_ctx", "it is max_model_len (an argument of Engine)"),
        ("Speculation", "draft_n", "it is max_tokens of Speculation"),
        ("SamplingParams", "max_new_tokens", "it is max_tokens"),
        ("SamplingParams", "do_sample", "temperature=0 is greedy"),
        ("SamplingParams", "num_beams", "a beam search is a call of its own"),
        ("SamplingParams", "n_ctx", "it is max_model_len (an argument of Engine)"),
        ("StructuredOutput", "guided_regex", "it is regex"),
        ("generate", "timeout", "it is deadline_seconds"),
        (
            "generate",
            "n_predict",
            "it is max_tokens (an argument of SamplingParams, which goes into",
        ),
        ("chat", "page_size", "it is an argument of Engine"),
        (
            "stream",
            "use_tqdm",
            "it is progress, of a call with several prompts (an argument of ano",
        ),
        (
            "embed",
            "tool_choice",
            "it is required_tools, the names of what must be called; without ",
        ),
        ("embed", "top_k", "it is an argument of SamplingParams, and a field of requests"),
        ("beam_search", "stop_strings", "it is stop (an argument of SamplingParams, and a field"),
        # Spelled as elsewhere, cut off, or nearly so.
        ("Engine", "nCtx", "it is max_model_len"),
        ("Engine", "gpu-memory-utilization", "it is memory_utilization"),
        ("Engine", "max_running_requets", "it is max_num_seqs"),
        ("Engine", "max_running_req", "it is max_num_seqs"),
    ],
)
def test_a_name_is_answered_as_its_door_writes_it(call: str, name: str, said: str) -> None:
    told = unknown_in_python(call, name, KNOWN[call])
    assert told.startswith(f"{call}() takes no {name!r}: {said}")


@pytest.mark.parametrize(
    ("call", "name", "meant"),
    [("SamplingParams", "maxTokens", "max_tokens"), ("Engine", "max-model-len", "max_model_len")],
)
def test_an_argument_of_the_door_itself_is_meant_by_its_other_spellings(call, name, meant) -> None:
    told = unknown_in_python(call, name, KNOWN[call])
    assert told.endswith(f"{name!r}; did you mean {meant}?")


@pytest.mark.parametrize("name", ["qqq", "unheard_of", "tok", ""])
def test_a_name_of_nobody_has_the_error_of_python(name: str) -> None:
    told = unknown_in_python("Engine", name, KNOWN["Engine"])
    assert told == f"Engine() got an unexpected keyword argument {name!r}"
    assert on_command_line(f"--{name}", options_of("serve")) is None
    assert on_command_line("-hello", options_of("run")) is None


def test_a_class_that_is_no_door_names_its_nearest_alone() -> None:
    said = "RequestInfo() got an unexpected keyword argument"
    assert unknown_in_python("RequestInfo", "cache", ["tenant"]) == f"{said} 'cache'"
    assert unknown_in_python("RequestInfo", "tennant", ["tenant"]).endswith("did you mean tenant?")


@pytest.mark.asyncio
async def test_every_door_of_the_library_answers() -> None:
    make: Any = SamplingParams
    with pytest.raises(TypeError, match=r"^SamplingParams.. takes no 'num_predict': it is max_tok"):
        make(num_predict=5)
    doors: list[Any] = [StructuredOutput, Speculation, EngineConfig]
    for door, name, said in zip(
        doors,
        ("guided_regex", "num_speculative_tokens", "n_ctx"),
        ("regex", "max_tokens of Speculation", "max_model_len"),
        strict=True,
    ):
        with pytest.raises(TypeError, match=rf"takes no '{name}': it is {said}$"):
            door(**{name: 1})
    options: dict[str, Any] = {"n_ctx": 4096}
    with pytest.raises(TypeError, match=r"^Engine.. takes no 'n_ctx': it is max_model_len$"):
        Engine(**options)
    async with Engine(FakeModel()) as engine:
        call: Any = engine
        with pytest.raises(TypeError, match=r"^generate.. takes no 'timeout': it is deadline_sec"):
            await call.generate([1], timeout=5)
        with pytest.raises(TypeError, match=r"^stream.. takes no 'max_new_tokens': it is max_tok"):
            call.stream([1], max_new_tokens=5)
        with pytest.raises(
            TypeError, match=r"^chat.. takes no 'tool_choice': it is required_tools"
        ):
            call.chat([], tool_choice="auto")
        with pytest.raises(TypeError, match=r"it is progress, of a call with several prompts$"):
            await call.generate([1], use_tqdm=True)
        with pytest.raises(TypeError, match=r"prompt: text, token ids or messages$"):
            call.stream([1], input_ids=[1])
        with pytest.raises(
            TypeError, match=r"^embed.. takes no 'max_tokens': it is an argument of"
        ):
            await call.embed([1], max_tokens=5)
