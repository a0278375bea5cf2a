"""Cached tokens of each waiting prompt, found with a bounded number of lookups.

A lookup is a walk through the prefix tree, which is too much for thousands of requests in each
step. So the last results are remembered, and few prompts are looked up again. Requests form a group
if their prompts agree as far as they are cached and one page beyond. If the cache has lost part of
that, it has lost the same for all of them. If it has gained, all of them are looked up before
others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from aioserve import ConfigError, RequestView, SchedulerView, SchedulingPolicy
from aioserve_plugins._standing_order import Rank, StandingOrder
from aioserve_plugins._waiting_changes import WaitingChanges

__all__ = ["Prefix", "Rank", "RankedByUncached", "WaitingPrompt", "WaitingPrompts", "next_prefix"]

Prefix = tuple[int, bytes]
"""Number of first tokens, and their key."""


class WaitingPrompt:
    """A waiting request: its fixed properties, and its cached tokens."""

    __slots__ = ("arrived", "cached", "index", "prefix", "ranked_cached", "request", "tokens")

    def __init__(self, request: RequestView) -> None:
        self.request: RequestView = request
        self.index: int = request.arrival_index
        self.arrived: int = request.arrival_processed_tokens
        self.tokens: int = request.prompt_tokens + request.generated_tokens
        """Tokens to compute or find before the next one can be sampled."""
        self.cached: int = 0
        """Tokens cached at the last lookup."""
        self.ranked_cached: int = 0
        """Tokens known to be cached when the step began, by which it is ranked."""
        self.prefix: Prefix = (0, b"")
        """Prefix up to the end of the first page that isn't cached."""


class _Group:
    """Prompts that agree so far, in order of their last lookups, the oldest first."""

    __slots__ = ("calm", "mates")

    def __init__(self) -> None:
        self.mates: dict[WaitingPrompt, None] = {}
        self.calm: dict[WaitingPrompt, None] = {}
        """Prompts of the group that needn't be looked up before others."""


