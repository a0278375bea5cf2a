"""Queue of waiting sequences, compared with a plain list of them."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioserve.scheduling.sequence import Phase
from aioserve.scheduling.waiting_queue import MOST_ONE_BY_ONE, WaitingQueue
from tests.tiers import examples


class Sequence:
    """The part of a sequence that the queue looks at."""

    def __init__(self, sequence_id: int, guided: bool) -> None:
        self.sequence_id = sequence_id
        self.view: str = f"view {sequence_id}"
        self.phase = Phase.WAITING
        self.paused: bool = False
        self.constrained = self.is_held = guided


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.last_id = 0

    def chosen(self, data: st.DataObject, among: list[Any]) -> Any:
        return among[data.draw(st.integers(0, len(among) - 1))]

    @rule(count=st.integers(1, 40), guided=st.sampled_from([False, False, False, True]))
    def arrive(self, count: int, guided: bool) -> None:
        for _ in range(count):
            self.last_id += 1
            self.come(Sequence(self.last_id, guided))

    def come(self, sequence: Any) -> None:
        self.queue.add(sequence)
        self.waiting = sorted([*self.waiting, sequence], key=lambda s: s.sequence_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        sequence = self.chosen(data, self.queue.sequences)
        sequence.phase = Phase.RUNNING
        self.queue.remove(sequence)
        self.waiting.remove(sequence)
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def begin_again(self, data: st.DataObject) -> None:
        sequence = self.chosen(data, self.running)
        self.running.remove(sequence)
        sequence.phase = Phase.WAITING
        self.come(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), most=st.sampled_from([1, 2, MOST_ONE_BY_ONE + 1]))
    def end(self, data: st.DataObject, most: int) -> None:
        for _ in range(min(most, len(self.waiting))):
            sequence = self.chosen(data, self.waiting)
            self.waiting.remove(sequence)
            sequence.phase = Phase.FINISHED
            self.queue.end(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), held=st.booleans())
    def hold_or_not(self, data: st.DataObject, held: bool) -> None:
        sequence = self.chosen(data, self.waiting)
        sequence.paused = sequence.is_held = held
        if held:
            self.queue.hold(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), held=st.booleans())
    def hold_one_that_runs(self, data: st.DataObject, held: bool) -> None:
        sequence = self.chosen(data, self.running)
        sequence.paused = sequence.is_held = held

    @rule()
    def begin_anew(self) -> None:
        self.queue.become(iter(self.waiting))

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        without = set(data.draw(st.lists(st.sampled_from(self.waiting)))) if self.waiting else ()
        able = [s for s in self.waiting if not s.is_held]
        seen = [s for s in able if s not in without]
        assert list(self.queue.views(without)) == [s.view for s in seen]
        assert list(self.queue.in_turn(without)) == seen
        assert self.queue.sequences == self.waiting

    @rule()
    def look_twice(self) -> None:
        """The same views are returned while nothing changes."""
        if not any(s.is_held for s in self.waiting):
            assert self.queue.views() is self.queue.views()

    @rule(data=st.data())
    def start_some_in_turn(self, data: st.DataObject) -> None:
        seen: list[Any] = []
        expected = [s for s in self.waiting if not s.is_held]
        for sequence in self.queue.in_turn():
            seen.append(sequence)
            if data.draw(st.booleans()):
                sequence.phase = Phase.RUNNING
                self.queue.remove(sequence)
                self.waiting.remove(sequence)
                self.running.append(sequence)
        assert seen == expected

    @invariant()
    def it_is_known_how_many_wait(self) -> None:
        assert len(self.queue) == len(self.waiting)

    @invariant()
    def those_that_can_go_on_are_shown(self) -> None:
        assert self.queue.views() == tuple([s.view for s in self.waiting if not s.is_held])


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=examples(60), stateful_step_count=30)
