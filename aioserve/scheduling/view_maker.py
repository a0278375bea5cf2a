"""Makes what a policy sees while one step is planned."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.scheduling.room import Room
from aioserve.scheduling.state import SchedulerState
from aioserve.scheduling.step_times import StepSummary, StepTimes
from aioserve.scheduling.view import RequestView, SchedulerView

__all__ = ["ViewMaker"]


class ViewMaker:
    """Maker of the views of one step: each view shows the books as they are when it is made, and
    what it is asked for beyond its fields as it is then."""

    def __init__(
        self,
        books: SchedulerState,
        times: StepTimes,
        room: Room,
        step: int,
        now_seconds: float,
    ) -> None:
        self._books = books
        self._times = times
        self._room = room
        self._step = step
        self._now_seconds = now_seconds

    def view(self) -> SchedulerView:
        books, pool = self._books, self._books.memory.pool
        return SchedulerView(
            self._step,
            self._now_seconds,
            self._room.num_processed,
            self._room.max_num_batched_tokens,
            books.max_num_seqs,
            pool.page_size,
            pool.num_pages,
            pool.num_free,
            books.memory.num_cached,
            pool.num_fenced,
            len(books.running),
            len(books.waiting),
            books.pins.num_pages,
            self,
        )

    def views_of_running(self) -> Sequence[RequestView]:
        return tuple([s.view for s in self._books.running])

    def views_of_waiting(self) -> Sequence[RequestView]:
        return self._books.views_of_waiting()

    def recent_steps(self) -> tuple[StepSummary, ...]:
        return self._times.recent

    def estimate(self, prefill_tokens: int, decodes: int, context_tokens: int) -> float | None:
        return self._times.estimate(prefill_tokens, decodes, context_tokens)

    def pages_reserved(self) -> int:
        return self._room.pages_reserved()

    def pages_reserved_for(self, request: RequestView) -> int:
        sequence = self._books.sequences.get(request.arrival_index)
        return 0 if sequence is None else self._room.pages_ahead(sequence)
