"""Structured output through the whole engine: with any model, chunks, preemption, forks and
neighbours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from aioserve import (
    Completion,
    Engine,
    FinishReason,
    InvalidSamplingError,
    QueueFullError,
    RequestFailedError,
    SamplingParams,
    StructuredOutput,
)
from aioserve.engine import compiling
from aioserve.grammars.matcher import GrammarMatcher
from aioserve.sampling import masks
from aioserve.testing.random_model import write_random_model
from tests.engine.idle import all_given_back
from tests.waits import LIMIT_SECONDS, until

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "eos_token_id": 270,
    "tie_word_embeddings": True,
}
TIGHT: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 60,
    "max_num_batched_tokens": 13,
    "output_reserve_tokens": 0,
}
"""Options with which prompts are chunked and requests preempted."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {"type": "array", "items": {"type": "integer", "maximum": 999}, "maxItems": 3},
    },
    "required": ["description", "kind", "lines"],
    "additionalProperties": False,
}
COMPACT = StructuredOutput(json_schema=SCHEMA, disable_any_whitespace=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model, which follows no form by itself."""
    path = tmp_path_factory.mktemp("model")
    return str(write_random_model(path, TINY, seed=3, dtype="float32"))


def text_of(ids: tuple[int, ...]) -> str:
    """Decode without the end token, which is no special token of this model."""
    assert ids[-1] == 270
    return b"".join([bytes([i]) if i < 256 else b"?%d" % i for i in ids[:-1]]).decode()


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Requests with structured outputs of many kinds, and some without."""
    every = []
    for place in range(8):
        form = COMPACT if place % 4 else None
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.5, 4.0)[place % 4],
            max_tokens=160 if form else 40,
            n=3 if place == 5 else 1,
            seed=place,
            structured_output=form,
            ignore_eos=form is None,
            repetition_penalty=1.5 if place % 4 == 2 else 1.0,
            frequency_penalty=0.8 if place % 4 == 2 else 0.0,
        )
        every.append(([7 + place] * (3 + 5 * place), params))
    return every


async def answers(tiny: str, **options: Any) -> tuple[list[Completion], Any]:
    async with Engine(tiny, **options) as engine:
        done = await asyncio.gather(*[engine.generate(*request) for request in requests()])
        return done, engine.stats()


@pytest.mark.asyncio
async def test_answers_of_a_random_model_validate_and_are_the_same_whatever_happens(
    tiny: str,
) -> None:
    expected, _ = await answers(tiny)
    for (_, params), answer in zip(requests(), expected, strict=True):
        for sample in answer.samples:
            if params.structured_output is not None:
                assert sample.finish_reason is FinishReason.STOP
                jsonschema.validate(json.loads(text_of(sample.token_ids)), SCHEMA)
    tight, stats = await answers(tiny, **TIGHT)
    assert stats.preemptions_total
    others = [tight]
    for options in ({"overlap": False}, {"jump_forward": False}, {"backend": "reference"}):
        others.append((await answers(tiny, **options))[0])
    (one_by_one, _) = await answers(tiny, jump_forward=False, **TIGHT)
    for other in (*others, one_by_one):
        for mine, theirs in zip(expected, other, strict=True):
            assert [s.token_ids for s in mine.samples] == [s.token_ids for s in theirs.samples]
            assert mine.usage == theirs.usage


@pytest.mark.asyncio
async def test_what_is_forced_takes_no_steps_and_is_told_token_by_token(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "WAIT_SECONDS", 10)  # each late mask would take one more step
    form = StructuredOutput(choice=["a long answer that is the only one there is"])
    params = SamplingParams(structured_output=form)
    steps = []
    for jump_forward in (True, False):
        async with Engine(tiny, jump_forward=jump_forward) as engine:
            tokens = [token async for token in engine.stream([5, 6], params)]
            assert bytes(token.id for token in tokens[:-1]).decode() == (form.choice or "")[0]
            assert [token.index for token in tokens] == list(range(len(tokens)))
            steps.append(engine.stats().steps_total)
            assert engine.stats().tokens_generated_total == len(tokens)
            limited = await engine.generate(
                [5, 6], SamplingParams(max_tokens=9, structured_output=form)
            )
            assert len(limited.token_ids) == 9
            assert limited.finish_reason is FinishReason.LENGTH
            stop = SamplingParams(stop=["answer"], structured_output=form)
            stopped = await engine.generate([5, 6], stop)
            assert stopped.text == "a long "
            assert stopped.finish_reason is FinishReason.STOP
            assert await all_given_back(engine)
    assert steps == [1, len(tokens)]


