"""The scheduler and its KV memory in every order of events, on a device that notices each wrong
page.

Steps are launched, run and committed with up to two in flight. Some have draft tokens that are
right or not. Meanwhile requests come, fork, leave and stall, and steps fail. Runs vary in prefix
cache, partial pages, host pool and groups of window layers, whose pages go when no token sees them
any longer. Pages without a holder are spoilt at once.

After each rule the state must be consistent. At the end every request must have ended with exactly
the tokens that its prompt determines.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import PageState
from aioserve.paging.layout import first_seen, group_specs
from aioserve.paging.pages import pages_for, pages_of_sequence
from aioserve.request import FinishReason, Logprobs, Request, SamplingParams
from aioserve.sampling.masks import LateMasks
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.policy import (
    Preempt,
    Refusal,
    SchedulingPolicy,
    StepBudget,
    TokenShare,
    Verdict,
)
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.updates import SequenceUpdate
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.plan import ItemKind, StepPlan, WorkItem
from aioserve.structured_output import StructuredOutput
from aioserve.testing.fake_device import (
    FakeDevice,
    expected_hidden,
    expected_logprobs,
    expected_tokens,
)
from tests.doubles.drafters import ScriptedDrafter, anything, nothing_right, right_up_to
from tests.scheduling.request_model import RequestModel
from tests.tiers import examples

MAX_LENGTH = 48
LONG_PROMPTS = [[(7 * k + i * i) % 256 for i in range(MAX_LENGTH)] for k in range(2)]


def prompts():
    """Prompts that often share a beginning, and sometimes all."""
    beginning = st.tuples(st.sampled_from(LONG_PROMPTS), st.integers(0, MAX_LENGTH - 4))
    end = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    return st.tuples(beginning, end).map(lambda t: [*t[0][0][: t[0][1]], *t[1]])


class Whimsical(SchedulingPolicy):
    """Gives any allowed answer, and now and then an invalid one."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def order(self, waiting, view):
        self.maybe_break()
        return self.random.sample(waiting, self.random.randint(0, len(waiting)))

    def admit(self, request, view):
        self.maybe_break()
        return self.random.choice([Verdict.NOW, Verdict.LATER])

    def chunk(self, request, budget_tokens, view):
        self.maybe_break()
        return self.random.randint(-1, budget_tokens + 1)

    def victim(self, running, need_pages, view):
        self.maybe_break()
        return self.random.choice([*running, None])

    def precedence(self, request):
        self.maybe_break()
        return self.random.choice([0, 0, 1, 2, -1, None])

    def displaces(self, request, running, view):
        self.maybe_break()
        named = self.random.sample(running, self.random.randint(0, len(running)))
        return [*named, request] if self.random.random() < 0.05 else named

    def maybe_break(self) -> None:
        if self.random.random() < 0.05:
            raise RuntimeError("whim")

    def some_of(self, running):
        self.maybe_break()
        return self.random.sample(running, self.random.randint(0, len(running)))


class Wishful(Whimsical):
    """Has whims about the questions, too, that are asked only if a policy overrides them."""

    victim_of_any_age = True

    def preempt(self, running, view):
        how = [None, "auto", "swap", "recompute"]
        return [
            self.random.choice([r, Preempt(r, self.random.choice(how))])
            for r in self.some_of(running)
            if self.random.random() < 0.5
        ]

    def begin_step(self, view):
        """Shares for some requests, now and then with more tokens than there are."""
        self.maybe_break()
        if self.random.random() < 0.3:
            return None
        some = self.some_of([*view.running, *view.waiting])
        most, place = view.max_num_batched_tokens, self.random.randint(0, len(some))
        shares = [
            TokenShare(requests, self.random.randint(0, most))
            for requests in (some[:place], some[place:])
        ]
        return StepBudget(shares, self.random.choice([None, self.random.randint(0, most)]))

    def order_prefills(self, running, view):
        return self.some_of(running)

    def decode(self, running, view):
        return self.some_of(running)

    def reserve(self, request, view):
        self.maybe_break()
        return self.random.choice([None, self.random.randint(-1, view.pages_total)])

    def draft(self, request, limit, view):
        self.maybe_break()
        return self.random.randint(-1, limit + 1)

    def drop(self, request, view):
        self.maybe_break()
        return Refusal("hopeless") if self.random.random() < 0.02 else None

    def pin(self, request):
        self.maybe_break()
        return self.random.randint(-1, request.computed_tokens)

    def unpin(self, pins, view):
        return self.some_of(pins)


