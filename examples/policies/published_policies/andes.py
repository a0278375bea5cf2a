"""Andes: readers who have enough to read give way to those who wait."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)

__all__ = ["QualityOfExperience"]


class QualityOfExperience(SchedulingPolicy):
    """Serve readers who have nothing left to read before those who have plenty.

    A reader takes one token in `tpot_target_seconds`, or in `reading_seconds` if the request has no
    such target. A reader with more than `buffer_seconds` to read gives its slot and pages to one
    who waits, first of all the reader with most left. It comes back before others once it has less.

    Raises `ConfigError` for seconds that aren't positive and finite.

    Liu et al.: "Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming
    Services", arXiv 2404.16283, 2024.
    """

    def __init__(self, *, reading_seconds: float = 0.2, buffer_seconds: float = 2.0) -> None:
        for name, value in (
            ("reading_seconds", reading_seconds),
            ("buffer_seconds", buffer_seconds),
        ):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, got {value!r}")
        self.reading_seconds = reading_seconds
        self.buffer_seconds = buffer_seconds

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        """Return first those with nothing to read, in order of arrival, then by the time they run
        out.
        """
        hungry = [request for request in waiting if self._to_read(request, view) <= 0]
        others = [request for request in waiting if self._to_read(request, view) > 0]
        return [*hungry, *sorted(others, key=lambda request: self._to_read(request, view))]

    def preempt(self, running: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        hungry = [request for request in view.waiting if self._to_read(request, view) <= 0]
        rich = [r for r in running if self._to_read(r, view) > self.buffer_seconds]
        rich.sort(key=lambda request: self._to_read(request, view), reverse=True)
        slots = view.max_num_seqs - view.num_running
        pages = view.pages_free + view.pages_cached
        for request in hungry:
            needed = -(-request.uncached_tokens // view.page_size) + 1
            while rich and (slots < request.num_samples or pages < needed):
                pages += rich[0].reclaimable_pages
                slots += 1
                yield rich.pop(0)
            slots, pages = slots - request.num_samples, pages - needed
            if slots < 0 or pages < 0:
                return

    def _to_read(self, request: RequestView, view: SchedulerView) -> float:
        """Return the seconds that the reader needs for the text that has come."""
        if request.first_token_seconds is None:
            return 0.0
        per_token = request.tpot_target_seconds or self.reading_seconds
        read = view.now_seconds - request.first_token_seconds
        return request.generated_tokens * per_token - read


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("andes", QualityOfExperience, "who has enough to read gives way")]
