"""Tracks the known tokens of each slot, and fixes positions and draft tokens of plans.

A plan leaves both open while steps before it are in flight.

    plan        VERIFY  start at most 13, at most 4 tokens: pending, draft, draft, draft
    resolved    VERIFY  start 11, 3 tokens: pending, 7, 9     the drafter made two tokens
    noted       7 was right, 4 was drawn in place of 9        the slot's next item starts at 13

Knows plans, but neither tensors nor devices. Called in the order of the steps. The tokens of each
step are known before the next is resolved.
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
"""Steps that verify nothing before a quick drafter makes a dry run of as many tokens. No step
verifies those. Later tokens tell how many were right."""


@dataclass(slots=True, frozen=True)
class DraftRequest:
    """Draft tokens needed before a plan can be resolved."""

    plan: StepPlan
    slots: Sequence[int]
    limits: Sequence[int]
    """Slots and limits, as for `Drafter.draft_all`."""
    since_seconds: float
    """Time at which the drafter began to hear of the tokens that it goes on from."""


class StepFollower(Protocol):
    """Computation beside the steps, in memory that follows theirs.

    A drafter needs it if it reads more of sequences than token ids.
    """

    def take(self, plan: StepPlan) -> None:
        """End and start slots, and change their page tables, as a plan says. May fail."""
        ...

    def follow(self, plan: StepPlan) -> None:
        """Copy the pages of a plan. Its draft tokens are made next, and then it is computed."""
        ...

    def computed(
        self,
        plan: StepPlan,
        rows: TokenRows | None = None,
        locations: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Take the results of a computed plan, which was resolved before.

        Not called if steps themselves write what the drafter reads.

        - `rows`: indices of the plan's own tokens among those computed, int64 `[T]`; None means
          all.
        - `locations`: those of their KV in group 0, as in `HostBatch.token_locations`; None means
          the plan's.
        """
        ...


class Resolver:
    """Known tokens of slots whose sequences may have draft tokens verified.

    - `drafter`: makes draft tokens; without it there are none.
    - `follower`: hears of every plan.
    - `clock`: measures the drafter, in seconds; None doesn't.
    - `max_branches`: most paths beside the draft tokens of a slot.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        follower: StepFollower | None = None,
        clock: Callable[[], float] | None = None,
        max_branches: int = 0,
    ) -> None:
        self.is_used: bool = drafter is not None or follower is not None
        """True if there is a drafter or a follower. Without either, only plans that start a slot
        need `take`, and none needs `noted`."""
        self._drafter = drafter
        self._clock = clock or (lambda: 0.0)
        self._drafting_seconds = 0.0
        """Drafting time of the step that was resolved last."""
        self._request: DraftRequest | None = None
        """Draft tokens for the next step to resolve, once that is known."""
        self._follower = follower
        self._max_branches = max_branches
        self.branches: dict[int, Sequence[Sequence[int]]] = {}
        """Paths beside the draft tokens of slots, for the plan that was resolved last."""
        self._started: dict[int, DraftedSequence] = {}
        """Sequence that each slot started with."""
        self._known: dict[int, array[int]] = {}
        """All known ids of each slot, with the one sampled last."""
        self._looks = drafter is not None and drafter.is_quick
        self._num_sent: dict[int, int] = {}
        """Number of known ids that the drafter has heard of."""
        self._ahead: dict[int, Sequence[int]] = {}
        """Draft tokens of a dry run, which follow the ids heard of."""
        self._dry_runs: dict[int, DryRun] = {}
        """Results of dry runs, until an outcome reports them."""
        self._unread: list[tuple[StepPlan, StepOutcome]] = []
        """Steps whose tokens nothing has needed yet. Reading them one by one would take time
        between steps."""
        self._steps_plain = 0
        """Steps in a row that verified nothing."""

    def take(self, plan: StepPlan) -> None:
        """End and start slots, as a plan says.

        Raises `InvariantError` for a slot that is to have draft tokens if there is no drafter.
        """
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
        self._num_sent[slot] = len(known_ids)
        if self._drafter is not None:
            self._drafter.start(slot, sequence)

    def _end(self, slot: int) -> None:
        if self._started.pop(slot, None) is not None:
            self._tell((slot,))
            for kept in (self._known, self._num_sent):
                del kept[slot]
            for may_be_kept in (self._ahead, self._dry_runs):
                may_be_kept.pop(slot, None)
            if self._drafter is not None:
                self._drafter.end(slot)

    def _go_back(self, slot: int, num_known: int) -> None:
        """Forget all but `num_known` tokens of a slot. A mask came late, and what was drawn
        after it is void. The drafter begins again."""
        known_ids = np.array(self._known[slot][:num_known], np.int32)
        sequence = msgspec.structs.replace(self._started[slot], known_ids=known_ids)
        self._num_sent[slot] = len(self._known[slot])  # skip telling the drafter of the rest
        self._end(slot)
        self._start(slot, sequence)

    def resolved(self, plan: StepPlan) -> StepPlan:
        """Return the plan with draft tokens, and with items at their true positions.

        Raises `InvariantError` for an item whose slot is further than the plan allows, or that asks
        for draft tokens although its slot started without drafting.
        """
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
        """Return the draft tokens that `resolved` needs, after telling the drafter all known
        tokens.

        For a drafter that runs elsewhere, before the plan is resolved. Once for each plan.
        """
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
        """Make the draft tokens of slots."""
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
        """Take forced tokens from a plan. If no earlier step is in flight, the plan knows each
        slot's last token, which a grammar may have forced."""
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
            # Steps in flight drew nothing for it, so the result of this item will be dropped, too.
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
        """Take note of a resolved step that was computed, and sampled row by row.

        Return its outcome, with the results of dry runs. `rows` and `locations` are those of
        `StepFollower.computed`.
        """
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
        """Take note of the steps not read yet."""
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
        """Return the new ids by slot if the step decodes one token of each, as most steps do;
        otherwise None."""
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
        """Append ids to the known ids of slots."""
        for slot, ids in extended.items():
            self._known[slot].extend(ids)

    def _tell(self, slots: Iterable[int]) -> None:
        """Tell the drafter of tokens of these slots that it hasn't heard of."""
        if self._drafter is None:
            return
        extended: dict[int, list[int]] = {}
        for slot in slots:
            known = self._known[slot]
            if (num_sent := self._num_sent[slot]) == len(known):
                continue
            extended[slot] = ids = known[num_sent:].tolist()
            self._num_sent[slot] = len(known)
            if (ahead := self._ahead.pop(slot, None)) is not None:
                self._dry_runs[slot] = _compared(ahead, ids[:LOOK_STEPS])
        if extended:
            self._drafter.extend_all(list(extended), list(extended.values()))

    def _look_ahead(self) -> None:
        """Tell the drafter everything, and start a dry run."""
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
        """Return ids that weren't known of a slot: forced ids of its item, and sampled ones.

        None of them if the item went on from a token that wasn't sampled: its own are void.
        """
        if item.kind is VERIFY:
            return [*sampled] if item.start == len(self._known[slot]) - 1 else []
        if item.end < len(self._known[slot]):
            self._go_back(slot, item.end)
        brought = self._forced(item)
        return [] if PENDING_TOKEN in brought else [*brought, *sampled]

    def _forced(self, item: WorkItem) -> list[int]:
        """Ids of an item that follow the known ones of its slot."""
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
    """True if an item has draft tokens for the drafter to make."""
    return item.kind is VERIFY and item.count > 1 and item.token_ids[1] == DRAFT_TOKEN