class Unforgiving(Scheduler):
    """Scheduler in which planning must not fail with any policy: a retry would hide the failure."""

    def _recover(self, planner, error):
        raise error


class StrayingDevice(FakeDevice):
    """Draws anything over pages that a failed step should have written. Here rows of the last step
    stray, which no sequence may hear of."""

    stray_slots: frozenset[int] = frozenset()
    resolved: tuple[WorkItem, ...] = ()
    """Items of the last step, with their draft tokens and the places where these begin."""

    def execute(self, plan, masks=None):
        self.stray_slots = frozenset()
        return super().execute(plan, masks)

    def _check(self, plan):
        self.resolved = plan.items
        super()._check(plan)

    def stray(self, row, token_id):
        self.stray_slots |= {row.slot}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 16, 64]),
        spare_pages=st.integers(0, 12),
        host_pages=st.sampled_from([0, 0, 3, 40]),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 16, 64]),
        reserve=st.sampled_from([0, 8, 64]),
        prefix_caching=st.sampled_from([True, True, False]),
        partial_page_reuse=st.booleans(),
        eviction=st.sampled_from(["lru", "lfu", "fifo", "slru"]),
        recompute=st.booleans(),
        whim=st.none() | st.integers(0, 2**16),
        scored=st.integers(1, 20),
        groups=st.sampled_from([0, 0, 1, 2]),
        window=st.integers(1, 20),
        draft_choice=st.integers(0, 2**16),
    )
    def start(
        self,
        page_size,
        spare_pages,
        host_pages,
        max_num_seqs,
        budget,
        reserve,
        prefix_caching,
        partial_page_reuse,
        eviction,
        recompute,
        whim,
        scored,
        groups=0,
        window=0,
        draft_choice=0,
    ):
        self.groups, self.window = 1 + groups, window if groups else 0
        num_pages = pages_of_sequence(MAX_LENGTH, page_size, groups, self.window) + spare_pages
        self.memory = KVMemory.of(
            (num_pages, host_pages),
            page_size,
            groups=group_specs(groups, self.window),
            prefix_caching=prefix_caching,
            partial_page_reuse=partial_page_reuse,
            eviction=eviction,
            preemption="recompute" if recompute or not host_pages else "swap",
        )
        self.pool = self.memory.pool
        self.scheduler = Unforgiving(
            self.memory,
            SchedulingPolicy() if whim is None else (Whimsical, Wishful)[whim % 2](whim),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            output_reserve_tokens=reserve,
            max_scored_tokens=scored,
        )
        self.page_tables = SlotPageTables(self.scheduler.num_slots, self.groups)
        self.pages = {}
        source = random.Random(draft_choice)
        rule = (right_up_to(99), right_up_to(1), nothing_right, anything(source))[draft_choice % 4]
        self.device = StrayingDevice(
            num_pages,
            page_size,
            self.scheduler.num_slots,
            host_pages,
            num_window_groups=groups,
            window=self.window,
            drafter=ScriptedDrafter(
                lambda drafted, count: drafted.predicted_ids[:count].tolist(), rule
            ),
        )
        self.pipeline = StepPipeline(self.scheduler, self.launched, depth=2)
        self.runs: dict[int, set[tuple[int, int, int]]] = {}
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.expected_logprobs: dict[int, list[Logprobs]] = {}
        self.received_logprobs: dict[int, list[Logprobs]] = {}
        self.expected_scores: dict[int, list[Logprobs]] = {}
        self.received_scores: dict[int, list[Logprobs]] = {}
        self.expected_pools: dict[int, list[float]] = {}
        self.received_pools: dict[int, list[float]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.left: set[int] = set()
        self.found_bad_rows = False
        self.suspects: set[int] = set()
        self.now = 0.0
        self.guided: set[int] = set()
        self.unguided: set[int] = set()
        """Sequences that haven't been told about their next token."""
        self.foretold: dict[int, int] = {}
        """Guided sequences whose forced tokens are drawn, since their log-probabilities are wanted,
        with their number of known or forced tokens."""
        self.requests: dict[int, RequestModel] = {}
        self.request_of: dict[int, RequestModel] = {}
        self.busy_seconds = 0.0

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, MAX_LENGTH - 1),
        n=st.sampled_from([1, 1, 2, 3]),
        tenant=st.sampled_from([b"", b"", b"x"]),
        logprobs=st.booleans(),
        score_from=st.none() | st.integers(1, MAX_LENGTH),
        guided=st.booleans(),
        drafts=st.sampled_from([0, 1, 5]),
    )
    def submit(
        self, prompt, max_tokens, n, tenant, logprobs=False, score_from=None, guided=False, drafts=0
    ):
        form = StructuredOutput(json_object=True) if guided else None
        n = min(n, self.scheduler.state.max_num_seqs)
        max_length = min(MAX_LENGTH, len(prompt) + max_tokens)
        seed = 2**64 - 2 + len(self.expected)
        tokens = expected_tokens(prompt, max_length - len(prompt), seed % 2**64)
        if score_from is not None and score_from >= len(prompt):
            score_from = None
        sequence_ids = self.scheduler.submit(
            Request(
                request_id=f"r{seed}",
                prompt_ids=np.array(prompt, np.int32),
                max_length=max_length,
                params=SamplingParams(
                    temperature=0.0,
                    n=n,
                    logprobs=0 if logprobs else None,
                    structured_output=form,
                ),
                score_from=score_from,
                seed=seed % 2**64,
                arrival_seconds=self.now,
                namespace=tenant,
                max_draft_tokens=drafts,
                predicted_ids=np.array(tokens, np.int32),
            )
        )
        model = RequestModel(sequence_ids, len(prompt), self.scheduler.account_of(sequence_ids[0]))
        self.requests[sequence_ids[0]] = model
        self.guided |= set(sequence_ids) if guided else set()
        self.unguided |= set(sequence_ids) if guided else set()
        self.foretold |= dict.fromkeys(sequence_ids, 0) if guided and logprobs else {}
        for sample, sequence_id in enumerate(sequence_ids):
            assert self.scheduler.account_of(sequence_id) is model.account
            self.request_of[sequence_id] = model
            tokens = expected_tokens(prompt, max_length - len(prompt), (seed + sample) % 2**64)
            self.expected[sequence_id] = tokens
            self.received[sequence_id] = []
            every = expected_logprobs([*prompt, *tokens])
            self.expected_logprobs[sequence_id] = every[len(prompt) - 1 :] if logprobs else []
            self.received_logprobs[sequence_id] = []
            scored = [] if score_from is None or sample else every[score_from - 1 : len(prompt) - 1]
            self.expected_scores[sequence_id] = scored
            self.received_scores[sequence_id] = []

    @rule(prompt=prompts(), data=st.data(), score_from=st.none() | st.integers(1, MAX_LENGTH))
    def look(self, prompt, data, score_from):
        """Submit a request for results about its prompt, without a completion."""
        prompt = prompt[: MAX_LENGTH - 1]
        first = data.draw(st.integers(0, len(prompt) - 1) | st.just(0), label="first")
        stop = data.draw(st.integers(first + 1, len(prompt)) | st.just(len(prompt)), label="stop")
        if score_from is not None and score_from >= len(prompt):
            score_from = None
        (sequence_id,) = self.scheduler.submit(
            Request(
                request_id=f"look{len(self.expected)}",
                prompt_ids=np.array(prompt, np.int32),
                max_length=len(prompt) + 1,
                params=SamplingParams(temperature=0.0),
                score_from=score_from,
                pooled=range(first, stop),
                answers=False,
                arrival_seconds=self.now,
            )
        )
        account = self.scheduler.account_of(sequence_id)
        model = RequestModel((sequence_id,), len(prompt), account)
        self.requests[sequence_id] = self.request_of[sequence_id] = model
        for values in (self.expected, self.received, self.received_logprobs, self.received_scores):
            values[sequence_id] = []
        self.expected_logprobs[sequence_id] = []
        every = expected_logprobs(prompt)
        self.expected_scores[sequence_id] = [] if score_from is None else every[score_from - 1 :]
        self.expected_pools[sequence_id] = expected_hidden(prompt)[first:stop].sum(axis=0).tolist()

    @property
    def in_flight(self):
        return self.pipeline.in_flight

    @precondition(lambda self: len(self.in_flight) < self.pipeline.depth)
    @rule()
    def launch(self):
        self.now += 1.0
        self.pipeline.advance(self.now)
        for update in self.scheduler.take_ended_unplanned():
            assert update.cause is None
            assert update.rejected
            self.left.add(update.sequence_id)

    def launched(self, plan: StepPlan) -> StepPlan:
        assert plan.items
        assert plan.num_tokens <= self.scheduler.state.max_num_batched_tokens
        assert plan.num_scored <= self.scheduler.state.max_scored_tokens
        assert len({item.sequence_id for item in plan.items}) == len(plan.items)
        self.page_tables.take(plan)
        for item in plan.items:
            self.pages[plan.step, item.slot] = [
                self.page_tables.page_ids(item.slot, group).copy() for group in range(self.groups)
            ]
        self.assert_fenced(plan)
        for run, item, _ in self.scheduler.state.in_flight[plan.step]:
            sequence, slot = run.sequence, run.slot
            if item.slot == slot:
                self.request_of[item.sequence_id].plan(item, sequence.epoch, self.now)
        return plan

    def assert_fenced(self, plan: StepPlan) -> None:
        """Check that the new step writes nothing that a step in flight reads. No slot of it may
        belong to another sequence, or to another run of its own.

        There are two exceptions, because steps run in order. A sequence that goes back after a late
        mask writes what a step reads whose rows are dropped. A sequence with wrong draft tokens
        writes places up to the last that it may read.
        """
        written = self.written_places(plan)
        self.runs[plan.step] = {
            (run.slot, run.sequence.sequence_id, run.sequence.epoch)
            for run, *_ in self.scheduler.state.in_flight[plan.step]
        }
        again = {item.slot: item for item in plan.items}
        for earlier in self.in_flight:
            over = {
                run.sequence.slot
                for run, *_ in self.scheduler.state.in_flight[earlier.step]
                if run.lease is run.sequence.lease and not run.goes_on
            }
            for item in earlier.items:
                read = self.places_read(earlier, item, item.start)
                over_again = over if item.kind is not ItemKind.VERIFY else {*over, item.slot}
                if item.slot in over_again & again.keys():
                    own = again[item.slot]
                    read -= self.token_places(plan, own, self.first_written(own), own.end)
                assert not written & read
            both = self.runs[plan.step] | self.runs[earlier.step]
            assert len({slot for slot, _, _ in both}) == len(both)

    def written_places(self, plan: StepPlan) -> set[int]:
        """Places in the KV storage that a step writes: no two items write the same."""
        slots = [
            copy.target * self.pool.page_size + offset
            for copy in plan.copies
            if copy.to_tier == 0
            for offset in range(copy.num_tokens)
        ]
        items = [
            slot
            for item in plan.items
            for slot in self.token_places(plan, item, self.first_written(item), item.end)
        ]
        assert len(items) == len(set(items)), "two items write one place"
        return {*slots, *items}

    def first_written(self, item: WorkItem) -> int:
        """First position that the last item of a sequence may write to. If draft tokens before it
        are in flight, none of these counts as right."""
        if item.kind is not ItemKind.VERIFY:
            return item.start
        return item.least_start

    def token_places(self, plan, item, start: int, end: int) -> set[int]:
        """Places of these positions, of all groups."""
        return {
            place
            for group in range(self.groups)
            for place in self.places_of_group(plan, item, group, start, end)
        }

    def places_of_group(self, plan, item, group: int, start: int, end: int) -> set[int]:
        size, pages = self.pool.page_size, self.pages[plan.step, item.slot][group].tolist()
        return {pages[p // size] * size + p % size for p in range(start, end)}

    def places_read(self, plan, item, start: int) -> set[int]:
        """Places that the tokens of an item from position `start` on see."""
        places = self.places_of_group(plan, item, 0, 0, item.end)
        for group in range(1, self.groups):
            first = first_seen(start, self.window)
            places |= self.places_of_group(plan, item, group, first, item.end)
        return places

    def spoil_what_nobody_holds(self) -> None:
        """Spoil all places without a holder, except those yet to be copied away. Copies are made in
        the order of the steps."""
        plans = [plan.copies for plan in self.in_flight]
        waiting = [copy for copies in (*plans, self.memory.copies) for copy in copies]
        free: list[np.ndarray] = []
        for number, tier in enumerate(self.memory.tiers):
            kept = {copy.source for copy in waiting if copy.from_tier == number}
            kept |= {copy.target for copy in waiting if copy.to_tier == number}
            pages = range(tier.pool.num_pages)
            is_free = [tier.pool.state(page) is PageState.FREE for page in pages]
            free.append(np.array([p for p in pages if is_free[p] and p not in kept], np.int32))
        self.device.scribble(*free)

    @rule(
        prompts=st.lists(prompts(), min_size=2, max_size=5),
        max_tokens=st.integers(1, MAX_LENGTH - 1),
        n=st.integers(1, 2),
        steps=st.integers(1, 30),
        guided=st.integers(0, 5),
        drafts=st.integers(0, 3),
    )
    def serve(self, prompts, max_tokens, n, steps, guided, drafts=0):
        """Submit several requests, and let them get in each other's way."""
        for place, prompt in enumerate(prompts):
            self.submit(
                prompt=prompt,
                max_tokens=max_tokens,
                n=n,
                tenant=b"",
                guided=place < guided,
                drafts=drafts,
            )
        for _ in range(steps):
            self.advance()
            self.state_is_consistent()

    @precondition(lambda self: self.unguided & set(self.live()))
    @rule(data=st.data(), jump=st.integers(0, 20))
    def guide(self, data, jump):
        self.say_next(data.draw(st.sampled_from(sorted(self.unguided & set(self.live())))), jump)

    def say_next(self, sequence_id, jump):
        """Force some tokens, and provide a mask for the next one."""
        self.unguided.discard(sequence_id)
        received = len(self.received[sequence_id])
        forced = self.expected[sequence_id][received:][: jump if received else 0]
        if drawn := sequence_id in self.foretold:
            self.foretold[sequence_id] = received + len(forced)
        self.take(self.scheduler.guide(sequence_id, forced, drawn=drawn))

    def masks_of(self, plan):
        """Masks of a step's rows: each allows only the one token that comes there. If a sequence
        hasn't been told what comes next, its mask is sometimes too late."""
        rows = self.scheduler.masked_rows(plan)
        masks = LateMasks([row for row, *_ in rows])

        def ask(row, draft_choice):
            """Bring masks after draft tokens that are all forced, except for some that are late."""
            (sequence_id, position) = next(found for at, *found in rows if at == row)
            expected = self.expected[sequence_id]
            if sequence_id in self.left or sequence_id not in self.foretold:
                expected = []
            first = position + 1 - self.request_of[sequence_id].prompt_tokens
            known = expected[first : first + len(draft_choice)]
            count = len(known) - (plan.step + row) % 3
            behind = [self.only(token_id) for token_id in known[: max(0, count)]]
            masks.bring_behind(row, len(draft_choice), behind)

        masks.ask = ask
        for row, sequence_id, position in rows:
            if sequence_id in self.unguided and (plan.step + row) % 3 == 0:
                continue
            sequence = self.scheduler.state.sequences.get(sequence_id)
            if sequence is None:
                masks.bring(row, None)
                continue
            expected = self.expected[sequence_id][position - sequence.prompt_tokens :]
            masks.bring(row, self.only(expected[0]) if expected else None)
        return masks

    def only(self, token_id):
        mask = np.zeros(8, np.uint32)
        mask[token_id // 32] = np.uint32(1 << token_id % 32)
        return mask.view(np.int32)

    def advance(self):
        for sequence_id in sorted(self.unguided & set(self.live())):
            if (self.now + sequence_id) % 3:  # otherwise its mask may come too late
                self.say_next(sequence_id, sequence_id % 4)
        self.launch()
        if self.pipeline.due is not None:
            self.complete()

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self):
        plan = self.in_flight[0]
        outcome = self.device.execute(plan, self.masks_of(plan))
        self.find_bad_rows(plan, outcome)
        self.charge(plan)
        for sequence_id in sorted(self.unguided & set(self.live())):
            if (plan.step + sequence_id) % 4 == 0:  # too late for this step, but not for the next
                self.say_next(sequence_id, plan.step % 3)
        self.take(self.pipeline.finish(outcome, self.now))

    @precondition(lambda self: self.in_flight)
    @rule(done=st.integers(0, 20))
    def fail(self, done):
        self.device.execute_in_part(self.in_flight[0], done)
        self.charge(self.in_flight[0])
        self.take(self.pipeline.fail("planted"))

    @precondition(lambda self: self.in_flight)
    @rule(choice=st.integers(0, 20))
    def produce_bad_numbers(self, choice):
        """Let one sampling item, perhaps of a sequence that has left, write junk instead of KV."""
        plan = self.in_flight[0]
        outcome = self.device.execute(plan, self.masks_of(plan))
        items = [item for item in plan.items if item.rows]
        if items:
            item = items[choice % len(items)]
            end = item.start + item.count
            first = item.start // self.pool.page_size
            pages = self.pages[plan.step, item.slot][choice % self.groups]
            self.device.scribble(pages[first : pages_for(end, self.pool.page_size)])
            self.suspects = set(self.live())
            self.found_bad_rows = True
        self.find_bad_rows(plan, outcome)
        self.charge(plan)
        self.take(self.pipeline.finish(outcome, self.now))

    def charge(self, plan):
        """Charge steps with varying times."""
        seconds = 1.0 + plan.step % 7
        self.scheduler.charge(plan, seconds)
        self.busy_seconds += seconds
        for item in plan.items:
            model = self.request_of[item.sequence_id]
            model.charge(seconds * item.count / plan.num_tokens)

    def find_bad_rows(self, plan, outcome):
        """Check that rows computed over junk are not numbers. No row that a sequence will hear of
        strays from its mask."""
        rows = [(item, row.slot) for item in self.device.resolved for row in item.rows]
        for index, (item, _) in enumerate(rows if self.found_bad_rows else ()):
            if self.device.holds_junk(list(self.places_read(plan, item, item.end - 1))):
                outcome.row_errors[index] = "NaN"
        bad = {rows[index][1] for index in outcome.row_errors}
        entries = self.scheduler.state.in_flight[plan.step]
        heard = {run.slot for run, *_ in entries if run.goes_on}
        assert not self.device.stray_slots & heard - bad

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data):
        self.leave(data.draw(st.sampled_from(self.live())))

    def leave(self, sequence_id):
        self.scheduler.finish(sequence_id)
        self.scheduler.finish(sequence_id)
        assert sequence_id not in self.scheduler.state.sequences
        self.left |= set(self.live()) - set(self.scheduler.state.sequences)

    @precondition(lambda self: self.memory.num_cached)
    @rule()
    def forget_cached(self):
        num_cached = self.memory.num_cached
        assert self.memory.forget_cached() >= num_cached
        assert self.memory.num_cached == 0

    @precondition(lambda self: self.scheduler.state.running)
    @rule(data=st.data())
    def preempt(self, data):
        victim = data.draw(st.sampled_from(self.scheduler.state.running))
        self.scheduler.state.preempt(victim, self.scheduler.state.launched + 1)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), paused=st.booleans())
    def stall(self, data, paused):
        sequence_id = data.draw(st.sampled_from(self.live()))
        (self.scheduler.pause if paused else self.scheduler.resume)(sequence_id)

    def live(self) -> list[int]:
        return [s for s in self.expected if s not in self.ended and s not in self.left]

    def take(self, progress: list[SequenceUpdate]) -> None:
        for entry in progress:
            assert entry.sequence_id not in self.ended, "a second end"
            assert entry.sequence_id not in self.left, "progress after a cancel"
            if entry.error == "NaN":
                assert entry.sequence_id in self.suspects, "bad numbers that came before it"
            if entry.token_id is not None:
                self.received[entry.sequence_id].append(entry.token_id)
                self.request_of[entry.sequence_id].take(entry.sequence_id)
                if entry.forced:
                    assert entry.sequence_id not in self.unguided
                elif entry.sequence_id in self.guided and len(
                    self.received[entry.sequence_id]
                ) > self.foretold.get(entry.sequence_id, 0):
                    self.unguided.add(entry.sequence_id)
            if entry.logprobs is not None:
                self.received_logprobs[entry.sequence_id].append(entry.logprobs)
            if entry.scored:
                assert not self.received[entry.sequence_id], "scores behind the first token"
                told = self.received_scores[entry.sequence_id]
                told[entry.scored_before :] = entry.scored
            if entry.pooled is not None:
                self.request_of[entry.sequence_id].take(entry.sequence_id)
                self.received_pools[entry.sequence_id] = entry.pooled.tolist()
            if entry.finish_reason is not None:
                self.ended[entry.sequence_id] = entry.finish_reason

    @invariant()
    def it_is_known_whether_one_waits_above_others(self):
        state = self.scheduler.state if hasattr(self, "scheduler") else None
        if state is not None and not state.arrived:
            for precedence in range(-2, 3):
                above = [s for s in state.waiting if s.precedence > precedence]
                assert state.waits_above(precedence) == bool(above)

    @invariant()
    def all_that_is_computed_may_be_pinned(self):
        fault = self.scheduler.policy_calls.last_fault if hasattr(self, "scheduler") else None
        assert fault is None or "pin answered" not in fault or "pin answered -1," in fault

    @invariant()
    def state_is_consistent(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.sanity_check()
        self.spoil_what_nobody_holds()
        for sequence_id, received in self.received.items():
            assert received == self.expected[sequence_id][: len(received)]
            if self.ended.get(sequence_id) is FinishReason.LENGTH:
                assert received == self.expected[sequence_id]
            if not self.found_bad_rows:
                self.logprobs_are_right(sequence_id, len(received))
                self.pools_are_right(sequence_id)
        for model in self.requests.values():
            model.check()
        preemptions = sum(model.account.preemptions for model in self.requests.values())
        assert preemptions == self.scheduler.counters.preemptions
        charged = sum(model.account.device_seconds for model in self.requests.values())
        assert charged == pytest.approx(self.busy_seconds)

    def logprobs_are_right(self, sequence_id: int, num_received: int) -> None:
        """Check the log-probabilities of the received tokens, and those of the prompt, which come
        before the first token."""
        expected = self.expected_logprobs[sequence_id]
        assert self.received_logprobs[sequence_id] == expected[:num_received]
        scores, expected_scores = (
            self.received_scores[sequence_id],
            self.expected_scores[sequence_id],
        )
        assert scores == (expected_scores if num_received else expected_scores[: len(scores)])

    def pools_are_right(self, sequence_id: int) -> None:
        """Check that each hidden state counts once, and that the sum comes at the end."""
        if sequence_id not in self.expected_pools:
            return
        told = self.ended.get(sequence_id) is FinishReason.LENGTH
        expected = self.expected_pools[sequence_id] if told else None
        assert self.received_pools.get(sequence_id) == expected
        scores = self.received_scores[sequence_id]
        assert scores == self.expected_scores[sequence_id][: None if told else len(scores)]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for sequence_id in self.live():
            self.scheduler.resume(sequence_id)
        for _ in range(100 * MAX_LENGTH * max(1, len(self.expected))):
            if not self.live() and not self.in_flight:
                break
            self.advance()
        assert not self.live(), "requests that never end"
        self.state_is_consistent()
        self.scheduler.state.pins.end_all()
        assert self.pool.num_free + self.memory.num_cached == self.pool.num_pages
        if self.memory.tree is not None:
            self.memory.tree.clear()
        assert self.pool.num_free == self.pool.num_pages
        assert all(tier.pool.num_held == 0 for tier in self.memory.tiers[1:])


SchedulerMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
TestScheduler = SchedulerMachine.TestCase