class WaitingPrompts:
    """Looks up at most `lookups` prompts in a step, and ranks all waiting ones.

    Prompts that came, and those in a group that has gained, are looked up first. Then comes one of
    each group, beginning with the group whose last lookup is oldest. A quarter of the lookups is
    kept for prompts that are about to be named.

    Ranks use what was known when the step began. A prompt with a number of cached tokens has the
    rank that `rank` returns; the least goes first. Two prompts stay in their order, with the cached
    tokens by which they were ranked, until the time that `holds_until` returns.
    """

    def __init__(
        self,
        lookups: int,
        rank: Callable[[WaitingPrompt, int, int], Rank],
        holds_until: Callable[[WaitingPrompt, WaitingPrompt, int], float],
    ) -> None:
        self.lookups = lookups
        self._left = 0
        self._page_size = 1
        self._prompts: dict[RequestView, WaitingPrompt] = {}
        self._changes = WaitingChanges()
        self._rank = rank
        self._holds_until = holds_until
        self._standing: StandingOrder[WaitingPrompt] = self._new_order()
        self._to_rank: dict[WaitingPrompt, None] = {}
        """Prompts that came or left, or whose cached tokens differ from those they were ranked
        by."""
        self._fresh: set[WaitingPrompt] = set()
        """Prompts looked up in this step."""
        self._urgent: dict[WaitingPrompt, None] = {}
        self._groups: dict[Prefix, _Group] = {}
        """Groups, the one with the oldest last lookup first."""

    def _new_order(self) -> StandingOrder[WaitingPrompt]:
        return StandingOrder(
            lambda prompt, now: self._rank(prompt, prompt.ranked_cached, now), self._holds_until
        )

    def begin(self, waiting: Sequence[RequestView], view: SchedulerView) -> None:
        """Begin a step in which these requests wait: all of them, in order of arrival."""
        self._page_size = view.page_size
        came, gone = self._changes.look(waiting)
        for request in gone:  # started unasked, or their readers are behind
            self._leave_queue(request)
        for request in came:
            prompt = self._prompts[request] = WaitingPrompt(request)
            self._urgent[prompt] = None
            self._join(prompt)
        self._fresh.clear()
        self._left = self.lookups
        most = self.lookups - self.lookups // 4
        for prompt in list(islice(self._urgent, most)):
            self.look_up(prompt)
        for prefix in list(islice(self._groups, max(0, most - len(self._fresh)))):
            if prefix in self._groups:
                self._groups[prefix] = self._groups.pop(prefix)
                self.look_up(next(iter(self._groups[prefix].mates)))
        for prompt in self._to_rank:
            if self._prompts.get(prompt.request) is prompt:
                prompt.ranked_cached = prompt.cached
                self._standing.put(prompt)
            else:
                self._standing.remove(prompt)
        self._to_rank.clear()

    def in_turn(self, now: int) -> Iterator[WaitingPrompt]:
        """Yield all prompts by their ranks. Each is looked up when its turn comes. If fewer tokens
        are cached than was known, it gets a later turn."""
        later: list[tuple[Rank, WaitingPrompt]] = []
        ranked = self._standing.ranked(now)
        following = next(ranked, None)
        while following is not None or later:
            if following is None or (later and later[0] < following):
                known, prompt = heapq.heappop(later)
            else:
                known, prompt = following
                following = next(ranked, None)
            self.look_up(prompt)
            rank = self._rank(prompt, prompt.cached, now)
            if rank > known:
                heapq.heappush(later, (rank, prompt))
            else:
                yield prompt

    def look_up(self, prompt: WaitingPrompt) -> None:
        """Look up a prompt's cached tokens, unless this step has no lookups left."""
        if self._left <= 0 or prompt in self._fresh:
            return
        self._left -= 1
        self._fresh.add(prompt)
        self._urgent.pop(prompt, None)
        cached, (end, _) = prompt.request.cached_tokens, prompt.prefix
        group = self._groups[prompt.prefix]
        if cached == prompt.cached:
            group.mates[prompt] = group.mates.pop(prompt)
            group.calm.pop(prompt, None)
            group.calm[prompt] = None
            return
        self._leave(prompt)
        prompt.cached = cached
        self._join(prompt)
        if cached >= end:
            self._alarm(group)
            return
        for mate in list(group.mates):
            self._leave(mate)
            mate.cached = min(cached, mate.tokens - 1)
            self._join(mate)

    def starts(self, request: RequestView) -> None:
        """Note that a request starts and will compute what its group needs next, so the group is
        looked up before others."""
        prompt = self._prompts.get(request)
        if prompt is not None:
            group = self._groups[prompt.prefix]
            self._leave_queue(request)
            self._changes.forget([request])
            self._alarm(group)

    def _alarm(self, group: _Group) -> None:
        """Let all of a group be looked up before others."""
        self._urgent.update(group.calm)
        group.calm = {}

    def forget(self, request: RequestView) -> None:
        """Forget a request that has ended."""
        self._changes.forget([request])
        self._leave_queue(request)
        if not self._prompts:  # none may come for hours
            self._standing = self._new_order()
            self._to_rank.clear()
            self._fresh.clear()

    def _leave_queue(self, request: RequestView) -> None:
        prompt = self._prompts.pop(request, None)
        if prompt is not None:
            self._leave(prompt)
            self._urgent.pop(prompt, None)

    def _join(self, prompt: WaitingPrompt) -> None:
        self._to_rank[prompt] = None
        prompt.prefix = next_prefix(prompt.request, prompt.cached, self._page_size)
        group = self._groups.setdefault(prompt.prefix, _Group())
        group.mates[prompt] = None
        if prompt not in self._urgent:
            group.calm[prompt] = None

    def _leave(self, prompt: WaitingPrompt) -> None:
        self._to_rank[prompt] = None
        group = self._groups[prompt.prefix]
        del group.mates[prompt]
        group.calm.pop(prompt, None)
        if not group.mates:
            del self._groups[prompt.prefix]


class RankedByUncached(SchedulingPolicy):
    """Ranks waiting requests by the tokens left to compute, and by the time that they have waited.

    Raises `ConfigError` for a `patience` that isn't positive and finite, or `lookups` below 1.
    """

    def __init__(self, *, patience: float = 1024.0, lookups: int = 64) -> None:
        if not isinstance(patience, int | float) or not 0 < patience < math.inf:
            raise ConfigError(f"patience must be positive and finite, got {patience!r}")
        if not isinstance(lookups, int) or lookups < 1:
            raise ConfigError(f"lookups must be an int of at least 1, got {lookups!r}")
        self.patience = patience
        self.lookups = lookups
        self._prompts = WaitingPrompts(lookups, self._rank, self._holds_until)

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return math.ceil(self.patience * (request.prompt_tokens + request.generated_tokens))

    def _rank(self, prompt: WaitingPrompt, cached: int, now: int) -> Rank:
        raise NotImplementedError

    def _holds_until(self, first: WaitingPrompt, second: WaitingPrompt, now: int) -> float:
        raise NotImplementedError

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        if not request.pages:
            self._prompts.starts(request)
        return budget_tokens

    def finished(self, requests: Sequence[RequestView]) -> None:
        for request in requests:
            self._prompts.forget(request)


def next_prefix(request: RequestView, num_tokens: int, page_size: int) -> Prefix:
    """Prefix up to the end of the page that comes after the first `num_tokens` tokens."""
    end = (num_tokens // page_size + 1) * page_size
    return end, request.prefix_key(end)
