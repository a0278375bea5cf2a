"""How far each slot has come, and its draft tokens. A plan leaves both open where steps before it
were in flight; this resolves them.

    plan        VERIFY  start at most 13, at most 4 tokens: pending, draft, draft, draft
    resolved    VERIFY  start 11, 3 tokens: pending, 7, 9     the drafter made two tokens
    noted       7 was right, 4 was drawn in place of 9        the slot's next item starts at 13

Knows plans, and neither tensors nor devices; called in the order of the steps, where each step's
tokens are known before the next is resolved.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.errors import InvariantError
from aioserve.steps.outcome import DryRun, StepOutcome
from aioserve.steps.plan import DRAFT_TOKEN, PENDING_TOKEN, ItemKind, StepPlan, WorkItem

__all__ = ["DraftRequest", "Resolver", "StepFollower"]

TokenRows = npt.NDArray[np.int64]
VERIFY = ItemKind.VERIFY
LOOK_STEPS = 16
"""After so many steps that verify nothing their tokens are read, a quick drafter hears of them, and
it drafts as many: nobody verifies these, and what comes instead tells how many are right."""


@dataclass(slots=True, frozen=True)
class DraftRequest:
    """Draft tokens that a plan needs before it is resolved."""

    plan: StepPlan
    slots: Sequence[int]
    limits: Sequence[int]
    """As `Drafter.draft_all` has both."""
    since_seconds: float
    """When it began to hear of what it is to go on from."""


class StepFollower(Protocol):
    """What computes beside the steps, in memory that follows theirs: a drafter that knows more of
    sequences than their token ids."""

    def take(self, plan: StepPlan) -> None:
        """Slots end and start, and their page tables change, as a plan says. It may fail then."""
        ...

    def follow(self, plan: StepPlan) -> None:
        """The pages of a plan are copied, its draft tokens come next, and then it is computed."""
        ...

    def computed(
        self,
        plan: StepPlan,
        rows: TokenRows | None = None,
        locations: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """A plan, as it was resolved, has been computed. `rows`: which of the tokens that were
        computed are its own, int64 `[T]`; None: all. `locations`: where their KV is, of group 0, as
        `HostBatch.token_locations` has it; None: as the plan says. Not called where a step puts
        into that memory itself what it leaves for the drafter."""
        ...


class Resolver:
    """Known tokens of the slots whose sequences may have draft tokens verified. `drafter` makes
    these; None makes none. `follower` hears of every plan. `clock`, in seconds, is what the drafter
    is measured by; None: it isn't. `max_branches`: most paths beside the draft tokens of a slot."""

    def __init__(
        self,
        drafter: Drafter | None,
        follower: StepFollower | None = None,
        clock: Callable[[], float] | None = None,
        max_branches: int = 0,
    ) -> None:
        self.is_used: bool = drafter is not None or follower is not None
        """False: plans that start no slot and verify nothing need neither `take` nor `noted`."""
        self._drafter = drafter
        self._clock = clock or (lambda: 0.0)
        self._drafting_seconds = 0.0
        """What the drafter took in the step that was resolved last."""
        self._request: DraftRequest | None = None
        """What it is asked for by the step that is resolved next, where that is known."""
        self._follower = follower
        self._max_branches = max_branches
        self.branches: dict[int, Sequence[Sequence[int]]] = {}
        """Paths beside the draft tokens of slots in the plan that was resolved last."""
        self._started: dict[int, DraftedSequence] = {}
        """What each slot started with."""
        self._known: dict[int, array[int]] = {}
        """All its known ids, the one sampled last included."""
        self._looks = drafter is not None and drafter.is_quick
        self._heard: dict[int, int] = {}
        """How many of them the drafter has heard of."""
        self._ahead: dict[int, Sequence[int]] = {}
        """What it drafted behind these to no end."""
        self._dry_runs: dict[int, DryRun] = {}
        """What that came to, until an outcome tells it."""
        self._unread: list[tuple[StepPlan, StepOutcome]] = []
        """Steps whose tokens aren't known yet, as nobody asked for them: to read them one by one
        takes its time between two steps."""
        self._steps_plain = 0
        """Steps that verified nothing since the drafter was asked."""

    def take(self, plan: StepPlan) -> None:
        """Slots end and start, as a plan says. Raises `InvariantError` for a slot that is to have
        draft tokens where nothing makes any."""
        if not self.is_used:
            for start in plan.started_slots:
                if start.drafting is not None:
                    raise InvariantError(
                        f"slot {start.slot} starts with drafting in step {plan.step}, and there is "
                        "no drafter"
                    )
            return
        if plan.ended_slots or plan.started_slots:
            self._read()
        for slot in plan.ended_slots:
            self._end(slot)
        for start in plan.started_slots:
            self._end(start.slot)
            if start.drafting is not None:
                self._start(start.slot, start.drafting)
        if self._follower is not None:
            self._follower.take(plan)

    def _start(self, slot: int, sequence: DraftedSequence) -> None:
        known_ids = np.ascontiguousarray(sequence.known_ids, np.int32)
        self._started[slot], self._known[slot] = sequence, array("i", known_ids.tobytes())
        self._heard[slot] = len(known_ids)
        if self._drafter is not None:
            self._drafter.start(slot, sequence)

    def _end(self, slot: int) -> None:
        if self._started.pop(slot, None) is not None:
            self._tell((slot,))
            for kept in (self._known, self._heard):
                del kept[slot]
            for may_be_kept in (self._ahead, self._dry_runs):
                may_be_kept.pop(slot, None)
            if self._drafter is not None:
                self._drafter.end(slot)

    def _go_back(self, slot: int, num_known: int) -> None:
        """Only so many tokens of a slot are known after all: a mask came late, and what was drawn
        behind it is nothing. The drafter begins again."""
        known_ids = np.array(self._known[slot][:num_known], np.int32)
        sequence = msgspec.structs.replace(self._started[slot], known_ids=known_ids)
        self._heard[slot] = len(self._known[slot])  # the rest isn't worth hearing
        self._end(slot)
        self._start(slot, sequence)

    def resolved(self, plan: StepPlan) -> StepPlan:
        """The plan with its draft tokens made and its items where they begin.

        Raises `InvariantError` for an item whose slot is further than the plan allows, or asks for
        draft tokens and started without saying so."""
        if self._follower is not None:
            self._follower.follow(plan)
        self.branches.clear()
        if not plan.num_verified:
            return plan
        draft_tokens = self._draft_tokens(self.draft_request(plan))
        items = [
            self._resolved(item, draft_tokens.get(item.slot, ())) if item.kind is VERIFY else item
            for item in plan.items
        ]
        return msgspec.structs.replace(plan, items=tuple(items))

    def draft_request(self, plan: StepPlan) -> DraftRequest:
        """What `resolved` asks the drafter for, which has heard by then of all that it needs. For
        who lets the drafter run elsewhere, before the plan is resolved; once for each plan."""
        if self._request is not None and self._request.plan is plan:
            return self._request
        self._read()
        self._take_forced(plan)
        began = self._clock()
        items = [] if self._drafter is None else [item for item in plan.items if _asks(item)]
        if items:
            self._tell(self._known)
        slots, limits = [item.slot for item in items], [item.count - 1 for item in items]
        self._request = DraftRequest(plan, slots, limits, began)
        return self._request

    def _draft_tokens(self, request: DraftRequest) -> Mapping[int, Sequence[int]]:
        """Draft tokens of slots."""
        self._request, self._drafting_seconds = None, 0.0
        if not request.slots or self._drafter is None:
            return {}
        made = self._drafter.draft_all(request.slots, request.limits)
        if self._max_branches:
            for slot, limit, draft_tokens in zip(request.slots, request.limits, made, strict=True):
                if (left := limit - len(draft_tokens)) > 1:
                    self._branch(self._drafter, slot, left)
        self._drafting_seconds = self._clock() - request.since_seconds
        return dict(zip(request.slots, made, strict=True))

    def _branch(self, drafter: Drafter, slot: int, limit: int) -> None:
        if branches := drafter.branches(slot, limit):
            self.branches[slot] = branches[: self._max_branches]

    def _take_forced(self, plan: StepPlan) -> None:
        """Where no step before it is in flight, a plan knows the last token of a slot, and whether
        a grammar forced it."""
        forced: dict[int, list[int]] = {}
        for item in plan.items:
            if item.kind is not VERIFY or item.token_ids[0] == PENDING_TOKEN:
                continue
            if (known := self._known.get(item.slot)) is None:
                continue
            if len(known) > item.start + 1:
                self._go_back(item.slot, item.start + 1)
            elif len(known) == item.start:
                forced[item.slot] = item.token_ids[:1].tolist()
        self._extend(forced)

    def _resolved(self, item: WorkItem, draft_tokens: Sequence[int]) -> WorkItem:
        known = self._known.get(item.slot)
        if known is None and not _asks(item):
            return item
        if known is None or len(known) - 1 > item.start:
            raise InvariantError(
                f"sequence {item.sequence_id} goes on from position {item.start} at most, and slot "
                f"{item.slot} has {known and len(known)} known tokens"
            )
        start, behind = len(known) - 1, draft_tokens if _asks(item) else item.token_ids[1:]
        if start < item.least_start:
            # Nothing was drawn by what was in flight: what comes of it counts for nothing either.
            start, behind = item.start, ()
            self.branches.pop(item.slot, None)
        token_ids = np.array([known[-1], *behind], np.int32)
        index, count = item.index - (item.start - start), len(token_ids)
        return msgspec.structs.replace(
            item, start=start, index=index, count=count, token_ids=token_ids
        )

    def noted(
        self,
        plan: StepPlan,
        outcome: StepOutcome,
        rows: TokenRows | None = None,
        locations: npt.NDArray[np.int64] | None = None,
    ) -> StepOutcome:
        """Take note of what a step, whose plan was resolved, computed and sampled row by row; the
        outcome, with what has come to be known of draft tokens that no step verified. `rows` and
        `locations` are as `StepFollower.computed` has them."""
        if self._follower is not None and plan.items:
            self._follower.computed(plan, rows, locations)
        if plan.num_verified and self._drafting_seconds:
            seconds = self._drafting_seconds
            outcome = msgspec.structs.replace(outcome, drafting_seconds=seconds)
        if not self._known:
            return outcome
        self._unread.append((plan, outcome))
        self._steps_plain = 0 if plan.num_verified else self._steps_plain + 1
        if self._steps_plain >= LOOK_STEPS:
            self._steps_plain = 0
            self._read()
            if self._looks:
                self._look_ahead()
        return self._with_looks(plan, outcome) if self._dry_runs else outcome

    def _read(self) -> None:
        """Take note of steps that nobody has read."""
        unread, self._unread = self._unread, []
        for plan, outcome in unread:
            self._note(plan, outcome)

    def _note(self, plan: StepPlan, outcome: StepOutcome) -> None:
        if (decoded := self._decoded(plan, outcome)) is not None:
            self._extend(decoded)
            return
        extended: dict[int, list[int]] = {}
        at, index, counts, errors = 0, 0, outcome.token_counts, outcome.row_errors
        for item in plan.items:
            if not item.rows and item.slot in self._known:
                extended[item.slot] = self._forced(item)
            for row in item.rows:
                count = counts.get(index, 1)
                if count and row.slot in self._known and index not in errors:
                    sampled = outcome.token_ids[at : at + count]
                    extended[row.slot] = self._come_to_know(item, row.slot, sampled)
                at, index = at + count, index + 1
        self._extend(extended)

    def _decoded(self, plan: StepPlan, outcome: StepOutcome) -> dict[int, list[int]] | None:
        """What slots come to know by a step that decodes a token of each, as most steps do; None
        for any other."""
        if plan.num_decodes != len(plan.items) or outcome.token_counts or outcome.row_errors:
            return None
        extended: dict[int, list[int]] = {}
        for item, token_id in zip(plan.items, outcome.token_ids, strict=True):
            if (known := self._known.get(item.slot)) is not None:
                if len(known) != item.start + 1:
                    return None
                extended[item.slot] = [token_id]
        return extended

    def _extend(self, extended: Mapping[int, list[int]]) -> None:
        """Append ids to what is known of slots, by slot."""
        for slot, ids in extended.items():
            self._known[slot].extend(ids)

    def _tell(self, slots: Iterable[int]) -> None:
        """Let the drafter hear of what it hasn't of these slots."""
        if self._drafter is None:
            return
        extended: dict[int, list[int]] = {}
        for slot in slots:
            known = self._known[slot]
            if (heard := self._heard[slot]) == len(known):
                continue
            extended[slot] = ids = known[heard:].tolist()
            self._heard[slot] = len(known)
            if (ahead := self._ahead.pop(slot, None)) is not None:
                self._dry_runs[slot] = _compared(ahead, ids[:LOOK_STEPS])
        if extended:
            self._drafter.extend_all(list(extended), list(extended.values()))

    def _look_ahead(self) -> None:
        """Let the drafter hear of everything, and draft what comes."""
        if self._drafter is None:
            return
        self._tell(self._known)
        slots = list(self._known)
        made = self._drafter.draft_all(slots, [LOOK_STEPS] * len(slots))
        self._ahead = dict(zip(slots, made, strict=True))

    def _with_looks(self, plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
        found: dict[int, DryRun] = {}
        for index, row in enumerate([row for item in plan.items for row in item.rows]):
            if (one := self._dry_runs.pop(row.slot, None)) is not None:
                found[index] = one
        return msgspec.structs.replace(outcome, dry_runs=found)

    def _come_to_know(self, item: WorkItem, slot: int, sampled: Sequence[int]) -> list[int]:
        """Ids of a slot that weren't known: those that its item brought, where a grammar forced
        them, and what was sampled behind them. None where the item went on from a token that wasn't
        sampled: its own count for nothing."""
        if item.kind is VERIFY:
            return [*sampled] if item.start == len(self._known[slot]) - 1 else []
        if item.end < len(self._known[slot]):
            self._go_back(slot, item.end)
        brought = self._forced(item)
        return [] if PENDING_TOKEN in brought else [*brought, *sampled]

    def _forced(self, item: WorkItem) -> list[int]:
        """Ids of an item behind those that are known of its slot."""
        count = item.end - len(self._known[item.slot])
        return item.token_ids[item.count - count :].tolist() if count > 0 else []


def _compared(draft_tokens: Sequence[int], ids: Sequence[int]) -> DryRun:
    drafted = accepted = min(len(draft_tokens), len(ids))
    for place in range(drafted):
        if draft_tokens[place] != ids[place]:
            accepted = place
            break
    return DryRun(len(ids), drafted, accepted)


def _asks(item: WorkItem) -> bool:
    """Whether an item has draft tokens, and the drafter is to make them."""
    return item.kind is VERIFY and item.count > 1 and item.token_ids[1] == DRAFT_TOKEN
