"""Branches of streams: each has the tokens of a request that began alike, and shares its pages."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import (
    DeadlineExceededError,
    Engine,
    EngineClosedError,
    FinishReason,
    InvalidRequestError,
    InvalidSamplingError,
    LogitsProcessor,
    LogitsProcessorSpec,
    Observer,
    PromptTooLongError,
    QueueFullError,
    RequestInfo,
    SamplingParams,
    Speculation,
    StructuredOutput,
    Token,
    TokenStream,
    hookimpl,
)
from aioserve.testing import check_invariants
from aioserve.testing.fake_model import FakeModel, expected_tokens
from tests.engine.idle import all_given_back
from tests.parity import tiny_models
from tests.waits import until

pytestmark = pytest.mark.asyncio

PROMPT = [7, 11, 13, 17, 19, 23, 29, 31, 37]
BASE: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 2**64 - 2, "logprobs": 2}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["page", "slot"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
LETTERS = {ord(letter): 8.0 for letter in "abcd"}
FEATURES: dict[str, Mapping[str, Any]] = {
    "drawn": {"ignore_eos": True},
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.7,
        "ignore_eos": True,
    },
    "frequency": {"frequency_penalty": 2.0, "logit_bias": LETTERS, "ignore_eos": True},
    "limits": {"min_tokens": 14, "stop_token_ids": [*range(97, 101)], "logit_bias": LETTERS},
    "bad_words": {"bad_words": ["ab", "ca"], "logit_bias": LETTERS, "ignore_eos": True},
    "allowed": {"allowed_token_ids": [*range(97, 110)], "ignore_eos": True},
    "stops": {"stop": ["abca", "cda", "dd"], "logit_bias": LETTERS, "ignore_eos": True},
    "blind_stops": {"stop": ["a", "b"], "min_tokens": 12, "logit_bias": LETTERS},
    "schema": {
        "structured_output": StructuredOutput(json_schema=SCHEMA, disable_any_whitespace=True),
        "max_tokens": 40,
    },
    "regex": {"structured_output": StructuredOutput(regex="[a-d]{14,18}"), "logprobs": None},
    "thinking": {"thinking_token_budget": 6, "ignore_eos": True, "logprobs": None},
    "processor": {"logits_processors": ["by_history"], "ignore_eos": True},
    "no_logprobs": {"logprobs": None, "ignore_eos": True},
}


class ByHistory(LogitsProcessor):
    """Prompt and answer count differently for the next token."""

    def process(self, prompt_ids, answer_ids, logits):
        logits[int(prompt_ids.sum() + 7 * answer_ids.sum()) % len(logits)] += 5.0


class Begins(LogitsProcessor):
    """An answer begins with these ids, whatever the model finds likely."""

    def __init__(self, *, ids: str = "") -> None:
        self._ids = [int(token_id) for token_id in ids.split("-")]

    def process(self, prompt_ids, answer_ids, logits):
        if len(answer_ids) < len(self._ids):
            logits.fill_(-1e9)
            logits[self._ids[len(answer_ids)]] = 0.0


class Plugin:
    @hookimpl
    def aioserve_logits_processors(self):
        return [
            LogitsProcessorSpec("by_history", ByHistory),
            LogitsProcessorSpec("begins", Begins),
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("forks") / "llama"
    return str(tiny_models.write("llama", directory))


def engine_of(model: str, **options: Any) -> Engine:
    return Engine(
        model,
        **{
            "device": "cpu",
            "num_pages": 400,
            "page_size": 4,
            "max_num_seqs": 8,
            "reasoning_parser": "deepseek_r1",
            "plugins": [Plugin()],
            **options,
        },
    )


def fake(**options: Any) -> Engine:
    model = FakeModel(num_pages=64, max_model_len=128, step_seconds=lambda plan: 0.001)
    return Engine(model, **{"page_size": 4, "max_num_seqs": 8, **options})


async def read(stream: TokenStream, count: int | None = None) -> list[Token]:
    """Tokens up to the end, or the next `count` of them."""
    tokens: list[Token] = []
    while len(tokens) != count and (token := await anext(stream, None)) is not None:
        tokens.append(token)
    return tokens


def of(changes: Mapping[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{**BASE, **changes, **more})


def ids_of(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


def ends_of(stream: TokenStream) -> tuple[Any, Any]:
    return stream.finish_reason, stream.stop_reason


# -- the promise


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", FEATURES)
async def test_the_first_branch_goes_on_as_its_stream_does(name, overlap, model):
    async with engine_of(model, overlap=overlap) as engine:
        stream = engine.stream(PROMPT, of(FEATURES[name]))
        whole = await read(engine.stream(PROMPT, of(FEATURES[name])))
        head, branches = list[Token](), list[tuple[int, TokenStream]]()
        for count in (2, 3, len(whole) // 2, len(whole) - 1):
            head += await read(stream, count - len(head))
            branches += [(count, branch) for branch in stream.fork(1)]
        assert head + await read(stream) == whole
        for count, branch in branches:
            assert await read(branch) == whole[count:], count
            assert ends_of(branch) == ends_of(stream)
        assert await all_given_back(engine)


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "processor"])
async def test_branch_i_is_a_request_of_seed_s_plus_i_that_began_alike(name, model):
    params = of(FEATURES[name])
    async with engine_of(model) as engine, engine_of(model, prefix_caching=False) as other:
        async with engine.stream(PROMPT, params) as stream:
            head = await read(stream, 7)
            branches = stream.fork(4)
            found = await asyncio.gather(*map(read, branches))
        forced = f"begins:ids={'-'.join(map(str, ids_of(head)))}"
        for index, tokens in enumerate(found):
            alike = msgspec.structs.replace(
                params, seed=(2**64 - 2 + index) % 2**64, logits_processors=[forced]
            )
            reference = other.stream(PROMPT, alike)
            begun = await read(reference)
            assert ids_of(begun[:7]) == ids_of(head)
            assert tokens == begun[7:]
            assert ends_of(branches[index]) == ends_of(reference)
        if name not in ("greedy", "schema"):
            assert len({tuple(ids_of(tokens)) for tokens in found}) > 1
        assert await all_given_back(engine)


async def test_branches_of_branches_go_on_from_all_that_came_before(model):
    params = of(FEATURES["penalties"], max_tokens=30)
    async with engine_of(model) as engine:
        stream = engine.stream(PROMPT, params)
        head = await read(stream, 5)
        _, second = stream.fork(2)
        head += await read(second, 6)
        _, _, third = second.fork(3)
        head += await read(third, 3)
        (last,) = third.fork(1)
        rest = await read(third)
        assert await read(last) == rest
        assert [token.index for token in head + rest] == [*range(30)]
        forced = f"begins:ids={'-'.join(map(str, ids_of(head)))}"
        alike = msgspec.structs.replace(params, seed=1, logits_processors=[forced])
        assert (await read(engine.stream(PROMPT, alike)))[14:] == rest


async def test_a_stop_string_across_the_border_ends_a_branch(model):
    async with engine_of(model) as engine:
        plain = of(FEATURES["drawn"], allowed_token_ids=[*range(97, 123)])
        whole = await read(engine.stream(PROMPT, plain))
        text = "".join([token.text for token in whole])
        stop = text[8:12]
        assert text.index(stop) == 8
        params = msgspec.structs.replace(plain, stop=[stop])
        async with engine.stream(PROMPT, params) as stream:
            head = await read(stream, 10)
            assert "".join([token.text for token in head]) == text[:8]
            (branch,) = stream.fork(1)
        rest = await read(branch)
        assert ids_of(head + rest) == ids_of(whole[:12])
        assert "".join([token.text for token in rest]) == ""
        assert ends_of(branch) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("drafter", ["ngram:min_ngram=1", "suffix"])
async def test_speculation_changes_no_token_of_a_branch(drafter, model):
    params = of(FEATURES["penalties"], prediction="abcabcabcabc")
    speculation = Speculation(drafter=drafter, max_tokens=4)
    async with engine_of(model) as engine:
        plain = msgspec.structs.replace(params, prediction=None)
        whole = await read(engine.stream(PROMPT, plain))
    async with engine_of(model, speculation=speculation) as engine:
        stream = engine.stream(PROMPT, params)
        await read(stream, 6)
        (branch,) = stream.fork(1)
        assert await read(branch) == whole[6:]
        assert branch.usage.drafted_tokens > 0


async def test_each_sample_of_a_request_can_be_forked(model):
    params = of(FEATURES["penalties"], n=3)
    async with engine_of(model) as engine:
        done = await engine.generate(PROMPT, params)
        async with engine.stream(PROMPT, params) as stream:
            heads: list[list[int]] = [[], [], []]
            while min(map(len, heads)) < 3:
                token = await anext(stream)
                heads[token.sample].append(token.id)
            branches = [stream.fork(2, sample=index) for index in range(3)]
        for index, (own, beside) in enumerate(branches):
            tokens = await read(own)
            assert {token.sample for token in tokens} == {0}
            assert (*heads[index], *ids_of(tokens)) == done.samples[index].token_ids
            assert ids_of(await read(beside)) != ids_of(tokens)


async def test_messages_are_forked_behind_their_template():
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    params = of({"thinking_token_budget": 5, "min_tokens": 30}, max_tokens=30)
    async with Engine("pyhelp", num_pages=256, reasoning_parser="deepseek_r1") as engine:
        whole = await read(engine.stream(messages, params))
        for count in (2, 5, 9):
            async with engine.stream(messages, params) as stream:
                await read(stream, count)
                (branch,) = stream.fork(1)
            assert await read(branch) == whole[count:]


# -- which tokens count, and where a stream may be


async def test_tokens_that_wait_for_their_reader_are_the_branchs_own_to_draw():
    async with fake() as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=20, seed=3))
        head = ids_of(await read(stream, 4))
        await until(lambda: stream.usage.completion_tokens >= 9)
        first, second = stream.fork(2)
        assert head == expected_tokens(PROMPT, 4, 3)
        assert ids_of(await read(first)) == expected_tokens(PROMPT, 20, 3)[4:]
        assert ids_of(await read(second)) == expected_tokens([*PROMPT, *head], 16, 4)
        assert second.prompt_token_ids == (*PROMPT, *head)
        assert second.usage.prompt_tokens == 13
        assert second.usage.completion_tokens == 16


async def test_a_batch_counts_as_handed_out_too():
    async with fake() as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=20, seed=3))
        head = ids_of(await stream.batch(5))
        (branch,) = stream.fork(1, SamplingParams(max_tokens=20, seed=9))
        assert ids_of(await read(branch)) == expected_tokens([*PROMPT, *head], 20 - len(head), 9)


@pytest.mark.parametrize("count", [0, 6])
async def test_a_stream_that_was_closed_is_forked_where_its_reader_left_it(count):
    async with fake() as engine:
        async with engine.stream(PROMPT, SamplingParams(max_tokens=20, seed=3)) as stream:
            await stream.started()
            await read(stream, count)
        assert stream.finish_reason is FinishReason.ABORT
        (branch,) = stream.fork(1)
        assert ids_of(await read(branch)) == expected_tokens(PROMPT, 20, 3)[count:]
        assert await all_given_back(engine)


async def test_a_completion_that_ended_with_max_tokens_goes_on_with_more_of_them():
    async with fake() as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=8, seed=3))
        await read(stream)
        with pytest.raises(InvalidRequestError, match="max_tokens is 8") as refused:
            stream.fork(2)
        assert (refused.value.argument, refused.value.limit) == ("sampling", 7)
        (branch,) = stream.fork(1, SamplingParams(max_tokens=20))
        assert ids_of(await read(branch)) == expected_tokens(PROMPT, 20, 3)[8:]


async def test_an_end_among_the_tokens_so_far_is_refused_by_name(model):
    params = of({"allowed_token_ids": [97, 98], "stop_token_ids": [97]})
    async with engine_of(model) as engine:
        stream = engine.stream(PROMPT, params)
        tokens = await read(stream)
        assert stream.stop_reason == 97
        with pytest.raises(InvalidRequestError, match="token 97 ends the completion at its place"):
            stream.fork(1)
        goes_on = msgspec.structs.replace(params, stop_token_ids=(), ignore_eos=True)
        (branch,) = stream.fork(1, goes_on)
        assert len(tokens) + len(await read(branch)) == 24


async def test_a_stop_string_in_the_text_so_far_ends_a_branch_with_an_error(model):
    plain = of(FEATURES["drawn"], allowed_token_ids=[*range(97, 123)])
    async with engine_of(model) as engine:
        stream = engine.stream(PROMPT, plain)
        text = "".join([token.text for token in await read(stream, 12)])
        (branch,) = stream.fork(1, msgspec.structs.replace(plain, stop=[text[3:6]]))
        with pytest.raises(InvalidRequestError, match="at its token 6 of 12"):
            await read(branch)
        assert await all_given_back(engine) or stream.finish_reason is None


async def test_a_grammar_that_does_not_take_the_tokens_so_far_is_named(model):
    plain = of(FEATURES["drawn"], allowed_token_ids=[*range(97, 123)])
    async with engine_of(model) as engine:
        stream = engine.stream(PROMPT, plain)
        await read(stream, 5)
        form = StructuredOutput(regex="[0-9]+")
        held = msgspec.structs.replace(plain, structured_output=form, ignore_eos=False)
        (branch,) = stream.fork(1, held)
        with pytest.raises(InvalidSamplingError, match="structured_output doesn't allow token"):
            await read(branch)


async def test_a_long_completion_is_put_together_off_the_loop():
    params = of(FEATURES["drawn"], stop=["never to come"], max_tokens=720)
    model = FakeModel(num_pages=400, max_model_len=1024)
    async with Engine(model) as engine:
        stream = engine.stream(PROMPT, params)
        await read(stream, 700)
        (branch,) = stream.fork(1)
        assert branch.usage.prompt_tokens == 0
        assert await read(branch) == await read(stream)


# -- what a branch keeps of its stream's request


class Arrivals(Observer):
    def __init__(self) -> None:
        self.infos: list[RequestInfo] = []

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        self.infos += requests


async def test_a_branch_keeps_the_hints_of_its_stream():
    async with fake() as engine:
        arrivals = Arrivals()
        engine.observe(arrivals)
        stream = engine.stream(
            PROMPT,
            SamplingParams(max_tokens=20, seed=0),
            tenant="one",
            priority=-3,
            session_id="talk",
            metadata={"a": "b"},
            deadline_seconds=1000,
            predicted_output_tokens=9,
        )
        await read(stream, 4)
        (branch,) = stream.fork(1)
        await read(branch)
        await until(lambda: len(arrivals.infos) == 2)
        first, second = arrivals.infos
        assert (second.tenant, second.priority, second.session_id) == ("one", -3, "talk")
        assert second.metadata == first.metadata == {"a": "b"}
        assert second.predicted_output_tokens == 5
        assert 990 < (second.deadline_seconds or 0) < 1000
        assert second.request_id != first.request_id
        assert (second.prompt_tokens, second.max_tokens) == (13, 16)


async def test_a_branch_shares_pages_under_the_salt_of_its_stream_alone():
    async with fake() as engine:
        params = SamplingParams(max_tokens=20, seed=0)
        cached: list[int] = []
        for salt in (None, "salt", "salt"):
            stream = engine.stream(PROMPT, params, cache_salt=salt)
            await read(stream, 12)
            (branch,) = stream.fork(1)
            await read(branch)
            cached += [stream.usage.cached_tokens, branch.usage.cached_tokens]
            stream.close()
        assert cached == [0, 20, 0, 20, 8, 20]


async def test_branches_find_all_whole_pages_of_what_was_handed_out():
    async with fake(prefix_caching=False) as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=20, seed=0))
        head = ids_of(await read(stream, 12))
        (branch,) = stream.fork(1)
        assert ids_of(await read(branch)) == expected_tokens([*PROMPT, *head], 8, 0)
        assert branch.usage.cached_tokens == 0
    for page_size in (1, 2, 8):
        async with fake(page_size=page_size) as engine:
            async with engine.stream(PROMPT, SamplingParams(max_tokens=30, seed=0)) as stream:
                await read(stream, 12)
                branches = stream.fork(7)
                await asyncio.gather(*map(read, branches))
            found = {branch.usage.cached_tokens for branch in branches}
            assert found == {20 // page_size * page_size}


async def test_a_deadline_that_has_passed_is_that_of_the_branches_too():
    async with fake() as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=4, seed=0), deadline_seconds=0.2)
        await read(stream, 2)
        with pytest.raises(DeadlineExceededError):
            await until(lambda: stream.fork(1)[0].close())
        assert await all_given_back(engine)


async def test_branches_of_written_answers_go_on_with_their_streams():
    async with Engine(FakeModel(answers=["The sea is deep.", "Other."])) as engine:
        stream = engine.stream("Say it.")
        head = "".join([token.text for token in await read(stream, 8)])
        texts = []
        for branch in stream.fork(2):
            texts.append("".join([token.text for token in await read(branch)]))
        assert (head, texts) == ("The sea ", ["is deep."] * 2)
        assert (await engine.generate("More.")).text == "Other."


async def test_log_probabilities_of_the_prompt_are_told_once():
    async with fake() as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=9, seed=0, prompt_logprobs=1))
        await read(stream, 2)
        (branch,) = stream.fork(1)
        await read(branch)
        assert len(stream.prompt_logprobs) == len(PROMPT)
        assert branch.prompt_logprobs == ()


# -- what is refused


BAD: list[tuple[Callable[[TokenStream], Any], str]] = [
    (lambda s: s.fork(0), "n"),
    (lambda s: s.fork(9), "n"),
    (lambda s: s.fork("2"), "n"),  # pyright: ignore[reportArgumentType]
    (lambda s: s.fork(1, sample=1), "sample"),
    (lambda s: s.fork(1, {"seed": 1}), "sampling"),  # pyright: ignore[reportArgumentType]
    (lambda s: s.fork(1, SamplingParams(n=2)), "n"),
    (lambda s: s.fork(1, SamplingParams(best_of=2)), "best_of"),
    (lambda s: s.fork(1, SamplingParams(prompt_logprobs=0)), "prompt_logprobs"),
    (lambda s: s.fork(1, SamplingParams(max_tokens=3)), "sampling"),
    (lambda s: s.fork(1, SamplingParams(structured_output=None, max_draft_tokens=3)), "max_draft"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
async def test_what_no_branch_can_be_made_of_is_refused_by_name(index):
    call, argument = BAD[index]
    async with fake() as engine:
        async with engine.stream(PROMPT, SamplingParams(max_tokens=20, seed=0)) as stream:
            await read(stream, 3)
            with pytest.raises(InvalidRequestError) as refused:
                call(stream)
            assert (refused.value.argument or "").startswith(argument)
            assert engine.stats().num_running == 1
        assert await all_given_back(engine)


async def test_a_prompt_that_is_not_encoded_yet_can_not_be_forked():
    async with Engine("pyhelp") as engine:
        stream = engine.stream("import os " * 200, SamplingParams(max_tokens=2))
        with pytest.raises(InvalidRequestError, match="await `started"):
            stream.fork(1)


async def test_a_full_context_leaves_no_room_for_a_branch():
    async with fake() as engine:
        stream = engine.stream(PROMPT, SamplingParams(seed=0))
        assert len(await read(stream)) == 128 - len(PROMPT)
        with pytest.raises(PromptTooLongError):
            stream.fork(1)


async def test_all_branches_are_submitted_or_none():
    async with fake(max_waiting=3) as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=60, seed=0))
        await read(stream, 3)
        with pytest.raises(QueueFullError):
            stream.fork(8)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (1, 0)
        assert sum(stats.requests_finished_total.values()) == 0  # none came and was ended
        check_invariants(engine)


async def test_a_stream_whose_engine_is_closed_or_gone_can_not_be_forked():
    async with fake() as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=4, seed=0))
        await read(stream)
    with pytest.raises(EngineClosedError):
        stream.fork(1, SamplingParams(max_tokens=9))
    del engine
    gc.collect()
    with pytest.raises(EngineClosedError):
        stream.fork(1, SamplingParams(max_tokens=9))
