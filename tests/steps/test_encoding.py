"""Plans of every kind come out of their bytes as they were."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
import numpy as np
import pytest

from aioserve import SamplingParams
from aioserve.request import Request
from aioserve.steps.encoding import decoded_plan, encoded_plan
from aioserve.steps.plan import ItemKind, StepPlan
from aioserve.structured_output import StructuredOutput
from tests.scheduling.bench import Bench

MAX_BYTES = 40_000


def as_read(value: Any) -> Any:
    """Arrays as lists, structs with the names of their types: what may be compared."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, msgspec.Struct):
        names = type(value).__struct_fields__
        return type(value).__name__, {name: as_read(getattr(value, name)) for name in names}
    if isinstance(value, list | tuple):
        return type(value).__name__, [as_read(one) for one in value]
    return value if isinstance(value, Enum | dict) else (type(value).__name__, value)


def submit(bench: Bench, prompt: int, **fields: Any) -> None:
    params = fields.pop("params", SamplingParams(temperature=0.0))
    bench.scheduler.submit(
        Request(
            request_id="r",
            prompt_ids=np.arange(prompt, dtype=np.int32),
            params=params,
            max_length=prompt + 9,
            arrival_seconds=0.0,
            **fields,
        )
    )


def plans_of_every_kind() -> list[StepPlan]:
    bench = Bench(num_pages=24, num_host_pages=24, preemption="swap", max_num_batched_tokens=24)
    everything = SamplingParams(
        n=2,
        temperature=0.5,
        logit_bias={3: 1.5},
        allowed_token_ids=[1, 2, 3],
        bad_words=["no"],
        stop_token_ids=[9],
        logits_processors=["one:a=b", "two"],
        repetition_penalty=1.5,
        logprobs=3,
    )
    submit(
        bench,
        10,
        params=everything,
        end_ids=frozenset([9, 250]),
        bad_word_ids=((4, 5), (6,)),
        logits_processors=(4, 0),
    )
    submit(bench, 30, params=SamplingParams(prompt_logprobs=2), score_from=1)
    submit(bench, 9, pooled=range(2, 7))
    plans = []
    for step in range(40):
        if step == 4:
            for _ in range(5):
                submit(bench, 20)
        if not bench.sequences:
            break
        plans.append(bench.plan())
        bench.commit(plans[-1])
    return plans


def test_plans_of_every_kind_are_equal_when_they_are_decoded() -> None:
    plans = plans_of_every_kind()
    items = [item for plan in plans for item in plan.items]
    assert {item.kind for item in items} == {ItemKind.PREFILL, ItemKind.DECODE}
    assert any(item.scored for item in items)
    assert any(item.pooled for item in items)
    assert any(plan.preempted for plan in plans)
    between = {(copy.from_tier, copy.to_tier) for plan in plans for copy in plan.copies}
    assert between == {(0, 0), (0, 1), (1, 0)}
    assert any(plan.ended_slots for plan in plans)
    assert any(change.first for plan in plans for change in plan.pages)
    assert any(start.logits_processors for plan in plans for start in plan.started_slots)
    for plan in plans:
        assert as_read(decoded_plan(encoded_plan(plan))) == as_read(plan)
        assert encoded_plan(decoded_plan(encoded_plan(plan))) == encoded_plan(plan)


@pytest.mark.parametrize(
    "form", [{"json_schema": {"type": "object"}}, {"choice": ["a", "b"]}, {"regex": "a+"}]
)
def test_the_form_of_an_answer_is_part_of_its_slot(form: dict[str, Any]) -> None:
    bench = Bench()
    params = SamplingParams(structured_output=StructuredOutput(**form))
    submit(bench, 5, params=params)
    (sequence_id,) = bench.sequences
    bench.scheduler.guide(sequence_id)
    plan = bench.plan()
    assert as_read(decoded_plan(encoded_plan(plan))) == as_read(plan)


def test_many_decodes_of_long_contexts_are_few_bytes() -> None:
    """Plans leave page tables out: those of 256 sequences with 8,192 tokens alone would be 525
    kB."""
    bench = Bench(
        num_pages=256 * 514, page_size=16, max_num_seqs=256, max_num_batched_tokens=256 * 8200
    )
    for _ in range(256):
        submit(bench, 8192)
    bench.scheduler.plan(0.0)
    sizes = [len(encoded_plan(plan)) for _ in range(2) if (plan := bench.scheduler.plan(0.0))]
    assert len(sizes) == 2
    assert max(sizes) <= MAX_BYTES


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decoded_plan(b"nothing")
    plan = StepPlan(step=1, items=(), ended_slots=("a callable", print))  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        NotImplementedError, match="builtin_function_or_method, which isn't encoded"
    ):
        encoded_plan(plan)
