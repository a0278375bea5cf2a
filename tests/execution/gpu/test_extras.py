"""Steps whose rows ask for more than a draw: tokens and log-probabilities equal the reference's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from triton.runtime.interpreter import GridExecutor

from aioserve.execution.cpu_worker import CpuWorker
from aioserve.execution.gpu.decoder_steps import DecoderSteps
from aioserve.execution.gpu.step_model import outcome_of
from aioserve.execution.host import Host
from aioserve.execution.step_arrays import PlanReader
from aioserve.execution.step_thread_runner import StepThreadRunner
from aioserve.ops import Backend, Batch, KVCache, KVShape
from aioserve.ops.gpu import sampling
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.reference import ReferenceBackend
from aioserve.request import SamplingParams
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import ScoredTokens, SlotStart, StepPlan, WorkItem
from aioserve.structured_output import StructuredOutput
from tests.execution.gpu.host_device import HostDevice, HostEvent
from tests.execution.gpu.plans import decode, item, runner_of
from tests.ops.scenarios import one_group
from tests.placed import placed_plan

VOCAB_SIZE = 60
NUM_SLOTS = 8
MAX_MODEL_LEN = 48


@pytest.fixture(autouse=True)
def _lists_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make lists short, since the interpreter goes through all of them."""
    monkeypatch.setattr(sampling, "LISTED", sampling.SEARCHED)


@dataclass
class TableDecoder:
    """Logits that depend only on a token and its position."""

    backend: Backend
    program: None = None
    config: Any = field(
        default_factory=lambda: SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=8)
    )

    def __post_init__(self) -> None:
        source = torch.Generator().manual_seed(3)
        self.by_token: Tensor = 2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=source)
        self.by_position: Tensor = torch.randn(MAX_MODEL_LEN, VOCAB_SIZE, generator=source)

    def cover(self, end_position: int) -> None:
        pass

    def make_room(self, num_tokens: int) -> None:
        pass

    def leave_room(self) -> None:
        pass

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        rows = batch.logit_rows
        return self.by_token[batch.token_ids[rows]] + self.by_position[batch.positions[rows].long()]

    def draw(self, batch: Batch, cache: KVCache, rows: Any, last_tokens: Tensor, edits: Any) -> Any:
        logits = self.forward(batch, cache)
        if edits is not None:
            edits.apply(logits)
        return self.backend.draw(logits, rows, last_tokens)


def cache_of(backend: Backend) -> KVCache:
    return backend.allocate_kv(KVShape(one_group(1, 1, 16, torch.float32), 33, 4))


def steps_on_host() -> DecoderSteps:
    backend = CudaBackend("cpu")
    return DecoderSteps(
        TableDecoder(backend),  # pyright: ignore[reportArgumentType]
        cache_of(backend),
        num_slots=NUM_SLOTS,
        max_model_len=MAX_MODEL_LEN,
        max_tokens=64,
        max_sequences=NUM_SLOTS,
    )


def reference_runner() -> StepThreadRunner:
    backend = ReferenceBackend()
    decoder: Any = TableDecoder(backend)
    worker = CpuWorker(decoder, cache_of(backend), num_slots=NUM_SLOTS)
    return StepThreadRunner(Host(4, NUM_SLOTS, 1), worker, name="test")


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, logprobs=3),
    SamplingParams(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.4,
        presence_penalty=1.0,
        frequency_penalty=0.7,
        logit_bias={3: 4.0, 9: -50.0, 41: 3.5},
        min_tokens=4,
        logprobs=0,
        prompt_logprobs=2,
    ),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=0.7),
    SamplingParams(temperature=0.7, allowed_token_ids=[1, 2, 30, 59], logprobs=5),
    SamplingParams(temperature=0.7, seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.9, logprobs=4),
]
"""Parameters of each slot."""
BEAM_SLOT = 6
PROMPTS = [[slot + 1, 9, *range(slot, 3 * slot, 2)] for slot in range(len(PARAMS))]
BAD_WORDS = ((7,), (30, 11), (3, 3), (41, 3, 41))


