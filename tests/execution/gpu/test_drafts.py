"""Draft models and heads on the step thread, beside a model on a fake GPU.

They change no token, and draft tokens of a perfect drafter are all right.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from aioserve import EngineStats, Speculation
from aioserve.drafting.drafter import DraftedSequence
from aioserve.execution.gpu.failures import (
    DeviceFailedError,
    HungDeviceError,
    OutOfDeviceMemoryError,
)
from aioserve.execution.gpu.runner import CudaRunner
from aioserve.execution.speculation.drafts.computed_drafter import ComputedDrafter
from aioserve.execution.speculation.drafts.draft_head import DraftHead
from aioserve.execution.speculation.drafts.draft_model import DraftModel
from aioserve.execution.step_arrays import PlanReader, StepArrays, UnresolvedStep
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import DRAFT_TOKEN, ItemKind, SampleRow, SlotStart, StepPlan
from aioserve.testing import StreamChecker, expected_tokens, run_simulated
from aioserve.testing.fake_model import PlantedError
from tests.doubles.draft_decoder import DraftDecoder
from tests.doubles.draft_head import HeadOfEntries
from tests.doubles.fake_gpu import FakeGpu
from tests.doubles.fake_gpu_model import FakeGpuModel, FakeStepModel
from tests.doubles.gpu_drafts import ModelPlugin, head_beside, model_beside
from tests.doubles.gpu_faults import GpuFault, GpuFaults
from tests.doubles.simulated_host import SimulatedHandler
from tests.execution.gpu.engines import (
    MAX_MODEL_LEN,
    STEPS_FAIL,
    check_but_for_failures,
    gpu_of,
    options_of,
    serve,
    silence,
)
from tests.execution.gpu.plans import (
    GREEDY,
    item,
    pages_of,
    plan,
    runner_of,
    simulated_runner,
    step_model,
    threaded_gpu,
)
from tests.placed import PlacedItem, placed_plan
from tests.waits import LIMIT_SECONDS

Make = Callable[[FakeStepModel, int], ComputedDrafter]
PROMPT = [7, 1, 8, 2, 8, 1]
OF_KIND: dict[str, type[Any]] = {"model": DraftModel, "head": DraftHead}

pytestmark = pytest.mark.usefixtures("unmeasured_steps")


def drafts_of(kind: str, wrong_at: frozenset[int] = frozenset()) -> Make:
    if kind == "model":
        decoder = DraftDecoder()
        decoder.wrong_at = wrong_at
        return partial(model_beside, decoder)
    head = HeadOfEntries()
    head.wrong_at = wrong_at
    return partial(head_beside, head)


def served(
    make: Make,
    draw: random.Random,
    seed: int,
    *,
    num_requests: int = 40,
    preempts: bool = False,
    **of_model: Any,
) -> tuple[StreamChecker, EngineStats, FakeGpu]:
    """Serve requests with the draft that `make` makes beside a model."""
    plugin = ModelPlugin(make)
    model = FakeGpuModel(seed=seed, max_model_len=MAX_MODEL_LEN, drafts=plugin, **of_model)
    options = {
        **options_of(draw),
        "plugins": [plugin],
        "speculation": Speculation(drafter="beside", max_tokens=draw.choice([1, 4, 9])),
    }
    serving = partial(serve, model, draw, num_requests, preempts=preempts, **options)
    with silence():
        checker, engine = run_simulated(serving, seed=seed)
    return checker, engine.stats(), gpu_of(model)


def check_all_right(stats: EngineStats) -> None:
    assert stats.drafter_faults_total == 0
    assert stats.tokens_accepted_total == stats.tokens_drafted_total
    assert sum(stats.tokens_drafted_total) > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["model", "head"])
def test_what_knows_the_model_is_always_right(kind: str, seed: int, preempts: bool) -> None:
    draw = random.Random(seed)
    checker, stats, gpu = served(
        drafts_of(kind),
        draw,
        seed,
        preempts=preempts,
        op_seconds=draw.choice([0.0005, 0.01]),
        graph_sizes=draw.choice([(), (1, 2, 4), (3, 12, 60)]),
    )
    assert not gpu.violations
    checker.check()
    check_all_right(stats)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", OF_KIND)
def test_what_is_wrong_at_times_changes_no_token(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    wrong_at = frozenset(draw.sample(range(MAX_MODEL_LEN), 30))
    checker, stats, gpu = served(drafts_of(kind, wrong_at), draw, seed, graph_sizes=(1, 4, 60))
    assert not gpu.violations
    checker.check()
    assert 0 < sum(stats.tokens_accepted_total) < sum(stats.tokens_drafted_total)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", OF_KIND)
@pytest.mark.parametrize("call", ["start", "extend_all", "draft_all", "end"])
def test_a_computation_that_fails_ends_the_drafting_for_its_slots_alone(
    kind: str, call: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = getattr(OF_KIND[kind], call), 0

    def at_times(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 7 == 0:
            raise PlantedError("the drafter")
        return made(*args)

    monkeypatch.setattr(OF_KIND[kind], call, at_times)
    checker, stats, _ = served(drafts_of(kind), random.Random(seed), seed)
    checker.check()
    assert stats.drafter_faults_total >= calls // 7 > 0
    assert sum(stats.tokens_accepted_total) > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", OF_KIND)
def test_drafts_without_memory_are_missed_in_their_step_alone(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out before a batch is computed, or after it; once, or again when it is
    repeated."""
    draw, found_none = random.Random(seed), 0
    double = DraftDecoder if kind == "model" else HeadOfEntries
    made = double.draw

    def at_times(*args: Any, **named: Any) -> Any:
        nonlocal found_none
        fails = draw.random() < 0.3
        found_none += fails
        if fails and draw.random() < 0.5:
            raise MemoryError("draft_tokens")
        drawn = made(*args, **named)
        if fails:
            raise MemoryError("draft_tokens")
        return drawn

    monkeypatch.setattr(double, "draw", at_times)
    checker, stats, gpu = served(drafts_of(kind), draw, seed)
    checker.check()
    assert gpu.num_frees == found_none > 0
    check_all_right(stats)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", OF_KIND)
