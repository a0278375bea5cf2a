"""Compiled structured outputs that an engine keeps, and the time at which it prepares for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioserve import (
    Engine,
    RequestFailedError,
    SamplingParams,
    Speculation,
    StructuredOutput,
)
from aioserve.engine import compiling
from aioserve.engine.compiling import GrammarCompiler
from aioserve.grammars import grammar as grammars
from aioserve.grammars.calls import CallsOutput
from aioserve.grammars.channels import ChannelOutput
from aioserve.grammars.vocabulary import Vocabulary
from tests.grammars.walks import END
from tests.waits import LIMIT_SECONDS

pytestmark = pytest.mark.asyncio

FORMS = [StructuredOutput(regex="a{3}"), StructuredOutput(regex="b{3}")]


async def compiled(compiler: GrammarCompiler, output: StructuredOutput) -> Any:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    compiler.submit(output, done.set_result)
    return await done


@pytest.mark.parametrize(
    "framed",
    [
        lambda form: ChannelOutput(grammar="start: @form", form=form),
        lambda form: CallsOutput(grammar='start: "x"', form=form),
    ],
)
async def test_forms_in_the_same_frame_are_not_taken_for_each_other(
    framed: Callable[[StructuredOutput], StructuredOutput],
) -> None:
    keys = {compiling._key(framed(form)) for form in FORMS}
    assert len(keys) == len(FORMS)


async def test_a_second_form_in_a_channel_is_followed_as_itself() -> None:
    async with Engine("pyhelp") as engine:
        compiler = engine._lifecycle.intake.compiler
        for form in FORMS:
            framed = await compiled(compiler, ChannelOutput(grammar="start: @form", form=form))
            alone = await compiled(compiler, form)
            assert framed.matcher({END}).forced() == alone.matcher({END}).forced() != ()


async def test_the_vocabulary_is_made_on_a_thread_before_the_engine_takes_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[threading.Thread] = []
    make = Vocabulary.__init__

    def told(self: Vocabulary, *arguments: Any) -> None:
        made.append(threading.current_thread())
        make(self, *arguments)

    monkeypatch.setattr(Vocabulary, "__init__", told)
    async with Engine("pyhelp") as engine:
        assert len(made) == 1
        assert made[0] is not threading.main_thread()
        params = SamplingParams(max_tokens=3, structured_output=FORMS[0])
        assert (await engine.generate("Hi", params)).text == "aaa"
    assert len(made) == 1


class Panic(BaseException):
    """Stand-in for a panic in Rust code, which is no `Exception` either."""


@pytest.mark.parametrize("raised", [ValueError("no"), Panic("no")], ids=["error", "panic"])
async def test_a_vocabulary_that_cannot_be_made_fails_those_requests_alone_that_need_it(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(self: Vocabulary, *arguments: Any) -> None:
        raise raised

    monkeypatch.setattr(Vocabulary, "__init__", breaks)
    async with Engine("pyhelp") as engine:
        assert "structured output can't be made with this tokenizer" in caplog.text
        assert (await engine.generate("Hi", SamplingParams(max_tokens=3))).usage
        with pytest.raises(RequestFailedError):
            await engine.generate("Hi", SamplingParams(structured_output=FORMS[0]))


async def test_answers_are_the_same_where_the_lexer_that_they_share_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = StructuredOutput(regex="([a-z]{1,12} ){1,6}[0-9]{4}")

    async def answers() -> list[tuple[int, ...]]:
        async with Engine("pyhelp", speculation=Speculation(drafter="ngram")) as engine:
            params = [
                SamplingParams(
                    structured_output=form, max_tokens=60, temperature=1.5, seed=seed, n=2
                )
                for seed in range(4)
            ]
            done = await asyncio.gather(*[engine.generate("Hi", each) for each in params])
            return [sample.token_ids for each in done for sample in each.samples]

    expected = await answers()
    monkeypatch.setattr(grammars, "SHARED_LEXER_STATES", 10)
    renewed: list[object] = []
    alone = grammars.CompiledGrammar._alone

    def told(self: grammars.CompiledGrammar, full: object) -> Any:
        renewed.append(full)
        return alone(self, full)

    monkeypatch.setattr(grammars.CompiledGrammar, "_alone", told)
    assert await answers() == expected
    assert renewed


async def test_a_large_grammar_that_is_slow_holds_up_no_small_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    new = grammars.CompiledGrammar.matcher

    def slowly(self: grammars.CompiledGrammar, end_ids: Any) -> Any:
        assert not (self.is_large and end_ids) or gate.wait(LIMIT_SECONDS)
        return new(self, end_ids)

    monkeypatch.setattr(grammars.CompiledGrammar, "matcher", slowly)
    large = StructuredOutput(choice=[f"{i:03}" + "x" * 40 for i in range(100)])
    async with Engine("pyhelp") as engine:
        params = SamplingParams(structured_output=large, max_tokens=60)
        waiting = asyncio.ensure_future(engine.generate("Hi", params))
        small = SamplingParams(structured_output=FORMS[0], max_tokens=5)
        try:
            assert (await engine.generate("Hi", small)).text == "aaa"
            assert not waiting.done()
        finally:
            gate.set()
        assert (await waiting).text in (large.choice or ())
