"""Which waiting prompts go on like one that is being computed, and would find its pages soon.

Two prompts are compared by the keys of their prefixes, and each key costs a pass over that prefix.
So how far two agree is found by bisection, once, and a step has a bounded number of comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable

from aioserve import RequestView

__all__ = ["SharedBeginnings"]

COMPARISONS = 32
"""In a step."""


class _Agreement:
    """How many whole pages two prompts have in common: at least `least`, at most `most`."""

    __slots__ = ("confirmed", "least", "most")

    def __init__(self, most: int) -> None:
        self.least = 1
        self.most = most
        self.confirmed = False
        """One found pages of the other in the cache: there is one."""


class SharedBeginnings:
    """Prompts that are being computed, by their first pages, and how far others agree with them."""

    def __init__(self) -> None:
        self._page_size = 1
        self._left = 0
        """Comparisons in this step."""
        self._first_pages: dict[RequestView, bytes] = {}
        self._computing: dict[bytes, dict[RequestView, None]] = {}
        self._agreements: dict[RequestView, dict[RequestView, _Agreement]] = {}
        """Of each that is being computed with those that wait."""

    def begin(self, computing: Iterable[RequestView], page_size: int) -> None:
        """Begin a step while the prompts of these are being computed."""
        self._page_size, self._left = page_size, COMPARISONS
        self._computing.clear()
        before, self._agreements = self._agreements, {}
        for request in computing:
            self.add(request)
            self._agreements[request] = before.get(request, {})

    def add(self, request: RequestView) -> None:
        """This prompt is being computed from now on."""
        self._computing.setdefault(self._first_page(request), {})[request] = None
        self._agreements[request] = {}

    def forget(self, request: RequestView) -> None:
        """It has ended."""
        first_page = self._first_pages.pop(request, None)
        if first_page is not None:
            self._computing.get(first_page, {}).pop(request, None)
        self._agreements.pop(request, None)
        for agreements in self._agreements.values():
            agreements.pop(request, None)

    def has_next_of(self, request: RequestView) -> bool:
        """Whether a page that this one could find cached is about to be computed for another. So it
        is taken to be until there were comparisons enough to know."""
        alike = self._computing.get(self._first_page(request), ())
        return any(self._computes_next_of(request, other) for other in alike)

    def _first_page(self, request: RequestView) -> bytes:
        if request not in self._first_pages:
            self._first_pages[request] = request.prefix_key(self._page_size)
        return self._first_pages[request]

    def _computes_next_of(self, request: RequestView, other: RequestView) -> bool:
        known, computed = (
            self._agreements.setdefault(other, {}),
            other.computed_tokens // self._page_size,
        )
        if request not in known:
            findable = (request.prompt_tokens + request.generated_tokens - 1) // self._page_size
            whole = (other.prompt_tokens + other.generated_tokens) // self._page_size
            known[request] = _Agreement(min(findable, whole))
        pair = known[request]
        if computed and pair.most and not pair.confirmed:
            pair.confirmed = request.cached_tokens > 0
            pair.most = pair.most if pair.confirmed else 0
        tried = pair.most  # most often the shorter one is the beginning of the other
        while pair.least <= computed < pair.most:
            if not self._left:
                return True
            self._left -= 1
            if self._agree(request, other, tried):
                pair.least = tried
            else:
                pair.most = tried - 1
            tried = (max(pair.least, computed) + pair.most + 1) // 2
        return computed < min(pair.least, pair.most)

    def _agree(self, request: RequestView, other: RequestView, pages: int) -> bool:
        tokens = pages * self._page_size
        return request.prefix_key(tokens) == other.prefix_key(tokens)
