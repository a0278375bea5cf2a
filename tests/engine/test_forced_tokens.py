"""Forced tokens in requests that ask for more than ids: steps verify several of them at once.

The results equal those of steps that draw one token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import (
    AioserveError,
    Engine,
    SamplingParams,
    Speculation,
    StructuredOutput,
)
from aioserve.sampling import masks
from aioserve.testing.random_model import write_random_model
from tests.engine.idle import all_given_back
from tests.engine.test_structured_output import COMPACT, TIGHT, TINY
from tests.tiers import examples

SENTENCE = StructuredOutput(choice=["a long answer that is the only one there is"])
FORMS = (
    COMPACT,
    SENTENCE,
    StructuredOutput(regex="(name: [ab]{1,3}, kind: (page|slot); ){1,3}"),
    StructuredOutput(grammar='start: "<tag>" /[a-z]{1,3}/ "</tag>" start?'),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"overlap": False},
    TIGHT,
    {"speculation": Speculation(drafter="ngram", max_tokens=4)},
    {"speculation": Speculation(drafter="suffix", max_tokens=4), **TIGHT},
    {"speculation": Speculation(drafter="ngram:min_ngram=1", max_tokens=4), "max_num_seqs": 3},
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(write_random_model(path, TINY, seed=5, dtype="float32"))


def asks(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=fields.pop("max_tokens", 120), **fields)


params = st.builds(
    asks,
    structured_output=st.sampled_from(FORMS),
    temperature=st.sampled_from([0.0, 0.8, 2.0]),
    seed=st.integers(0, 9),
    n=st.sampled_from([1, 1, 2, 3]),
    max_tokens=st.sampled_from([9, 40, 120]),
    logprobs=st.sampled_from([None, 0, 2]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.sampled_from([{}, {97: 3.0, 98: -2.0}]),
    min_tokens=st.sampled_from([0, 9]),
    bad_words=st.sampled_from([(), ("lot",), ("er th",)]),
    stop=st.sampled_from([(), ("only",), ('e":', "d: s")]),
)
requests = st.lists(st.tuples(st.integers(1, 40), params), min_size=1, max_size=5)


class _Messages(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def nothing_goes_wrong() -> Iterator[None]:
    """Fail if an error is logged. Planning recovers from its own bugs, and only logs them."""
    told, logger = _Messages(logging.ERROR), logging.getLogger("aioserve")
    logger.addHandler(told)
    try:
        yield
    finally:
        logger.removeHandler(told)
    assert not told.messages


async def told(model: str, wanted: list[tuple[int, SamplingParams]], **options: Any) -> Any:
    """Return everything that readers and counters show, except for the number of steps."""
    async with Engine(model, **options) as engine:

        async def one(length: int, wants: SamplingParams) -> Any:
            try:
                answer = await engine.generate([7] * length, wants)
            except AioserveError as error:
                return type(error), str(error)
            samples = [(s.token_ids, s.text, s.finish_reason, s.logprobs) for s in answer.samples]
            usage = answer.usage
            return samples, usage.prompt_tokens, usage.completion_tokens

        found = await asyncio.gather(*[one(*each) for each in wanted])
        assert await all_given_back(engine)
        return found, engine.stats()


@settings(max_examples=examples(12))
@given(wanted=requests, options=st.sampled_from(OPTIONS))
def test_they_are_what_they_are_one_by_one(
    tiny: str, wanted: list[tuple[int, SamplingParams]], options: dict[str, Any]
) -> None:
    expected, alone = asyncio.run(told(tiny, wanted, jump_forward=False))
    with nothing_goes_wrong():
        found, stats = asyncio.run(told(tiny, wanted, **options))
    assert found == expected
    if all(isinstance(each[0], list) for each in found):
        assert stats.tokens_generated_total == alone.tokens_generated_total


@pytest.mark.asyncio
async def test_so_they_are_with_a_tokenizer_that_has_long_tokens() -> None:
    wanted = [
        (5, asks(structured_output=form, temperature=1.0, seed=seed, logprobs=2, n=2, **edits))
        for seed, form in enumerate(FORMS)
        for edits in ({}, {"frequency_penalty": 0.7})
    ]
    expected, alone = await told("pyhelp", wanted, jump_forward=False)
    found, stats = await told("pyhelp", wanted)
    assert found == expected
    assert stats.tokens_generated_total == alone.tokens_generated_total


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "wants", [{"logprobs": 2}, {"frequency_penalty": 0.5}, {"logit_bias": {97: 1.0}}]
)
@pytest.mark.parametrize("speculation", [None, Speculation(drafter="ngram", max_tokens=8)])
async def test_they_take_few_steps_and_count_for_no_drafts(
    tiny: str,
    monkeypatch: pytest.MonkeyPatch,
    wants: dict[str, Any],
    speculation: Speculation | None,
) -> None:
    monkeypatch.setattr(masks, "WAIT_SECONDS", 10)  # each late mask would take one more step
    steps = []
    for jump_forward in (True, False):
        async with Engine(tiny, jump_forward=jump_forward, speculation=speculation) as engine:
            answer = await engine.generate([5, 6], asks(structured_output=SENTENCE, **wants))
            assert bytes(answer.token_ids[:-1]).decode() == (SENTENCE.choice or "")[0]
            stats = engine.stats()
            if jump_forward:
                assert not sum(stats.tokens_drafted_total)
                assert not answer.usage.drafted_tokens
            steps.append(stats.steps_total)
    few, many = steps
    assert few <= 4
    assert speculation is not None or many == len(answer.token_ids)


@pytest.mark.asyncio
async def test_a_stop_string_among_them_takes_off_no_drafts(tiny: str) -> None:
    wants = asks(structured_output=SENTENCE, logprobs=0, stop=("answer",))
    async with Engine(tiny, speculation=Speculation(drafter="ngram", max_tokens=4)) as engine:
        answer = await engine.generate([5, 6], wants)
        assert answer.text == "a long "
        assert answer.usage.accepted_draft_tokens == 0
        assert engine.stats().tokens_generated_total == len(answer.token_ids)


@pytest.mark.asyncio
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seats", [1, 2])
async def test_with_drafts_they_are_what_they_are_where_all_seats_are_taken(
    tiny: str, overlap: bool, seats: int
) -> None:
    form = StructuredOutput(regex="(abc def abc def [ab]{1,3} ){2,5}")
    wanted = [(5 + i, asks(structured_output=form, seed=i, logprobs=2)) for i in range(3)]
    expected, _ = await told(tiny, wanted, jump_forward=False)
    speculation = Speculation(drafter="ngram:min_ngram=1", max_tokens=4)
    with nothing_goes_wrong():
        found, stats = await told(
            tiny, wanted, max_num_seqs=seats, overlap=overlap, speculation=speculation
        )
    assert found == expected
    assert sum(stats.tokens_drafted_total) > 0