def test_steps_that_fail_leave_what_drafts_in_order(kind: str, seed: int) -> None:
    """Launches are refused, find no memory, or compute NaN. Copies for the drafter fail, too."""
    draw = random.Random(seed)
    checker, stats, gpu = served(
        drafts_of(kind),
        draw,
        seed,
        num_requests=60,
        graph_sizes=draw.choice([(), (2, 8, 40)]),
        faults=STEPS_FAIL,
    )
    assert not gpu.violations
    check_but_for_failures(checker)
    assert sum(stats.tokens_accepted_total) > 0


def test_a_device_that_breaks_ends_the_engine_beside_what_drafts() -> None:
    for launch in (60, 131):
        faults = GpuFaults(at={launch: GpuFault.BREAKS})
        checker, *_ = served(drafts_of("model"), random.Random(1), 1, faults=faults)
        assert checker.num_open == 0
        assert not checker.wrong_tokens
        assert checker.ends["EngineFailedError"] > 0


@pytest.mark.parametrize("kind", OF_KIND)
def test_a_plan_that_cannot_be_read_is_heard_of_all_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan says which slots end and start, and who has their pages."""
    read, calls = PlanReader.read_unresolved, 0

    def at_times(
        self: PlanReader, plan: StepPlan, masks: LateMasks | None = None
    ) -> StepArrays | UnresolvedStep:
        nonlocal calls
        step = read(self, plan, masks)
        calls += 1
        if calls % 20 == 0:
            raise PlantedError("a plan")
        return step

    monkeypatch.setattr(PlanReader, "read_unresolved", at_times)
    checker, stats, _ = served(drafts_of(kind), random.Random(5), 5)
    assert calls > 40
    assert checker.num_open == 0
    assert not checker.wrong_tokens
    check_all_right(stats)


# -- a runner


def drafting_start(slot: int) -> SlotStart:
    drafting = DraftedSequence(known_ids=np.array(PROMPT, np.int32), prompt_tokens=len(PROMPT))
    return SlotStart(slot=slot, params=GREEDY, seed=slot, drafting=drafting)


def first_plan() -> StepPlan:
    return msgspec.structs.replace(plan(0, item(1, 0, PROMPT)), started_slots=(drafting_start(1),))


def verifying_plan(num_draft_tokens: int) -> StepPlan:
    """Make a step that continues `first_plan`."""
    token_ids = np.array([-1] + [DRAFT_TOKEN] * num_draft_tokens, np.int32)
    verified = PlacedItem(
        kind=ItemKind.VERIFY,
        sequence_id=1,
        slot=1,
        start=len(PROMPT),
        index=len(PROMPT),
        count=len(token_ids),
        token_ids=token_ids,
        rows=(SampleRow(offset=0, slot=1),),
        page_ids=pages_of(1),
    )
    return placed_plan(step=1, items=(verified,))


class SlowDecoder(DraftDecoder):
    """Waits until it may compute."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Event()
        self.may_go_on = threading.Event()

    def draw(self, *args: Any) -> Any:
        self.began.set()
        assert self.may_go_on.wait(LIMIT_SECONDS)
        return super().draw(*args)


