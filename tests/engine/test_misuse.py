"""Common misuse by callers: the error says how to do it right."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from aioserve import (
    ConfigError,
    DraftedSequence,
    Engine,
    EngineConfig,
    InvalidPromptError,
    InvalidSamplingError,
    PluginError,
    RequestInfo,
    SamplingParams,
    Speculation,
    StructuredOutput,
    UnknownPolicyError,
)
from aioserve.testing import FakeModel


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("topk", "'topk'; did you mean top_k?"),
        ("Temperature", "'Temperature'; did you mean temperature?"),
        ("qqq", "'qqq'"),
    ],
)
def test_a_parameter_that_is_none_names_the_nearest(wrong: str, said: str) -> None:
    fields: dict[str, Any] = {wrong: 1}
    with pytest.raises(TypeError) as told:
        SamplingParams(**fields)
    assert str(told.value) == f"SamplingParams() got an unexpected keyword argument {said}"


class Lying(str):
    """Text that claims to be another."""

    def __str__(self) -> str:
        raise KeyError("planted")

    __repr__ = __eq__ = __hash__ = __str__  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    ("made", "value", "meant"),
    [
        (SamplingParams, 0.7, "temperature=0.7"),
        (SamplingParams, {"temperature": 0.7}, "**{'temperature': 0.7})"),
        (SamplingParams, 100, "max_tokens=100"),
        (SamplingParams, {3: 1.5}, "logit_bias={3: 1.5}"),
        (SamplingParams, object, "max_tokens=..."),
        (StructuredOutput, {"type": "object"}, "json_schema={'type': 'object'}"),
        (StructuredOutput, "yes|no", "regex='yes|no'"),
        (StructuredOutput, ["yes", "no"], "choice=['yes', 'no']"),
        (Speculation, "suffix", "drafter='suffix'"),
        (EngineConfig, "cuda", "device='cuda'"),
        (EngineConfig, 1e99, "device=..."),
        (DraftedSequence, [1, 2], "known_ids=..."),
        (RequestInfo, "a", "tenant=..."),
    ],
)
def test_a_value_without_a_name_is_told_the_name_that_takes_it(
    made: Any, value: object, meant: str
) -> None:
    said = f"{made.__name__}() takes keyword arguments only: write {made.__name__}({meant}"
    for more in ((), (value,)):
        with pytest.raises(TypeError) as told:
            made(value, *more)
        assert str(told.value).startswith(said)


@pytest.mark.parametrize(
    ("made", "wrong", "meant"),
    [
        (Engine, "capture_progres", "capture_progress"),
        (Speculation, "max_brances", "max_branches"),
        (StructuredOutput, "json_schem", "json_schema"),
        (EngineConfig, "max_num_seq", "max_num_seqs"),
    ],
)
def test_a_field_that_is_none_names_the_nearest(made: Any, wrong: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"'{wrong}'; did you mean {meant}"):
        made(**{wrong: 2})


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("sufix", "no drafter 'sufix'; did you mean suffix"),
        ("suffix:max_dept=3", "'suffix' has no option 'max_dept'; did you mean max_depth"),
        ("suffix:max_depth=deep", "option 'max_depth' of drafter 'suffix' must be a whole number"),
        ("nowhere.py:Mine", "drafter 'nowhere.py:Mine': there is no file 'nowhere.py'"),
        ("", "drafter must be a str of 1 to 1000 characters"),
        ("s" * 1001, "drafter must be a str of 1 to 1000 characters"),
    ],
)
def test_a_drafter_that_there_is_not_is_told_when_the_engine_is_made(named: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Engine(speculation=named)
    if named:
        with pytest.raises(ConfigError, match=re.escape(told)):
            Engine(speculation=Speculation(drafter=named))


@pytest.mark.asyncio
async def test_a_drafter_that_needs_an_option_says_which() -> None:
    with pytest.raises(ConfigError, match="drafter 'medusa' needs the option path"):
        async with Engine("pyhelp", speculation="medusa"):
            pass


@pytest.mark.parametrize("named", ["ngram", "suffix", "suffix:max_depth=8"])
def test_a_name_alone_is_speculation_by_that_drafter(named: str) -> None:
    plain = str.__str__(named)
    assert Engine(speculation=named).config.speculation == Speculation(drafter=plain)
    assert EngineConfig(speculation=named) == EngineConfig(speculation=Speculation(drafter=plain))  # pyright: ignore[reportArgumentType]


FILE = """
import asyncio
from aioserve import Drafter, SchedulingPolicy

asyncio.run(asyncio.sleep(0))


class Backwards(SchedulingPolicy):
    def __init__(self, *, book: str):
        self.book = book

    def order(self, waiting, view):
        open(self.book, "a").close()
        return list(reversed(waiting))


