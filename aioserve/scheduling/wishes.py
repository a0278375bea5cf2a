"""What a policy may have done to those that run, and how far: who is dropped, taken off the device,
let go of, and who decodes.

Every run ends, whatever is wished. A step that is planned computes a token at least, so there are
endlessly many steps only where tokens are computed again endlessly often, after preemptions. Of
these there are two kinds. At the policy's wish a sequence is preempted `MAX_FRUITLESS` times for
each token that it comes to know, and answers are finite. For somebody else's page it is preempted
only by one ahead of it in the order of precedence and age, and that one gets the page: it is owed
the token, whoever else the policy chooses. So the first in this order, which is preempted at the
policy's wish alone, takes finitely many pages; the second is preempted finitely often for those and
takes finitely many; and so on to the last. Where nothing at all is chosen and nothing is in flight,
one sequence goes on unasked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aioserve.scheduling.books import Books
from aioserve.scheduling.policy import Refusal
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.view import SchedulerView
from aioserve.scheduling.view_maker import ViewMaker

__all__ = ["Granting", "chosen_decodes", "grant_wishes"]


class Granting(Protocol):
    """The planner of a step, as far as wishes go."""

    step: int
    working_on: SequenceState | None
    reject: Callable[[SequenceState, Refusal | None], None]
    views: ViewMaker


def grant_wishes(books: Books, planner: Granting) -> set[SequenceState]:
    """Drop, preempt and unpin before a step is planned; those preempted, who don't start in it."""
    guard = books.guard
    if guard.pins and books.pins:
        books.pins.ask_to_unpin(planner.views.view())
    if guard.drops and books.running:
        _drop(books, planner)
    if not guard.preempts or not books.running:
        return set()
    candidates = [s.view for s in books.running if s.may_be_taken and not s.exhausted]
    taken: set[SequenceState] = set()
    for one in guard.preempt(candidates, planner.views.view()) if candidates else ():
        sequence = books.sequence_of(one.request)
        planner.working_on = sequence
        sequence.count_taken()
        books.preempt(sequence, planner.step, one.how)
        taken.add(sequence)
    planner.working_on = None
    return taken


def _drop(books: Books, planner: Granting) -> None:
    view = planner.views.view()
    for sequence in list(books.running):
        if sequence.phase is not Phase.RUNNING or sequence.exhausted:
            continue
        refusal = books.guard.drop(sequence.view, view)
        if refusal is not None:
            planner.working_on = sequence
            planner.reject(sequence, refusal)
            planner.working_on = None


def chosen_decodes(
    books: Books, ready: list[SequenceState], view: SchedulerView
) -> list[SequenceState]:
    """Those of `ready` that get a token, in the policy's order: first those that are owed one."""
    books.owed = {
        s: computed
        for s, computed in books.owed.items()
        if s.phase is Phase.RUNNING and s.lease.computed <= computed
    }
    named = books.guard.decode([s.view for s in ready], view)
    owed = [s for s in ready if s in books.owed]
    return [*owed, *(s for s in map(books.sequence_of, named) if s not in books.owed)]