def starts(known: Sequence[Sequence[int]] = PROMPTS) -> tuple[SlotStart, ...]:
    return tuple(
        SlotStart(
            slot=slot,
            params=params,
            seed=100 + slot,
            prompt_tokens=len(PROMPTS[slot]),
            edits_logprobs=slot == BEAM_SLOT,
            known_ids=np.array(known[slot], np.int32) if params.needs_history else None,
            end_ids=frozenset((5, 41)),
            bad_word_ids=BAD_WORDS if params.needs_history else (),
        )
        for slot, params in enumerate(PARAMS)
    )


def scored(work: WorkItem, offset: int, targets: Sequence[int]) -> WorkItem:
    ids = np.array(targets, np.int32)
    return msgspec.structs.replace(work, scored=ScoredTokens(offset=offset, target_ids=ids))


def plans_of(num_decodes: int) -> list[StepPlan]:
    """Plan all prompts, and decodes of all of them.

    One prompt takes two chunks. The first, of one token, is scored and not sampled from.
    """
    prompt = PROMPTS[2]
    first = scored(item(2, 0, prompt[:1], rows=()), 0, prompt[1:2])
    rest = scored(item(2, 1, prompt[1:]), 0, prompt[2:])
    others = [item(slot, 0, ids) for slot, ids in enumerate(PROMPTS) if slot != 2]
    work = [[first], [others[0], rest, *others[1:]]]
    work += [
        [decode(slot, len(ids) + step) for slot, ids in enumerate(PROMPTS)]
        for step in range(num_decodes)
    ]
    started = starts()
    return [
        placed_plan(step=step, items=tuple(items), started_slots=started if step == 0 else ())
        for step, items in enumerate(work)
    ]


def check_equal(found: StepOutcome, expected: StepOutcome) -> None:
    assert found.token_ids == expected.token_ids
    assert found.row_errors == expected.row_errors == {}
    assert found.logprobs.keys() == expected.logprobs.keys()
    pairs = [(found.logprobs[row], expected.logprobs[row]) for row in found.logprobs]
    for one, other in [*pairs, *zip(found.scored, expected.scored, strict=True)]:
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [top.id for top in one.top] == [top.id for top in other.top]
        logprobs = [top.logprob for top in other.top]
        assert [top.logprob for top in one.top] == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.asyncio
async def test_a_mixed_batch_is_that_of_the_reference() -> None:
    """Decode steps are padded to a graph of 8 that ends with their logits."""
    device, model, reference = HostDevice(), steps_on_host(), reference_runner()
    runner = runner_of(device, model, (1, 8))
    plans = plans_of(6)
    outcomes = await asyncio.gather(*[runner.launch(plan) for plan in plans])
    for plan, outcome in zip(plans, outcomes, strict=True):
        check_equal(outcome, await reference.launch(plan))
    assert len(outcomes[0].scored) == 1
    assert len(outcomes[1].scored) == len(PROMPTS[2]) - 2
    assert all(list(outcome.logprobs) == [1, 2, 4, BEAM_SLOT] for outcome in outcomes[2:])
    assert all(outcome.token_ids[4] in (1, 2, 30, 59) for outcome in outcomes[2:])
    assert (device.captured, device.replays) == (1, len(plans) - 3)
    # The others, which ask for nothing, use another graph.
    plain = [decode(slot, len(PROMPTS[slot]) + 6) for slot in (0, 5)]
    for step in (8, 9):
        plan = placed_plan(step=step, items=tuple(plain), ended_slots=(1, 2, 3, 4, 6))
        check_equal(await runner.launch(plan), await reference.launch(plan))
        plain = [decode(slot, len(PROMPTS[slot]) + 7) for slot in (0, 5)]
    assert (device.captured, device.replays) == (2, len(plans) - 2)
    await runner.aclose()
    await reference.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("graph_sizes", [(), (2,)], ids=["eager", "graphs"])
