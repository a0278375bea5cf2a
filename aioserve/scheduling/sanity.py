"""Recount of a scheduler's state: every page, receipt and queue, from the sequences themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.kv.groups.base import Group
from aioserve.kv.page_pool import PagePool
from aioserve.kv.prefix_tree import NO_RECEIPT
from aioserve.kv.recovery import held_in
from aioserve.paging.pages import capacity_tokens
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.state import SchedulerState

__all__ = ["check_idle", "check_state"]


def check_state(state: SchedulerState) -> None:
    """Raise `InvariantError` unless all counts agree. Page tables, swapped sequences and the prefix
    tree must hold exactly the references that the pools count. Every sequence must be in exactly
    one place."""
    memory = state.memory
    memory.sanity_check()
    sequences = state.sequences.values()
    nodes = [] if memory.tree is None else memory.tree.walk()
    leases = [*(s.lease for s in sequences), *state.pins.leases]
    for number, tier in enumerate(memory.tiers):
        _check_references(tier.name, tier.pool, held_in(number, leases, nodes))
    receipts = sorted(lease.receipt for lease in leases if lease.receipt != NO_RECEIPT)
    locks = 0 if memory.tree is None else memory.tree.num_receipts
    if len(receipts) != len(set(receipts)) or len(receipts) != locks:
        raise InvariantError(
            f"sequences and pins have receipts {receipts}, the prefix tree gave out {locks}"
        )
    pinned = sum(lease.num_locked for lease in state.pins.leases)
    if state.pins.num_pages != pinned or pinned > state.pins.max_pages:
        raise InvariantError(
            f"{pinned} pages are pinned of {state.pins.max_pages}, "
            f"and {state.pins.num_pages} are counted"
        )
    _check_queues(state)
    for sequence in sequences:
        _check_sequence(sequence, memory.page_size)
        _check_tables(sequence, memory.groups)


def check_idle(state: SchedulerState) -> None:
    """Raise `InvariantError` if nothing is planned and nothing is in flight without a reason.
    Reasons are: no work, readers that are behind, and masks that are missing."""
    if any(s.is_held and not s.paused for s in state.running):
        return  # others may wait for its slot and pages
    for sequence in (*state.running, *state.waiting):
        if not sequence.is_held:
            raise InvariantError(
                f"nothing is planned, nothing is in flight, and sequence {sequence.sequence_id} is "
                f"{sequence.phase.value} with {sequence.remaining} tokens to compute; "
                f"{state.memory.pool.num_free} pages are free and {state.memory.num_cached} can be "
                "evicted"
            )


def _check_references(
    where: str, pool: PagePool, holders: Iterable[Sequence[int] | npt.NDArray[np.int32]]
) -> None:
    expected = np.zeros(pool.num_pages, np.int32)
    held = [np.zeros(0, np.int32), *(np.array(page_ids, np.int32) for page_ids in holders)]
    np.add.at(expected, np.concatenate(held), 1)
    counts = pool.ref_counts()
    for page in np.flatnonzero(counts != expected).tolist():
        raise InvariantError(
            f"{where} page {page} has {counts[page]} references in the pool, and "
            f"{expected[page]} in page tables, swapped sequences and the prefix tree"
        )


def _check_queues(state: SchedulerState) -> None:
    queues = {Phase.WAITING: state.waiting, Phase.RUNNING: state.running}
    placed: list[int] = []
    for phase, queue in queues.items():
        ids = [s.sequence_id for s in queue]
        if ids != sorted(ids) or any(s.phase is not phase for s in queue):
            raise InvariantError(f"the {phase.value} queue is {queue}")
        for sequence in queue:
            family = sequence.family
            placed += [s.sequence_id for s in family]
            if any((s.slot >= 0) != (phase is Phase.RUNNING) for s in family):
                raise InvariantError(
                    f"{phase.value} {sequence} has slots {[s.slot for s in family]}"
                )
    num_slots = sum(len(s.family) for s in state.running)
    if state.slots.num_taken != num_slots:
        raise InvariantError(
            f"{state.slots.num_taken} slots are taken, and sequences that run have {num_slots}"
        )
    if sorted(placed) != sorted(state.sequences):
        raise InvariantError(
            f"queues hold sequences {sorted(placed)}, live are {sorted(state.sequences)}"
        )
    able = [s.view for s in state.waiting if not s.is_held]
    if list(state.queue.views()) != able:
        raise InvariantError(f"of those that wait {able} can go on, and others are shown")


def _check_sequence(sequence: SequenceState, page_size: int) -> None:
    lease = sequence.lease
    idle = sequence.phase is not Phase.RUNNING
    if (
        lease.entries > capacity_tokens(lease.covered, page_size)
        or not capacity_tokens(lease.published, page_size) <= lease.entries <= lease.computed
        or sequence.pending < 0
        or (idle and (lease.num_pages or lease.computed or lease.receipt != NO_RECEIPT))
    ):
        raise InvariantError(
            f"{sequence} has computed {lease.computed} tokens, of which it holds {lease.entries}, "
            f"published {lease.published} pages and samples {sequence.pending}, in room for "
            f"{lease.num_pages} pages"
        )


def _check_tables(sequence: SequenceState, groups: Sequence[Group]) -> None:
    lease = sequence.lease
    position = min(lease.computed, sequence.num_known - 1)
    index = position - (lease.computed - lease.entries)
    for at, table in enumerate(lease.tables):
        needed = groups[at].first_needed(index)
        if table.first > needed or len(table) > lease.num_pages:
            raise InvariantError(
                f"{sequence} holds pages of group {at} from position {table.first} up to "
                f"{len(table)} of {lease.num_pages}, and needs them from {needed} on"
            )
    covered = min([len(table) for table in lease.tables], default=0)
    if lease.covered != covered:
        raise InvariantError(
            f"{sequence} has all pages of {covered} positions, and {lease.covered} are counted"
        )
