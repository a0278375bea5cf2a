"""Choice of running sequences to preempt so that a waiting one can start.

A policy gives each request a precedence, once. Only a sequence of greater precedence may displace
another, so sequences of equal precedence never take turns. Precedence and age put all sequences in
one order that never changes, and none is preempted for one behind it. The first in this order is
therefore never preempted and reaches its end; then the next one is first. That every run ends rests
on this.

No sequence is preempted in vain. All that give way do so together, only if that is enough, and only
as many as are needed. While it waits, a sequence displaces no more others than can run at once.
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
    """Sort key of sequences. None is preempted for one behind it, unless its reader is behind."""
    return -sequence.precedence, sequence.sequence_id


def lowest_precedence(state: SchedulerState) -> float:
    """Lowest precedence among running sequences. A waiting sequence with a greater one may displace
    it."""
    if not state.has_precedences:  # all are equal
        return math.inf
    return min([s.precedence for s in state.running], default=math.inf)


def who_gives_way(
    state: SchedulerState, sequence: SequenceState, view: SchedulerView
) -> Sequence[SequenceState]:
    """Running sequences to preempt so that `sequence` can start, now or after the steps in flight.
    They are the first in the policy's order, without any that can stay. Empty if it can start
    already, or cannot start at all."""
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