async def test_masks_are_waited_for_from_the_end_of_the_step_before(
    graph_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device computes a step after it is enqueued, and masks are made from its tokens."""
    monkeypatch.setattr("aioserve.sampling.masks.WAIT_SECONDS", 0.0)
    awaited: list[LateMasks] = []

    def synchronize(self: HostEvent) -> None:
        if awaited and not threading.current_thread().name.endswith("-waits"):
            awaited.pop().bring(0, np.array([0, 1 << 9], np.int32))

    monkeypatch.setattr(HostEvent, "synchronize", synchronize)
    device = HostDevice()
    runner = runner_of(device, steps_on_host(), graph_sizes)
    params = SamplingParams(temperature=0.0, structured_output=StructuredOutput(regex="a"))
    start = SlotStart(slot=0, params=params, seed=0)
    await runner.launch(placed_plan(step=0, items=(item(0, 0, [5, 9]),), started_slots=(start,)))
    for step in range(1, 4):
        masks = LateMasks([0])
        awaited.append(masks)
        plan = placed_plan(step=step, items=(decode(0, 1 + step),))
        assert (await runner.launch(plan, masks)).token_ids == (41,)
    assert device.replays == (2 if graph_sizes else 0)
    await runner.aclose()


@pytest.mark.asyncio
async def test_a_slot_that_starts_anew_brings_its_history() -> None:
    """Tokens generated before a preemption, for example, still count."""
    model, runner = steps_on_host(), reference_runner()
    plans = plans_of(4)
    outcomes = [await runner.launch(plan) for plan in plans]
    await runner.aclose()
    rows = [0, 2, 1, 3, 4, 5, 6]  # of the second step: slot 2 comes second, as in the others
    assert [work.slot for work in plans[1].items] == rows
    known = [list(ids) for ids in PROMPTS]
    for outcome in outcomes[1:4]:
        order = rows if outcome is outcomes[1] else range(len(PARAMS))
        for slot, token_id in zip(order, outcome.token_ids, strict=True):
            known[slot].append(token_id)
    again = placed_plan(
        step=4,
        items=tuple(item(slot, 0, ids) for slot, ids in enumerate(known)),
        started_slots=starts(known),
    )
    runs = Runs(model)
    check_equal(runs.run(again), outcomes[4])
    check_equal(runs.run(plans[5]), outcomes[5])


class Runs:
    """Runs steps one after the other, without a runner."""

    def __init__(self, model: DecoderSteps) -> None:
        self.model = model
        self.device = HostDevice()
        self.reader = PlanReader(4, NUM_SLOTS)

    def run(
        self,
        plan: StepPlan,
        around: Callable[[Callable[[], None]], None] = lambda call: call(),
        masks: LateMasks | None = None,
    ) -> StepOutcome:
        step, model, device = self.reader.read(plan, masks), self.model, self.device
        host = device.host_memory(model.max_input_bytes)
        packed = model.pack(step, host, None)
        inputs, results = torch.from_numpy(host.array), device.memory(model.max_result_bytes)
        with torch.inference_mode():
            around(lambda: packed.enqueue(inputs, results))
        size = packed.result_shape.num_bytes
        assert (results[size:] == 0xA5).all()
        return outcome_of(step, results.numpy(), packed.result_shape)


@pytest.mark.parametrize("comes", [True, False])
def test_masks_are_looked_for_when_the_forward_pass_is_enqueued(
    comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward pass and sampling are two launches. Masks that come with the first are in time for
    the second. A row without its mask has no token; the others have theirs."""
    monkeypatch.setattr("aioserve.sampling.masks.WAIT_SECONDS", 0.0)
    model, forward = steps_on_host(), TableDecoder.forward
    masks = LateMasks([1])
    only = np.array([0, 1 << 9], np.int32)

    def bringing(self: TableDecoder, batch: Batch, cache: KVCache) -> Tensor:
        if comes:
            masks.bring(1, only)
        return forward(self, batch, cache)

    monkeypatch.setattr(TableDecoder, "forward", bringing)
    params = SamplingParams(
        temperature=0.0, structured_output=StructuredOutput(regex="a"), logprobs=1
    )
    started = tuple(SlotStart(slot=slot, params=params, seed=slot) for slot in range(3))
    items = tuple(item(slot, 0, [slot + 1, 9]) for slot in range(3))
    outcome = Runs(model).run(placed_plan(step=0, items=items, started_slots=started), masks=masks)
    plain = [token_id for row, token_id in enumerate(outcome.token_ids) if not comes or row != 1]
    unmasked = Runs(model).run(placed_plan(step=0, items=items, started_slots=started))
    assert plain == [unmasked.token_ids[0], unmasked.token_ids[2]]
    assert outcome.token_counts == ({} if comes else {1: 0})
    assert sorted(outcome.logprobs) == list(range(len(outcome.token_ids)))
    if comes:
        assert outcome.token_ids[1] == 41
    assert outcome.logprobs[len(outcome.token_ids) - 1] == unmasked.logprobs[2]


class Memory(TorchDispatchMode):
    """Counts allocations, and raises at number `failing`.

    Tensors that only Triton's interpreter makes don't count.
    """

    def __init__(self, failing: int = 0) -> None:
        super().__init__()
        self.failing = failing
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        had = {storage_of(each) for each in given if isinstance(each, Tensor)}
        for each in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(each, Tensor) and storage_of(each) not in had:
                self.count += 1
                if self.count == self.failing:
                    raise torch.OutOfMemoryError(f"allocation {self.count}, {func}")
        return out


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names of launched kernels, with the number of allocations of a `Memory` before each."""
    launch = GridExecutor.__call__
    noted: list[tuple[str, int]] = []

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        modes: list[Any] = _get_current_dispatch_mode_stack()
        noted.append((self.fn.__name__, modes[0].count if modes else 0))
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    return noted


@pytest.mark.more
def test_nothing_is_allocated_behind_the_first_kernel_that_writes_to_slots(
    launches: list[tuple[str, int]],
) -> None:
    runs, counts = Runs(steps_on_host()), []

    def enqueued(enqueue: Callable[[], None]) -> None:
        with Memory() as memory:
            enqueue()
        counts.append(memory.count)

    for plan in plans_of(1):
        runs.run(plan, enqueued)
        before = dict(launches)
        if plan.num_rows:
            assert before["win_kernel"] == before["first_kernel"] == counts[-1] > 20
        launches.clear()


def drawn_at_once(
    logits: Tensor, rows: Any, last_tokens: Tensor, token_ids: Tensor, statuses: Tensor
) -> None:
    """Draw without the kernels, which are slow in the interpreter."""
    with _disable_current_modes():
        token_ids[:] = logits.argmax(dim=1)
        statuses.zero_()
        last_tokens[rows.slots] = token_ids


@pytest.mark.usefixtures("launches")
def test_a_step_that_lacked_memory_is_the_same_when_enqueued_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any allocation may fail, any number of times: histories grow by one token, and the tokens
    of the step before can still be read."""
    monkeypatch.setattr(sampling, "draw", drawn_at_once)
    plans = plans_of(2)
    runs = Runs(steps_on_host())
    expected = [runs.run(plan) for plan in plans]
    failures: list[Exception] = []

    def enqueued(enqueue: Callable[[], None]) -> None:
        for failing in range(1, 1000):
            try:
                with Memory(failing):
                    enqueue()
                return
            except torch.OutOfMemoryError as error:
                failures.append(error)

    runs = Runs(steps_on_host())
    for plan, outcome in zip(plans, expected, strict=True):
        check_equal(runs.run(plan, enqueued), outcome)
    assert len(failures) > 100
