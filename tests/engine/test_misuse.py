"""What a caller types who means something else: the error says what."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from aioserve import (
    ConfigError,
    Engine,
    InvalidPromptError,
    InvalidSamplingError,
    SamplingParams,
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


def test_parameters_by_position_are_an_error_as_before() -> None:
    make: Any = SamplingParams
    with pytest.raises(TypeError, match="positional"):
        make(5)


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