@pytest.mark.asyncio
async def test_forced_tokens_have_logprobs_where_they_are_asked_for(tiny: str) -> None:
    params = SamplingParams(
        temperature=0, logprobs=2, structured_output=StructuredOutput(choice=["only this"])
    )
    async with Engine(tiny) as engine:
        answer = await engine.generate([5, 6], params)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 10


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutput(regex="[ab]{2,4}-[0-9]"), "[ab]{2,4}-[0-9]"),
        (StructuredOutput(choice=["yes", "no"]), "yes|no"),
        (StructuredOutput(grammar='start: "<" /[a-z]{1,3}/ ">"'), "<[a-z]{1,3}>"),
        (StructuredOutput(json_object=True), r"\{[^\x00]*\}"),
    ],
)
async def test_each_form_holds(form: StructuredOutput, pattern: str) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=200, structured_output=form)
    async with Engine("pyhelp") as engine:
        answer = await engine.generate("What is a list?", params)
    if answer.finish_reason is FinishReason.STOP:
        assert re.fullmatch(pattern, answer.text, re.DOTALL)
    else:
        assert form.json_object


@pytest.mark.asyncio
async def test_a_form_that_can_not_be_kept_ends_its_stream_and_no_other() -> None:
    async with Engine("pyhelp") as engine:
        other = asyncio.ensure_future(engine.generate("Hi", SamplingParams(max_tokens=20)))
        for prompt in ("What is a list?", [5, 6], "long " * 200):
            form = StructuredOutput(json_schema={"not": {}})
            stream = engine.stream(prompt, SamplingParams(structured_output=form), request_id="r")
            with pytest.raises(InvalidSamplingError, match="Unimplemented keys") as refused:
                await anext(stream)
            assert refused.value.argument == "json_schema"
        assert (await other).usage.completion_tokens


@pytest.mark.asyncio
async def test_parameters_that_leave_no_token_end_their_request_alone(tiny: str) -> None:
    async with Engine(tiny) as engine:
        other = asyncio.ensure_future(engine.generate([5], SamplingParams(max_tokens=20)))
        params = SamplingParams(
            allowed_token_ids=[1, 2], structured_output=StructuredOutput(choice=["abc"])
        )
        with pytest.raises(InvalidSamplingError):
            await engine.generate([5, 6], params)
        assert (await other).token_ids
        assert await all_given_back(engine)


@pytest.mark.asyncio
async def test_a_form_is_refused_where_none_can_be_kept(tiny: str, tmp_path: Path) -> None:
    form = SamplingParams(structured_output=StructuredOutput(json_object=True))
    alone = write_random_model(tmp_path, TINY, dtype="float32")
    (alone / "tokenizer.json").unlink()
    async with Engine(alone) as engine:
        with pytest.raises(InvalidSamplingError, match="without a tokenizer"):
            engine.stream([1, 2], form)
    async with Engine(tiny) as engine:
        endless = SamplingParams(ignore_eos=True, structured_output=form.structured_output)
        with pytest.raises(InvalidSamplingError, match="no token id ends an answer"):
            engine.stream([1, 2], endless)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["<|im_end|>", "<[2]>", "<[2,2]>"])
async def test_a_grammar_that_names_the_end_of_answers_is_refused(end: str) -> None:
    async with Engine("pyhelp") as engine:
        for lark in (f"start: {end}", f'start: "a" {end}', f'start: "{end}" // x\nb: {end} | "b"'):
            form = StructuredOutput(grammar=lark)
            with pytest.raises(InvalidSamplingError, match="which ends a completion") as refused:
                engine.stream("Hi", SamplingParams(structured_output=form))
            assert refused.value.argument == "grammar"
        params = SamplingParams(
            ignore_eos=True,
            stop_token_ids=[5],
            structured_output=StructuredOutput(grammar=f'start: "a" {end}'),
        )
        assert (await engine.generate("Hi", params)).token_ids[-2:] == (2, 5)
        quoted = StructuredOutput(grammar=f'start: "{end}" // {end}')
        assert (await engine.generate("Hi", SamplingParams(structured_output=quoted))).text == end


