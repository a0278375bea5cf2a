"""Steps that fail, at every place where they can."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import msgspec
import pytest

from aioserve import Engine, SchedulingPolicy, StepError, Verdict
from aioserve.testing import FakeModel, Fault, Faults, PlantedError, random_step_seconds
from tests.faults.harness import SEEDS, STEP_SECONDS, params, run, watched

PROMPTS = [[index] * (5 + 9 * index) for index in range(8)]
FAILED = {Fault.STEP_RAISES: "StepError", Fault.LAUNCH_RAISES: "StepError"}


def model(faults: Faults, **options) -> FakeModel:
    return FakeModel(step_seconds=lambda plan: STEP_SECONDS, faults=faults, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", [Fault.STEP_RAISES, Fault.LAUNCH_RAISES, Fault.BAD_ROW])
def test_whichever_step_fails_only_its_requests_end(fault, overlap):
    """Every step of a run with chunks, preemptions and shared prompts fails once."""
    ends = set()

    async def main(index: int) -> None:
        faults = Faults(at={index: fault}, seed=index)
        options = {"max_num_batched_tokens": 32, "max_num_seqs": 5, "overlap": overlap}
        async with watched(model(faults, num_pages=16), **options) as checker:
            reads = [checker.read(prompt, params(24)) for prompt in [*PROMPTS, *PROMPTS[4:]]]
            await asyncio.gather(*reads)
            ends.update(checker.ends)
            failed = checker.ends.total() - checker.ends["length"]
            assert failed <= (1 if fault is Fault.BAD_ROW else 5)
            assert await checker.read([1], params()) == "length"

    for index in range(0, 40, 2):
        run(partial(main, index), seed=index)
    assert ends == {"length", "RequestFailedError" if fault is Fault.BAD_ROW else "StepError"}


UNFIT = {
    "of another step": lambda outcome: msgspec.structs.replace(outcome, step=outcome.step + 1),
    "a token too many": lambda it: msgspec.structs.replace(it, token_ids=(*it.token_ids, 1)),
    "junk": lambda outcome: msgspec.structs.replace(outcome, token_ids=None),
    "nothing": lambda outcome: None,
}


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_no_outcome_of_a_step_ends_the_requests_of_that_step_alone(unfit, overlap):
    async def main() -> None:
        fake = model(Faults(), disturb=lambda n, plan, it: unfit(it) if n == 3 else it)
        async with watched(fake, overlap=overlap) as checker:
            with pytest.raises(StepError, match="step 3 "):
                await checker.engine.generate([1, 2], params(24))
            assert await checker.read([1, 2], params()) == "length"

    run(main, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_error_of_a_step_is_chained_and_two_steps_in_flight_may_fail(seed):
    async def main() -> None:
        faults = Faults(at={5: Fault.STEP_RAISES, 6: Fault.STEP_RAISES})
        async with watched(model(faults)) as checker:
            with pytest.raises(StepError) as caught:
                await checker.engine.generate([1, 2], params())
            assert isinstance(caught.value.__cause__, PlantedError)
            assert await checker.read([1, 2], params()) == "length"

    run(main, seed)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(16))
def test_everything_that_can_fail_fails_at_random(seed):
    draw = random.Random(seed)

    async def main() -> None:
        rates = dict.fromkeys(Fault, 0.03)
        faulty = FakeModel(
            step_seconds=random_step_seconds(0.0, 2 * STEP_SECONDS, seed=seed),
            faults=Faults(rates=rates, seed=seed),
        )
        options = {
            "page_size": draw.choice([1, 4, 16]),
            "num_pages": 24 * 16,
            "prefix_caching": draw.random() < 0.8,
            **draw.choice([{}, {"num_host_pages": 24, "preemption": "swap"}]),
        }
        options["num_pages"] //= options["page_size"]
        async with watched(faulty, max_num_seqs=6, max_buffered_tokens=8, **options) as checker:

            async def request() -> None:
                await asyncio.sleep(draw.random())
                await checker.read(
                    [draw.randrange(3)] * draw.randint(1, 90),
                    params(draw.randint(1, 60), seed=draw.randrange(9), n=draw.choice([1, 1, 3])),
                    leave_after=draw.choice([None, None, 1, 10]),
                    pause_seconds=lambda count: draw.random() * draw.choice([0, 0, 0, 1]),
                )

            await asyncio.gather(*(request() for _ in range(60)))
            assert checker.ends.total() == 60
            assert checker.ends.keys() <= {"length", "left", "StepError", "RequestFailedError"}

    run(main, seed)


class Raising(SchedulingPolicy):
    """Each method raises, or answers nonsense, now and then."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def sane(self, answer, nonsense):
        chance = self.draw.random()
        if chance < 0.1:
            raise RuntimeError("planted")
        return nonsense if chance < 0.2 else answer

    def order(self, waiting, view):
        return self.sane(waiting, [*waiting, *waiting, None])

    def admit(self, request, view):
        return self.sane(Verdict.NOW, "perhaps")

    def chunk(self, request, budget_tokens, view):
        return self.sane(budget_tokens, -1)

    def victim(self, running, need_pages, view):
        return self.sane(running[-1], None)

    def arrived(self, requests):
        self.sane(None, None)

    def step_finished(self, step, tokens):
        self.sane(None, None)

    def finished(self, requests):
        self.sane(None, None)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_policy_that_raises_in_any_method_costs_no_request(seed):
    async def main() -> None:
        options = {"max_num_batched_tokens": 32, "policy": Raising(seed)}
        async with watched(model(Faults(), num_pages=16), **options) as checker:
            reads = [checker.read(prompt, params(24)) for prompt in PROMPTS * 2]
            assert set(await asyncio.gather(*reads)) == {"length"}
            assert checker.engine.stats().policy_faults_total

    run(main, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_that_hangs_shows_in_the_health_of_the_engine(seed):
    async def main() -> None:
        faults = Faults(at={3: Fault.SLOW}, slow_seconds=30.0)
        slow = model(faults)
        async with Engine(slow, policy=SchedulingPolicy()) as engine:
            read = asyncio.create_task(engine.generate([1], params()))
            await asyncio.sleep(20)
            assert engine.stats().step_age_seconds > 19
            await read
            assert engine.stats().step_age_seconds == 0

    run(main, seed)
