"""Readers' view of requests with draft tokens, and the counts of these."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from aioserve import (
    Engine,
    FinishReason,
    Observer,
    RequestInfo,
    SamplingParams,
    SchedulingPolicy,
    Speculation,
    StepInfo,
    Token,
    Usage,
)
from aioserve.execution.speculation.resolver import LOOK_STEPS
from aioserve.scheduling.view import RequestView, SchedulerView
from aioserve.steps.plan import ItemKind, StepPlan
from aioserve.testing import FakeModel, check_invariants, expected_tokens, run_simulated
from tests.doubles.drafters import (
    DraftRule,
    FakeModelDrafters,
    QuickFakeModelDrafter,
    anything,
    nothing_right,
    right_up_to,
)

STEP_SECONDS = 0.01
PROMPT = [7, 1, 8, 2, 8, 1]
RULES: dict[str, DraftRule] = {
    "all right": right_up_to(99),
    "two right": right_up_to(2),
    "none right": nothing_right,
    "anything": anything(random.Random(3)),
    "none made": lambda known, coming, limit: [],
}


def seed_of(prompt: Sequence[int]) -> int:
    return sum(prompt) % 5


def engine_of(
    rule: DraftRule | None, *, max_tokens: int = 4, model: FakeModel | None = None, **options: Any
) -> Engine:
    """An engine on a fake model, with speculation unless `rule` is None."""
    options = {"policy": SchedulingPolicy(), "output_reserve_tokens": 0, **options}
    if rule is not None:
        speculation = Speculation(drafter="scripted", max_tokens=max_tokens)
        options |= {
            "speculation": speculation,
            "plugins": [FakeModelDrafters(rule, seed_of)],
        }
    return Engine(model or FakeModel(step_seconds=lambda plan: STEP_SECONDS), **options)


@dataclass
class Read:
    """Everything a reader sees of a request, except for its timing."""

    tokens: list[list[Token]]
    reasons: tuple[FinishReason | None, ...]
    stop_reasons: tuple[int | str | None, ...]
    usage: Usage

    @property
    def answer(self) -> tuple[Any, ...]:
        usage = self.usage
        counted = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return self.tokens, self.reasons, self.stop_reasons, counted


async def read(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, pause_seconds: float = 0.0
) -> Read:
    tokens: list[list[Token]] = [[] for _ in range(params.n)]
    async with engine.stream(list(prompt), params) as stream:
        async for token in stream:
            tokens[token.sample].append(token)
            await asyncio.sleep(pause_seconds)
    return Read(tokens, stream.finish_reasons, stream.stop_reasons, stream.usage)


def drawn(source: random.Random) -> tuple[list[int], SamplingParams]:
    """Draw a prompt, and parameters that may end its answer at any position for any reason."""
    prompt = [source.randrange(3)] * source.randint(1, 30) + [source.randrange(40, 90)]
    tokens = expected_tokens(prompt, 40, seed_of(prompt))
    letters = [chr(token) for token in tokens if 33 <= token < 127]
    stops = source.sample(letters, min(len(letters), source.choice([0, 0, 1, 2])))
    return prompt, SamplingParams(
        seed=seed_of(prompt),
        max_tokens=source.randint(1, 40),
        n=source.choice([1, 1, 1, 3]),
        stop=tuple(stops),
        include_stop_str_in_output=source.random() < 0.5,
        stop_token_ids=tuple(source.sample(tokens, source.choice([0, 0, 1]))),
        ignore_eos=source.random() < 0.3,
        logprobs=source.choice([None, None, 0, 2]),
        prompt_logprobs=source.choice([None, None, None, 1]),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap", [True, False])
def test_no_draft_changes_what_a_reader_gets(rule: str, overlap: bool) -> None:
    async def answers(made: DraftRule | None, seed: int) -> list[Read]:
        source = random.Random(seed)
        model = FakeModel(
            step_seconds=lambda plan: STEP_SECONDS, eos_token_ids=frozenset([seed, 7 * seed + 1])
        )
        options = {
            "page_size": source.choice([1, 4, 16]),
            "max_num_seqs": 3,
            "max_num_batched_tokens": source.choice([8, 64]),
            "max_buffered_tokens": source.choice([3, 1024]),
            "overlap": overlap,
        }
        requests = [drawn(source) for _ in range(12)]
        async with engine_of(made, model=model, **options) as engine:
            reads = await asyncio.gather(*(read(engine, *request) for request in requests))
            check_invariants(engine)
            stats = engine.stats()
            assert stats.drafter_faults_total == 0
            assert (sum(stats.tokens_drafted_total) > 0) == (
                made is not None and rule != "none made"
            )
        return reads

    ends: Counter[object] = Counter()
    for seed in range(6):
        plain = run_simulated(partial(answers, None, seed), seed=seed)
        drafted = run_simulated(partial(answers, RULES[rule], seed), seed=seed)
        for one, other in zip(drafted, plain, strict=True):
            assert one.answer[:3] == other.answer[:3]
            # The tokens found in the cache depend on timing.
            assert one.answer[3][:2] == other.answer[3][:2]
            ends.update(type(reason) for reason in other.stop_reasons)
            ends.update(other.reasons)
    assert ends.keys() == {str, int, type(None), FinishReason.STOP, FinishReason.LENGTH}


def first_letter(tokens: Sequence[int], least: int) -> int:
    """Return the index of the first token from `least` on that is a letter for the first time."""
    return next(
        place
        for place in range(least, len(tokens))
        if 33 <= tokens[place] < 127 and tokens[place] not in tokens[:place]
    )


@pytest.mark.parametrize("end", ["stop string", "stop id", "end id", "length"])
@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_behind_an_end_in_the_middle_of_a_step_is_told_or_counted(
    end: str, overlap: bool
) -> None:
    """All tokens of the last step but the first come after the end."""
    tokens = expected_tokens(PROMPT, 60, seed_of(PROMPT))
    place = first_letter(tokens, 3)
    params = {
        "stop string": {"stop": chr(tokens[place])},
        "stop id": {"stop_token_ids": (tokens[place],)},
        "end id": {},
        "length": {"max_tokens": place + 1},
    }[end]
    ids = frozenset([tokens[place]]) if end == "end id" else frozenset[int]()
    model = FakeModel(step_seconds=lambda plan: STEP_SECONDS, eos_token_ids=ids)

    async def main() -> None:
        engine = engine_of(right_up_to(99), max_tokens=32, model=model, overlap=overlap)
        async with engine:
            asked = SamplingParams(
                **{"max_tokens": 60, "logprobs": 1, **params}, seed=seed_of(PROMPT)
            )
            told = await read(engine, PROMPT, asked)
            (answer,) = told.tokens
            assert [token.id for token in answer] == tokens[: place + 1]
            assert all(token.logprobs is not None for token in answer)
            assert told.usage.completion_tokens == place + 1
            assert 0 < told.usage.accepted_draft_tokens <= place
            assert told.reasons == (FinishReason.LENGTH if end == "length" else FinishReason.STOP,)
            if end == "stop string":
                assert told.stop_reasons == (chr(tokens[place]),)
            await engine.drain()
            stats = engine.stats()
            assert stats.tokens_generated_total == place + 1
            assert sum(stats.tokens_accepted_total) >= told.usage.accepted_draft_tokens

    run_simulated(main)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_brings_no_more_to_a_full_mailbox_than_those_in_flight(overlap: bool) -> None:
    async def main() -> None:
        engine = engine_of(right_up_to(99), max_tokens=7, max_buffered_tokens=2, overlap=overlap)
        async with engine:
            params = SamplingParams(max_tokens=60, seed=seed_of(PROMPT))
            async with engine.stream(PROMPT, params) as stream:
                await asyncio.sleep(100 * STEP_SECONDS)
                there = stream.usage.completion_tokens
                # One short of full before the last planned step, and one step in flight.
                assert 2 <= there <= 1 + 8 * (2 if overlap else 1)
                ids = [token.id async for token in stream]
            assert ids == expected_tokens(PROMPT, 60, seed_of(PROMPT))

    run_simulated(main)


class Noted(Observer):
    def __init__(self) -> None:
        self.steps: list[StepInfo] = []
        self.requests: list[RequestInfo] = []

    def step_finished(self, step: StepInfo) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_completion_is_its_steps_and_the_drafts_that_were_right(rule: str, overlap: bool) -> None:
    async def main() -> None:
        async with engine_of(RULES[rule], overlap=overlap) as engine:
            noted = Noted()
            engine.observe(noted)
            told = await read(engine, PROMPT, SamplingParams(max_tokens=60, seed=seed_of(PROMPT)))
            await engine.drain()
            stats, usage = engine.stats(), told.usage
        assert sum(stats.tokens_drafted_total) == usage.drafted_tokens
        assert sum(stats.tokens_accepted_total) == usage.accepted_draft_tokens
        right_by_place, made_by_place = stats.tokens_accepted_total, stats.tokens_drafted_total
        assert all(a <= b for a, b in zip(right_by_place, made_by_place, strict=True))
        assert [*right_by_place] == sorted(right_by_place, reverse=True)
        parts = [part for step in noted.steps for part in step.parts]
        drawing = [part for part in parts if part.num_sampled]
        assert len(drawing) + usage.accepted_draft_tokens == usage.completion_tokens == 60
        assert sum(part.num_sampled for part in drawing) == 60
        at = 0  # each continues after the last accepted draft token
        for part in drawing:
            assert part.start_tokens + part.num_tokens >= at + len(PROMPT)
            assert part.start_tokens == (at + len(PROMPT) - 1 if part.is_decode else 0)
            at += part.num_sampled
        assert [part.is_decode for part in drawing] == [False] + [True] * (len(drawing) - 1)
        made = sum(part.num_tokens - 1 for part in drawing if part.is_decode)
        assert made == usage.drafted_tokens
        for step in noted.steps:
            assert step.computed_tokens >= sum(part.num_tokens for part in step.parts)
        if rule == "all right":
            assert usage.accepted_draft_tokens == usage.drafted_tokens > 40
        elif rule == "none right":
            assert usage.accepted_draft_tokens == 0 < usage.drafted_tokens

    run_simulated(main)


def plans_of(engine: Engine) -> list[tuple[ItemKind, int, int]]:
    """Record kind, start and count of each item that is launched from now on."""
    items: list[tuple[ItemKind, int, int]] = []
    runner = engine._lifecycle.model.runner
    launch = runner.launch

    def noted(plan: StepPlan, masks: Any = None) -> Any:
        items.extend((item.kind, item.start, item.count) for item in plan.items)
        return launch(plan, masks)

    runner.launch = noted
    return items


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_without_drafts_has_the_steps_of_an_engine_without(overlap: bool) -> None:
    async def plans(rule: DraftRule | None) -> list[tuple[ItemKind, int, int]]:
        async with engine_of(rule, overlap=overlap) as engine:
            items = plans_of(engine)
            limits: dict[str, Any] = {} if rule is None else {"max_draft_tokens": 0}
            await read(engine, PROMPT, SamplingParams(max_tokens=20, seed=0, **limits))
            assert engine.stats().tokens_drafted_total == ()
            return items

    without = run_simulated(partial(plans, None))
    assert run_simulated(partial(plans, right_up_to(99))) == without
    assert [kind for kind, *_ in without[1:]] == [ItemKind.DECODE] * (len(without) - 1)


class OnAndOff(SchedulingPolicy):
    """Allows draft tokens for some steps, then none for some, and so on."""

    def __init__(self) -> None:
        self.asked = 0

    def draft(self, request: RequestView, limit: int, view: SchedulerView) -> int:
        self.asked += 1
        return limit if self.asked % 7 < 3 else 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_come_and_go_and_nothing_is_left_of_them(rule: str, overlap: bool) -> None:
    """A step without draft tokens is a plain decode once earlier ones are known to be right or
    wrong."""

    async def main() -> None:
        async with engine_of(RULES[rule], overlap=overlap, policy=OnAndOff()) as engine:
            items = plans_of(engine)
            for _ in range(2):
                told = await read(
                    engine, PROMPT, SamplingParams(max_tokens=100, seed=seed_of(PROMPT))
                )
                ids = [token.id for token in told.tokens[0]]
                assert ids == expected_tokens(PROMPT, 100, seed_of(PROMPT))
            kinds = [(kind, count > 1) for kind, _, count in items]
            assert (ItemKind.DECODE, False) in kinds
            assert (ItemKind.VERIFY, True) in kinds
            switches = sum(a != b for a, b in pairwise(kinds))
            assert switches >= 6
            assert engine.stats().drafter_faults_total == 0
            await engine.drain()
            check_invariants(engine)

    run_simulated(main)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_prefix_cache_has_what_was_drawn_and_nothing_that_was_drafted(
    rule: str, page_size: int
) -> None:
    tokens = expected_tokens(PROMPT, 40, seed_of(PROMPT))

    async def cached(made: DraftRule | None) -> list[int]:
        async with engine_of(made, page_size=page_size) as engine:
            found: list[int] = []
            params = SamplingParams(max_tokens=40, seed=seed_of(PROMPT))
            await read(engine, PROMPT, params)
            known = [*PROMPT, *tokens]
            asked = [known[:end] for end in range(len(PROMPT), len(known) + 1)]
            # Also prompts with one wrong token, which may have been a draft token.
            asked += [[*known[:end], (known[end] + 1) % 256, *known[end + 1 :]] for end in (8, 20)]
            for prompt in asked:
                told = await read(engine, prompt, SamplingParams(max_tokens=1, seed=0))
                found.append(told.usage.cached_tokens)
            return found

    plain = run_simulated(partial(cached, None))
    assert run_simulated(partial(cached, RULES[rule])) == plain
    assert max(plain) >= len(PROMPT) + 30


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{"num_pages": 16}, {"num_pages": 60}], ids=str)
def test_the_drafter_knows_what_each_slot_has_drawn_however_often_slots_change_hands(
    rule: str, options: dict[str, Any]
) -> None:
    async def main() -> None:
        engine = engine_of(RULES[rule], max_num_seqs=4, page_size=8, **options)
        async with engine:
            prompts = [[index, *PROMPT] for index in range(9)]
            params = [SamplingParams(max_tokens=56, seed=seed_of(p), n=2) for p in prompts]
            reads = await asyncio.gather(
                *(read(engine, *asked) for asked in zip(prompts, params, strict=True))
            )
            for prompt, told in zip(prompts, reads, strict=True):
                ids = [token.id for token in told.tokens[0]]
                assert ids == expected_tokens(prompt, 56, seed_of(prompt))
            await engine.drain()
            stats = engine.stats()
            assert stats.drafter_faults_total == 0
            assert (stats.preemptions_total > 0) == (options["num_pages"] == 16)

    run_simulated(main)


class Seldom(SchedulingPolicy):
    """Allows draft tokens for four of every fifty tokens."""

    def draft(self, request: RequestView, limit: int, view: SchedulerView) -> int:
        return limit if request.generated_tokens % 50 < 4 else 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("options", [{"num_pages": 16}, {"num_pages": 60}], ids=str)
def test_one_that_is_watched_is_told_what_was_drawn_however_often_slots_change_hands(
    rule: str, overlap: bool, options: dict[str, Any]
) -> None:
    drafter = QuickFakeModelDrafter(RULES[rule], seed_of)

    async def main() -> None:
        engine = Engine(
            FakeModel(step_seconds=lambda plan: STEP_SECONDS),
            policy=Seldom(),
            overlap=overlap,
            max_num_seqs=4,
            page_size=8,
            output_reserve_tokens=0,
            speculation=Speculation(drafter="scripted", max_tokens=4),
            plugins=[FakeModelDrafters(RULES[rule], made=lambda: drafter)],
            **options,
        )
        async with engine:
            prompts = [[index, *PROMPT] for index in range(9)]
            params = [
                SamplingParams(max_tokens=90, seed=seed_of(p), n=1 + p[0] % 2) for p in prompts
            ]
            reads = await asyncio.gather(
                *(read(engine, *asked) for asked in zip(prompts, params, strict=True))
            )
            for prompt, told in zip(prompts, reads, strict=True):
                ids = [token.id for token in told.tokens[0]]
                assert ids == expected_tokens(prompt, 90, seed_of(prompt))
            await engine.drain()
            check_invariants(engine)
            assert engine.stats().drafter_faults_total == 0

    run_simulated(main)
    assert LOOK_STEPS in drafter.limits


def test_a_dump_is_plain_while_drafts_are_in_flight() -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=60, seed=seed_of(PROMPT))
        engine = engine_of(right_up_to(2))
        async with engine, engine.stream(PROMPT, params) as stream:
            async for token in stream:
                (sequence,) = json.loads(json.dumps(engine.dump()))["sequences"]
                assert sequence["known_tokens"] > len(PROMPT) + token.index
                if token.index == 20:
                    break

    run_simulated(main)
