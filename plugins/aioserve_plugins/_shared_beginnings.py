"""Find waiting prompts that begin like one that is being computed, and will soon find its pages.

Two prompts are compared by the keys of their prefixes, and each key takes a pass over that prefix.
So the length of a common prefix is found by bisection, once, and a step makes a bounded number of
comparisons.

A step has no time either for all pairs of waiting and computed prompts. A waiting prompt watches
one that is computed ahead of it. Once that one has computed all that they have in common, it never
helps again, and the next one is watched. So each pair gets its turn once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from aioserve import RequestView

__all__ = ["SharedBeginnings"]

COMPARISONS = 32
"""Most comparisons in a step."""


class _Computing:
    """A prompt that is being computed, from its start to its end or preemption."""

    __slots__ = ("first_page", "number", "preemptions", "request")

    def __init__(self, request: RequestView, first_page: bytes, number: int) -> None:
        self.request: RequestView | None = request
        """Request; None when it is over."""
        self.first_page = first_page
        self.number = number
        """Number that grows from one prompt to the next."""
        self.preemptions: int = request.preemptions


class _Watch:
    """Prompt that a waiting one watches, and the whole pages that they have in common: at least
    `least`, at most `most`."""

    __slots__ = ("confirmed", "least", "most", "number", "other", "preemptions")

    def __init__(self, preemptions: int) -> None:
        self.preemptions = preemptions
        self.number = 0
        """Number of the prompt that is watched, or was last. All before it had their turn."""
        self.other: _Computing | None = None
        self.least = self.most = 0
        self.confirmed = False
        """True once pages of the other were found in the cache, so that there is one."""

    def turn_to(self, other: _Computing, most: int) -> None:
        self.other, self.number = other, other.number
        self.least, self.most, self.confirmed = 1, most, False


class SharedBeginnings:
    """Prompts that are being computed, by their first pages, and how far others agree with them."""

    def __init__(self) -> None:
        self._page_size = 1
        self._left = 0
        """Comparisons left in this step."""
        self._last_number = 0
        self._first_pages: dict[RequestView, bytes] = {}
        self._computing: dict[RequestView, _Computing] = {}
        self._alike: dict[bytes, list[_Computing]] = {}
        """Prompts with the same first page, by number."""
        self._watches: dict[RequestView, _Watch] = {}

    def begin(self, computing: Iterable[RequestView], page_size: int) -> None:
        """Begin a step while the prompts of these requests are being computed."""
        self._page_size, self._left = page_size, COMPARISONS
        computing = dict.fromkeys(computing)
        for request, one in list(self._computing.items()):
            if request not in computing or request.preemptions != one.preemptions:
                self._end(request)
        for request in computing:
            if request not in self._computing:
                self.add(request)

    def add(self, request: RequestView) -> None:
        """Record that this prompt is being computed from now on."""
        self._last_number += 1
        one = _Computing(request, self._first_page(request), self._last_number)
        self._computing[request] = one
        self._alike.setdefault(one.first_page, []).append(one)

    def forget(self, request: RequestView) -> None:
        """Forget a request that has ended."""
        self._end(request)
        self._first_pages.pop(request, None)
        self._watches.pop(request, None)

    def _end(self, request: RequestView) -> None:
        one = self._computing.pop(request, None)
        if one is None:
            return
        one.request = None
        alike = self._alike[one.first_page]
        alike.remove(one)
        if not alike:
            del self._alike[one.first_page]

    def has_next_of(self, request: RequestView) -> bool:
        """True if a page that this request could find in the cache is about to be computed for
        another. Also True until there were enough comparisons to know."""
        alike = self._alike.get(self._first_page(request))
        if alike is None:
            return False
        watch = self._watches.get(request)
        if watch is None or watch.preemptions != request.preemptions:
            watch = self._watches[request] = _Watch(request.preemptions)
        if self._is_ahead(request, watch):
            return True
        for place in range(bisect_right(alike, watch.number, key=_number), len(alike)):
            self._turn(request, watch, alike[place])
            if self._is_ahead(request, watch):
                return True
        watch.other = None
        return False

    def _turn(self, request: RequestView, watch: _Watch, one: _Computing) -> None:
        other = one.request
        if other is None:
            raise LookupError("one that is over is still among those that are computed")
        findable = (request.prompt_tokens + request.generated_tokens - 1) // self._page_size
        whole = (other.prompt_tokens + other.generated_tokens) // self._page_size
        watch.turn_to(one, min(findable, whole))

    def _first_page(self, request: RequestView) -> bytes:
        if request not in self._first_pages:
            self._first_pages[request] = request.prefix_key(self._page_size)
        return self._first_pages[request]

    def _is_ahead(self, request: RequestView, watch: _Watch) -> bool:
        """True if the watched prompt is about to compute a page that both have in common."""
        other = None if watch.other is None else watch.other.request
        if other is None:
            return False
        computed = other.computed_tokens // self._page_size
        if computed >= watch.most:
            return False
        if computed and not watch.confirmed:
            watch.confirmed = request.cached_tokens > 0
            watch.most = watch.most if watch.confirmed else 0
        tried = watch.most  # most often the shorter one is the beginning of the other
        while watch.least <= computed < watch.most:
            if not self._left:
                return True
            self._left -= 1
            if self._agree(request, other, tried):
                watch.least = tried
            else:
                watch.most = tried - 1
            tried = (max(watch.least, computed) + watch.most + 1) // 2
        return computed < min(watch.least, watch.most)

    def _agree(self, request: RequestView, other: RequestView, pages: int) -> bool:
        tokens = pages * self._page_size
        return request.prefix_key(tokens) == other.prefix_key(tokens)


def _number(one: _Computing) -> int:
    return one.number