async def launched(runner: CudaRunner, drafter: ComputedDrafter) -> Sequence[Any]:
    """Launch a step, and another one for which draft tokens are being computed."""
    runner.take_drafter(drafter)
    handles = [runner.launch(first_plan()), runner.launch(verifying_plan(3))]
    assert (await handles[0]).token_ids == tuple(expected_tokens(PROMPT, 1, seed=1))
    return handles


def test_the_loop_goes_on_while_drafts_are_computed_and_closing_waits_for_them() -> None:
    async def main(gpu: FakeGpu) -> None:
        decoder, model = SlowDecoder(), step_model(gpu)
        drafter = model_beside(decoder, model, 64)
        runner = runner_of(gpu, model, name="slow", follower=drafter)
        _, verified = await launched(runner, drafter)
        assert await asyncio.to_thread(decoder.began.wait, LIMIT_SECONDS)
        closing = asyncio.ensure_future(runner.aclose())
        behind: Any = runner.launch(plan(2, item(2, 0, PROMPT), started=(2,)))
        await asyncio.sleep(0.02)
        assert not verified.done()
        assert not behind.done()
        assert not closing.done()
        decoder.may_go_on.set()  # called on the loop
        outcome: StepOutcome = await verified
        assert outcome.token_ids == tuple(expected_tokens(PROMPT, 5, seed=1)[1:])
        assert outcome.drafted == {0: 3}
        assert outcome.drafting_seconds > 0.02
        assert (await behind).token_ids == tuple(expected_tokens(PROMPT, 1, seed=2))
        await closing

    with threaded_gpu() as gpu:
        asyncio.run(main(gpu))
        assert not gpu.violations


def test_drafts_that_never_come_are_a_device_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = SimulatedHandler.put

    def put_some(self: SimulatedHandler, call: Callable[[], None]) -> None:
        if "DrafterApart._draft" not in repr(call):
            put(self, call)

    monkeypatch.setattr(SimulatedHandler, "put", put_some)

    async def main() -> None:
        gpu = FakeGpu()
        model = step_model(gpu)
        drafter = model_beside(DraftDecoder(), model, 64)
        runner = simulated_runner(gpu, model, follower=drafter)
        _, verified = await launched(runner, drafter)
        with pytest.raises(HungDeviceError, match="the draft tokens for step 1 haven't come after"):
            await verified
        with pytest.raises(HungDeviceError):
            await runner.launch(plan(2, item(2, 0, PROMPT), started=(2,)))
        await runner.aclose()

    run_simulated(main)
    assert "the draft tokens for step 1" in caplog.text


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (PlantedError("copies"), PlantedError),
        (MemoryError("copies"), OutOfDeviceMemoryError),
        (RuntimeError("copies"), DeviceFailedError),
    ],
)
def test_what_fails_beside_a_step_fails_that_step(
    error: Exception, meaning: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of a CPU whose follower can't take a plan. A failed device fails for
    good."""
    follow, breaks = DraftModel.follow, meaning is DeviceFailedError

    async def main() -> None:
        gpu = FakeGpu()

        def fails(self: DraftModel, plan: StepPlan) -> None:
            if plan.step == 1:
                if breaks:
                    gpu.failure = "copies"
                raise error
            follow(self, plan)

        monkeypatch.setattr(DraftModel, "follow", fails)
        model = step_model(gpu)
        drafter = model_beside(DraftDecoder(), model, 64)
        runner = simulated_runner(gpu, model, follower=drafter)
        _, verified = await launched(runner, drafter)
        behind = runner.launch(plan(2, item(2, 0, PROMPT), started=(2,)))
        with pytest.raises(meaning, match="copies"):
            await verified
        if breaks:
            assert isinstance(runner._failure, DeviceFailedError)
            with pytest.raises(DeviceFailedError, match="copies"):
                await behind
        else:
            assert (await behind).token_ids == tuple(expected_tokens(PROMPT, 1, seed=2))
        await runner.aclose()

    with silence():
        run_simulated(main)