class Repeating(Drafter):
    def start(self, slot, sequence): ...
    def extend(self, slot, token_ids): ...
    def end(self, slot): ...
    def draft(self, slot, limit):
        return [7] * limit
"""


@pytest.mark.asyncio
async def test_an_engine_takes_policy_and_drafter_of_a_file_that_runs_a_loop_of_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    mine, book = f"{tmp_path}/mine.py", tmp_path / "asked"
    params = SamplingParams(max_tokens=12, temperature=0)
    async with Engine(FakeModel()) as engine:
        plain = await engine.generate([1, 2, 3], params)
    policy, drafter = f"{mine}:Backwards:book={book}", f"{mine}:Repeating"
    async with Engine(FakeModel(), policy=policy, speculation=drafter) as engine:
        drafted = await engine.generate([1, 2, 3], params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.usage.drafted_tokens > 0
    assert book.exists()
    assert Speculation(drafter=f"{mine}:Repeating:a=1").drafter_name == "Repeating"
    assert Speculation(drafter=" suffix:max_depth=8").drafter_name == "suffix"


def test_text_that_lies_is_a_name_and_no_field() -> None:
    lying: Any = Lying("suffix")
    assert Engine(speculation=lying).config.speculation == Speculation(drafter="suffix")
    make: Any = Speculation
    with pytest.raises(TypeError, match=r"write Speculation\(drafter=<"):
        make(lying)


@pytest.mark.asyncio
async def test_a_file_that_breaks_ends_the_entering_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import sys\nsys.exit(0)\n")
    for option in ("policy", "speculation"):
        given: dict[str, Any] = {option: f"{tmp_path}/broken.py:Mine"}
        engine = Engine(FakeModel(), **given)
        with pytest.raises(PluginError, match=r"can't be loaded: SystemExit\(0\)"):
            async with engine:
                pass
        assert engine.state == "closed"


def test_minus_one_keeps_all_tokens() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    with pytest.raises(InvalidSamplingError, match=r"top_k must be an int in \[-1, "):
        SamplingParams(top_k=-2)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("polcy", "policy"),
        ("max_num_seq", "max_num_seqs"),
        ("memory_utilisation", "memory_utilization"),
    ],
)
def test_an_option_that_is_none_names_the_nearest(wrong: str, meant: str) -> None:
    options: dict[str, Any] = {wrong: 1}
    with pytest.raises(TypeError, match=f"Engine.* unexpected keyword argument '{wrong}'") as told:
        Engine(**options)
    assert str(told.value).endswith(f"; did you mean {meant}?")


def test_a_policy_that_no_plugin_offers_is_told_when_the_engine_is_made() -> None:
    with pytest.raises(UnknownPolicyError, match="did you mean priority"):
        Engine(policy="prioritty")
    with pytest.raises(ConfigError, match="did you mean preempt"):
        Engine(policy="priority:preemt=false")


@pytest.mark.asyncio
async def test_what_asyncio_needs_is_said() -> None:
    wrong: Any = Engine(FakeModel())
    with pytest.raises(TypeError, match="Engine is entered by `async with`, not by `with`"), wrong:
        pass
    async with Engine(FakeModel()) as engine, engine.stream([1, 2]) as stream:
        read: Any = stream
        with pytest.raises(TypeError, match="TokenStream is read by `async for`, not by `for`"):
            list(read)
        with pytest.raises(TypeError, match="TokenStream can't be used in 'await' expression"):
            await read
        assert not inspect.isawaitable(read)
        with pytest.raises(TypeError, match="TokenStream is entered by `async with`"), read:
            pass


@pytest.mark.asyncio
async def test_arguments_of_a_call_name_what_was_meant() -> None:
    async with Engine(FakeModel()) as engine:
        wrong: dict[str, Any] = {"max_tokens": 3}
        with pytest.raises(TypeError, match=r"it goes into SamplingParams\(max_tokens=\.\.\.\)"):
            engine.stream([1, 2], **wrong)
        wrong = {"priorty": 3}
        with pytest.raises(TypeError, match="'priorty'; did you mean priority"):
            await engine.generate([1, 2], **wrong)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "why"),
    [("image_url", "; images are not"), ("input_audio", "; audio is not"), ("thing", "$")],
)
async def test_media_are_said_to_be_unsupported(kind: str, why: str) -> None:
    async with Engine("pyhelp") as engine:
        content: Any = [{"type": kind, kind: {"url": "x"}}]
        with pytest.raises(InvalidPromptError, match=f"got '{kind}'{why}"):
            await engine.generate([{"role": "user", "content": content}])
        assert repr(engine.tokenizer).endswith("tokenizer.json', vocab_size=4096)")
