"""How much of each waiting prompt the prefix cache holds, known from a bounded number of lookups.

To look up a prompt means a walk through the prefix tree, which is too much to do for thousands of
requests in each step. So what was found last is remembered, and few are looked up again. Requests
whose prompts agree as far as they are cached and one page beyond are a group: where the cache has
lost part of that, it has lost the same of all of them, and where it has gained, all of them are
looked up before others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from aioserve import RequestView, SchedulerView

__all__ = ["Prefix", "WaitingPrompt", "WaitingPrompts", "next_prefix"]

Prefix = tuple[int, bytes]
"""So many first tokens, and their key."""


class WaitingPrompt:
    """What doesn't change of a request while it waits, and what was cached of it."""

    __slots__ = ("arrived", "cached", "index", "prefix", "request", "tokens")

    def __init__(self, request: RequestView) -> None:
        self.request: RequestView = request
        self.index: int = request.arrival_index
        self.arrived: int = request.arrival_processed_tokens
        self.tokens: int = request.prompt_tokens + request.generated_tokens
        """To compute or find before the next one can be sampled."""
        self.cached: int = 0
        """Of those, at the last lookup."""
        self.prefix: Prefix = (0, b"")
        """Up to the end of the first page that isn't cached."""


class WaitingPrompts:
    """Looks up at most `lookups` prompts in a step: those that came and those whose group has
    gained first, then one of each group, the group whose last lookup is the longest ago first. A
    quarter is kept for those that are about to be named."""

    def __init__(self, lookups: int) -> None:
        self.lookups = lookups
        self._left = 0
        self._page_size = 1
        self._prompts: dict[RequestView, WaitingPrompt] = {}
        self._fresh: set[WaitingPrompt] = set()
        """Looked up in this step."""
        self._urgent: dict[WaitingPrompt, None] = {}
        self._groups: dict[Prefix, dict[WaitingPrompt, None]] = {}
        """The one whose last lookup is the longest ago first."""

    def begin(self, waiting: Sequence[RequestView], view: SchedulerView) -> list[WaitingPrompt]:
        """Begin a step in which these wait; all of them, in that order."""
        self._page_size = view.page_size
        prompts = self._prompts
        for request in waiting:
            if request not in prompts:
                prompt = prompts[request] = WaitingPrompt(request)
                self._join(prompt)
                self._urgent[prompt] = None
        if len(prompts) > len(waiting):  # some started unasked, or their readers are behind
            for request in prompts.keys() - set(waiting):
                self.forget(request)
        self._fresh.clear()
        self._left = self.lookups
        most = self.lookups - self.lookups // 4
        for prompt in list(islice(self._urgent, most)):
            self.look_up(prompt)
        for prefix in list(islice(self._groups, max(0, most - len(self._fresh)))):
            if prefix in self._groups:
                self._groups[prefix] = self._groups.pop(prefix)
                self.look_up(next(iter(self._groups[prefix])))
        return [prompts[request] for request in waiting]

    def look_up(self, prompt: WaitingPrompt) -> None:
        """Know what is cached of it now, unless this step has no lookups left."""
        if self._left <= 0 or prompt in self._fresh:
            return
        self._left -= 1
        self._fresh.add(prompt)
        self._urgent.pop(prompt, None)
        cached, (end, _) = prompt.request.cached_tokens, prompt.prefix
        mates = self._groups[prompt.prefix]
        if cached == prompt.cached:
            mates[prompt] = mates.pop(prompt)
            return
        self._leave(prompt)
        prompt.cached = cached
        self._join(prompt)
        if cached >= end:
            self._urgent.update(mates)
            return
        for mate in list(mates):
            self._leave(mate)
            mate.cached = min(cached, mate.tokens - 1)
            self._join(mate)

    def starts(self, request: RequestView) -> None:
        """It will compute what its group needs next: that is looked up before others."""
        prompt = self._prompts.get(request)
        if prompt is not None:
            mates = self._groups[prompt.prefix]
            self.forget(request)
            self._urgent.update(mates)

    def forget(self, request: RequestView) -> None:
        """It doesn't wait any more."""
        prompt = self._prompts.pop(request, None)
        if prompt is not None:
            self._leave(prompt)
            self._urgent.pop(prompt, None)

    def _join(self, prompt: WaitingPrompt) -> None:
        prompt.prefix = next_prefix(prompt.request, prompt.cached, self._page_size)
        self._groups.setdefault(prompt.prefix, {})[prompt] = None

    def _leave(self, prompt: WaitingPrompt) -> None:
        group = self._groups[prompt.prefix]
        del group[prompt]
        if not group:
            del self._groups[prompt.prefix]


def next_prefix(request: RequestView, num_tokens: int, page_size: int) -> Prefix:
    """Up to the end of the page that comes after so many tokens."""
    end = (num_tokens // page_size + 1) * page_size
    return end, request.prefix_key(end)
