"""Running sequences that are preempted so that a waiting one can start.

A policy gives each request a precedence, once. Of two sequences only the one of the greater may
displace the other, so those of equal precedence never take turns. That every run ends rests on
this: precedence and age put all sequences in one order that never changes, and none is preempted
for one behind it, be that one waiting or in need of a page. Of those that run again and again the
first in this order is never preempted, so it gets to its end; then the next one is first.

None is preempted in vain: all that give way do so together, where that is enough, and only as many
as are needed. And none displaces without end: while it waits, a
sequence displaces no more others than can run at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from aioserve.scheduling.room import RoomWithout
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.state import SchedulerState
from aioserve.scheduling.view import SchedulerView

__all__ = ["by_precedence", "lowest_precedence", "who_gives_way"]


def by_precedence(sequence: SequenceState) -> tuple[int, int]:
    """Sorts sequences: none is preempted for one behind it, unless its reader is behind."""
    return -sequence.precedence, sequence.sequence_id


def lowest_precedence(state: SchedulerState) -> float:
    """The lowest precedence that runs: a sequence that waits with a greater one may displace it."""
    if not state.has_precedences:  # all are equal
        return math.inf
    return min([s.precedence for s in state.running], default=math.inf)


def who_gives_way(
    state: SchedulerState, sequence: SequenceState, view: SchedulerView
) -> Sequence[SequenceState]:
    """Running sequences, in the policy's order, without which a waiting one has its slots and its
    pages, now or after the steps in flight. None, if it has them anyway or not even so."""
    lower = [s for s in state.running if s.precedence < sequence.precedence]
    candidates = [s for s in lower if not s.exhausted]  # the others end by themselves
    if not candidates:
        return ()
    left = RoomWithout(state, sequence)
    if state.policy_calls.reserves:
        left.keep(state.policy_calls.reserve(sequence.view, state.memory.pool.num_pages, view))
    state.pins.make_room(left.num_pages_wanted)
    if left.suffices:
        return ()
    named = state.policy_calls.displaces(sequence.view, [s.view for s in candidates], view)
    leaving: list[SequenceState] = []
    for chosen in map(state.sequence_of, named):
        leaving.append(chosen)
        left.leave(chosen)
        if left.suffices:
            break
    else:
        return ()
    for spared in reversed(leaving[:-1]):
        left.stay(spared)
        if left.suffices:
            leaving.remove(spared)
        else:
            left.leave(spared)
    within = len(leaving) <= state.max_num_seqs - sequence.num_displaced
    return leaving if within else ()
