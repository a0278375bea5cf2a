"""Logits processors change the rows of their own request, and can't harm any other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aioserve import (
    Engine,
    InvalidSamplingError,
    LogitsProcessor,
    LogitsProcessorSpec,
    RequestFailedError,
    SamplingParams,
    hookimpl,
)
from aioserve.testing import check_logits_processor
from aioserve.testing.random_model import write_random_model
from tests.parity.tiny_models import CONFIGS
from tests.plugin_system.hostile import ERRORS

NUM_TOKENS = 20
RAISED = {error.__name__: error for error in ERRORS}
TIGHT: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 20,
    "max_num_batched_tokens": 13,
    "output_reserve_tokens": 0,
}


class NothingTwice(LogitsProcessor):
    """No token of prompt or answer again; others may be made likelier."""

    def __init__(self, *, likely: int = -1) -> None:
        self.likely = likely

    def process(self, prompt_ids, answer_ids, logits):
        logits[prompt_ids] = -math.inf
        logits[answer_ids] = -math.inf
        if self.likely >= 0 and len(answer_ids) == 3:
            changed = logits.clone()
            changed[self.likely] = 1e4
            return changed
        return None


class Broken(LogitsProcessor):
    """Goes wrong with the fourth token."""

    def __init__(self, *, how: str) -> None:
        self.how = how

    def process(self, prompt_ids, answer_ids, logits) -> Any:
        if len(answer_ids) != 3:
            return None
        if self.how in RAISED:
            raise RAISED[self.how]("planted")
        if self.how == "shape":
            return logits[:-1]
        if self.how == "dtype":
            return logits.double()
        return {"a number": 5, "nan": logits * math.nan}[self.how]


class Counting(LogitsProcessor):
    """Processor whose edits depend on how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def process(self, prompt_ids, answer_ids, logits):
        self.asked += 1
        logits[self.asked % 2] += 1


class Asynchronous(LogitsProcessor):
    async def process(self, prompt_ids, answer_ids, logits):
        return None


class Plugin:
    @hookimpl
    def aioserve_logits_processors(self):
        return [
            LogitsProcessorSpec("nothing_twice", NothingTwice),
            LogitsProcessorSpec("broken", Broken),
            LogitsProcessorSpec("asynchronous", Asynchronous),
        ]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(
        tmp_path_factory.mktemp("model"), CONFIGS["llama"], dtype="float32", seed=3
    )


def params(*names: str, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.9, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields},
        logits_processors=names,
    )


def prompt_of(number: int) -> list[int]:
    return [(7 * number + i * i) % 288 for i in range(9)]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.asyncio
async def test_rows_of_other_requests_stay_and_preemption_changes_nothing(model, backend):
    def asked(number: int) -> SamplingParams:
        names = ([], ["nothing_twice"], [f"nothing_twice:likely={number}"])[number % 3]
        return params(*names, n=1 + (number % 4 == 1))

    requests = [(prompt_of(i), asked(i)) for i in range(9)]
    options: dict[str, Any] = {"backend": backend, "plugins": [Plugin()]}
    async with Engine(str(model), **TIGHT, **options) as engine:
        together = await asyncio.gather(*(engine.generate(*request) for request in requests))
        assert engine.stats().preemptions_total > 0
    async with Engine(str(model), **options) as engine:
        alone = [await engine.generate(*request) for request in requests]

    for (prompt, asked_for), one, other in zip(requests, together, alone, strict=True):
        assert [s.token_ids for s in one.samples] == [s.token_ids for s in other.samples]
        for sample in one.samples if asked_for.logits_processors else ():
            assert len({*prompt, *sample.token_ids}) == len(prompt) + NUM_TOKENS
    assert [answer.token_ids[3] for answer in alone[2::3]] == [2, 5, 8]


@pytest.mark.parametrize("how", [*RAISED, "shape", "dtype", "a number", "nan"])
@pytest.mark.asyncio
async def test_one_that_goes_wrong_ends_its_request_alone(model, how, caplog):
    async with Engine(str(model), plugins=[Plugin()]) as engine:
        expected = await engine.generate(prompt_of(1), params())
        neighbour = asyncio.ensure_future(engine.generate(prompt_of(1), params()))
        async with engine.stream(prompt_of(2), params(f"broken:how={how}")) as stream:
            for _ in range(3):
                await anext(stream)
            with pytest.raises(RequestFailedError, match="logits"):
                await anext(stream)
        assert (await neighbour).token_ids == expected.token_ids
        assert (await engine.generate(prompt_of(1), params())).token_ids == expected.token_ids
        assert engine.stats().num_running == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown", r"logits_processors\[0\]: no logits processor 'unknown'; there are: async"),
        ("nothing_twice:much=1", "has no option 'much'"),
        ("nothing_twice:likely=x", "must be a whole number, got 'x'"),
        ("broken", "needs the option how"),
        ("asynchronous", "must be a plain function"),
    ],
)
@pytest.mark.asyncio
async def test_a_name_that_can_not_be_had_is_refused_at_once(model, name, message):
    async with Engine(str(model), plugins=[Plugin()]) as engine:
        with pytest.raises(InvalidSamplingError, match=message) as caught:
            engine.stream([1], params(name))
        assert caught.value.argument == "logits_processors"


def test_a_check_finds_what_remembers_more_than_the_ids():
    check_logits_processor(NothingTwice, max_examples=10)
    with pytest.raises(AssertionError, match="follow from the ids alone"):
        check_logits_processor(Counting, max_examples=30)
    with pytest.raises(AssertionError, match="shape"):
        check_logits_processor(lambda: Broken(how="shape"), max_examples=200)


def test_a_processor_sees_tensors_for_reading_and_logits_of_its_own():
    seen: list[Any] = []

    class Seeing(LogitsProcessor):
        def process(self, prompt_ids, answer_ids, logits):
            seen.append((prompt_ids.dtype, answer_ids.dtype, logits.dtype))

    check_logits_processor(Seeing, max_examples=3)
    assert set(seen) == {(torch.int64, torch.int64, torch.float32)}