# -- compiling


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Block compiles of forms whose expression has a "z", until this event is set."""
    gate = threading.Event()
    compile_grammar = compiling.compile_grammar

    def slowly(vocabulary: Any, form: StructuredOutput) -> Any:
        if "z" in (form.regex or ""):
            assert gate.wait(LIMIT_SECONDS)
        return compile_grammar(vocabulary, form)

    monkeypatch.setattr(compiling, "compile_grammar", slowly)
    return gate


def regex(text: str) -> SamplingParams:
    return SamplingParams(max_tokens=8, structured_output=StructuredOutput(regex=text))


@pytest.mark.asyncio
async def test_a_slow_form_holds_up_no_other_and_the_same_is_compiled_once(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_grammar = compiling.compile_grammar

    def counted(vocabulary: Any, form: StructuredOutput) -> Any:
        compiled.append(form)
        return compile_grammar(vocabulary, form)

    monkeypatch.setattr(compiling, "compile_grammar", counted)
    async with Engine("pyhelp") as engine:
        waiting = [asyncio.ensure_future(engine.generate("Hi", regex("z?"))) for _ in range(3)]
        assert (await engine.generate("Hi", regex("a"))).text == "a"
        left = engine.stream("Hi", regex("zz"), request_id="left")
        left.close()
        assert not any(task.done() for task in waiting)
        slow.set()
        await asyncio.gather(*waiting)
        assert (await engine.generate("Hi", regex("z?"))).token_ids
        assert len(compiled) == 3
        assert await all_given_back(engine)


@pytest.mark.asyncio
async def test_a_form_that_takes_too_long_is_refused_and_the_next_ones_go_on(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def within(seconds: float) -> None:
        monkeypatch.setattr(compiling, "COMPILE_SECONDS", seconds)

    async with Engine("pyhelp") as engine:
        assert (await engine.generate("Hi", regex("a"))).text == "a"
        for place in range(compiling.MAX_THREADS + compiling.MAX_STUCK):
            within(LIMIT_SECONDS)
            assert (await engine.generate("Hi", regex(f"b{place}"))).text == f"b{place}"
            within(0.2)
            with pytest.raises(InvalidSamplingError, match="compiled within"):
                await engine.generate("Hi", regex(f"z{place}"))
        with pytest.raises(QueueFullError, match="4 threads") as full:
            await engine.generate("Hi", regex("c"))
        assert (full.value.value, full.value.limit, full.value.unit) == (4, 4, "grammars")
        assert full.value.retry_after_seconds == 0.2
        assert (await engine.generate("Hi", regex("a"))).text == "a"  # it was kept
        slow.set()
        within(LIMIT_SECONDS)
        while True:
            try:
                assert (await engine.generate("Hi", regex("c"))).text == "c"
                break
            except QueueFullError:
                await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_forms_that_wait_are_told_where_no_thread_is_to_be_had(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.2)
    escaped: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))

    def no_thread(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    async with Engine("pyhelp") as engine:
        streams = [
            engine.stream("Hi", regex(f"z{place}")) for place in range(compiling.MAX_THREADS)
        ]
        waits = engine.stream("Hi", regex("c"))
        with monkeypatch.context() as patch:
            patch.setattr(compiling, "HandlerThread", no_thread)
            for stream in streams:
                with pytest.raises(InvalidSamplingError, match="compiled within"):
                    await anext(stream)
            with pytest.raises(RequestFailedError, match="can't be compiled"):
                await anext(waits)
        monkeypatch.setattr(compiling, "COMPILE_SECONDS", LIMIT_SECONDS)
        assert (await engine.generate("Hi", regex("c"))).text == "c"
        slow.set()
        assert await all_given_back(engine)
    assert not escaped


@pytest.mark.asyncio
async def test_a_form_that_is_refused_is_compiled_once_also_where_that_took_too_long(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    compile_slowly = compiling.compile_grammar

    def counted(vocabulary: Any, form: StructuredOutput) -> Any:
        asked.append(form.regex)
        return compile_slowly(vocabulary, form)

    monkeypatch.setattr(compiling, "compile_grammar", counted)
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.1)
    async with Engine("pyhelp") as engine:
        live = engine._lifecycle
        for wrong in ("(a", "(z"):
            with pytest.raises(InvalidSamplingError, match=r"unclosed|compiled within"):
                await engine.generate("Hi", regex(wrong))
        slow.set()
        await until(lambda: not live.intake.compiler._stuck)
        raised = []
        for wrong in ("(a", "(z", "(a", "(z"):
            with pytest.raises(InvalidSamplingError, match="unclosed group") as refused:
                await engine.generate("Hi", regex(wrong))
            raised.append(refused.value)
        assert asked == ["(a", "(z"]
        assert len({id(error) for error in raised}) == 4
        assert await all_given_back(engine)


@pytest.mark.asyncio
@pytest.mark.parametrize("ends_well", [True, False])
async def test_a_form_that_takes_too_long_keeps_one_thread_however_often_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, ends_well: bool
) -> None:
    gate = threading.Event()
    called: list[str | None] = []
    compile_grammar = compiling.compile_grammar

    def slowly(vocabulary: Any, form: StructuredOutput) -> Any:
        called.append(form.regex)
        if len(called) == 1:
            assert gate.wait(LIMIT_SECONDS)
            if not ends_well:
                raise RuntimeError("too late")  # which says nothing about the form
        return compile_grammar(vocabulary, form)

    monkeypatch.setattr(compiling, "compile_grammar", slowly)
    async with Engine("pyhelp") as engine:
        live = engine._lifecycle
        compiler = live.intake.compiler
        with monkeypatch.context() as patch:
            patch.setattr(compiling, "COMPILE_SECONDS", 0.05)
            with pytest.raises(InvalidSamplingError, match="compiled within"):
                await engine.generate("Hi", regex("a"))
        for _ in range(compiling.MAX_THREADS + compiling.MAX_STUCK):
            with pytest.raises(InvalidSamplingError, match="compiled within"):
                await engine.generate("Hi", regex("a"))
        assert (await engine.generate("Hi", regex("b"))).text == "b"
        gate.set()
        await until(lambda: not compiler._stuck)
        assert (await engine.generate("Hi", regex("a"))).text == "a"
        assert called == (["a", "b"] if ends_well else ["a", "b", "a"])
        assert await all_given_back(engine)


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_a_form_that_is_compiled(
    slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    compile_slowly = compiling.compile_grammar

    def noted(vocabulary: Any, form: StructuredOutput) -> Any:
        begun.set()
        try:
            return compile_slowly(vocabulary, form)
        finally:
            ended.set()

    monkeypatch.setattr(compiling, "compile_grammar", noted)
    async with Engine("pyhelp") as engine:
        stream = engine.stream("Hi", regex("z"))
        assert await asyncio.to_thread(begun.wait, LIMIT_SECONDS)
    assert not ended.is_set()
    slow.set()
    del stream


@pytest.mark.asyncio
async def test_grammars_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_KEPT", 3)
    monkeypatch.setattr(compiling, "MAX_KEPT_BYTES", most := 9_000_000)  # the size of two forms
    async with Engine("pyhelp") as engine:
        live = engine._lifecycle
        compiler = live.intake.compiler
        for text in ("a", "bb", "(", "(", "a", "cc", "dd", "\u00e4" * 5):
            with contextlib.suppress(InvalidSamplingError):
                await engine.generate("Hi", regex(text))
            assert len(compiler._kept) <= 3
            kept = sum(compiling._num_bytes(*each) for each in compiler._kept.items())
            assert compiler._kept_bytes == kept <= most
        assert [key[1] for key in compiler._kept] == ["dd", "\u00e4" * 5]


# -- a grammar that is costly to follow


@pytest.mark.asyncio
async def test_an_answer_whose_form_is_slow_to_follow_waits_alone(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    allowed = GrammarMatcher.allowed

    def slowly(self: GrammarMatcher) -> Any:
        assert gate.wait(LIMIT_SECONDS)
        return allowed(self)

    monkeypatch.setattr(GrammarMatcher, "allowed", slowly)
    async with Engine(tiny) as engine:
        form = SamplingParams(structured_output=COMPACT, max_tokens=200)
        waiting = asyncio.ensure_future(engine.generate([5, 6], form))
        plain = SamplingParams(max_tokens=50, ignore_eos=True)
        await engine.generate([5, 6], plain)
        assert not waiting.done()
        await asyncio.sleep(0.1)  # nothing is computed meanwhile, and this isn't a failure
        gate.set()
        jsonschema.validate(json.loads(text_of((await waiting).token_ids)), SCHEMA)


@pytest.mark.asyncio
async def test_a_form_that_can_not_be_followed_ends_its_request_alone(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = GrammarMatcher.allowed

    def none_later(self: GrammarMatcher) -> Any:
        compiles = "compile" in threading.current_thread().name
        return allowed(self) if compiles else np.zeros(10, np.int32)

    monkeypatch.setattr(GrammarMatcher, "allowed", none_later)
    async with Engine(tiny) as engine:
        other = asyncio.ensure_future(engine.generate([5], SamplingParams(max_tokens=20)))
        with pytest.raises(InvalidSamplingError, match="can't be followed further"):
            await engine.generate([5, 6], SamplingParams(structured_output=COMPACT))
        assert (await other).token_ids


@pytest.mark.asyncio
async def test_a_form_that_comes_to_cost_too_much_says_so() -> None:
    schema = {"properties": {f"p{i}": {"type": "null"} for i in range(1000)}, "type": "object"}
    form = StructuredOutput(json_schema=schema | {"additionalProperties": False})
    async with Engine("pyhelp") as engine:
        with pytest.raises(InvalidSamplingError, match=r"can't be followed further: .* items"):
            await engine.generate("Hi", SamplingParams(structured_output=form))
