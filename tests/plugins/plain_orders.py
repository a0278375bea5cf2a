"""Orders of bundled policies by definition: all waiting requests are looked at anew in each step.

What the policies keep from step to step must make no difference to this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from aioserve import RequestView, SchedulerView
from aioserve_plugins._waiting_prompts import Prefix, next_prefix

Rank = tuple[float, ...]


class PlainPrompt:
    def __init__(self, request: RequestView) -> None:
        self.request = request
        self.index: int = request.arrival_index
        self.arrived: int = request.arrival_processed_tokens
        self.tokens: int = request.prompt_tokens + request.generated_tokens
        self.cached: int = 0
        self.prefix: Prefix = (0, b"")


class PlainLookups:
    """`WaitingPrompts` in plain words, with lists that are searched."""

    def __init__(self, lookups: int) -> None:
        self.lookups = lookups
        self.left = 0
        self.page_size = 1
        self.prompts: dict[RequestView, PlainPrompt] = {}
        self.fresh: list[PlainPrompt] = []
        self.urgent: list[PlainPrompt] = []
        self.groups: dict[Prefix, list[PlainPrompt]] = {}

    def begin(self, waiting: Sequence[RequestView], page_size: int) -> list[PlainPrompt]:
        self.page_size = page_size
        for request in [one for one in self.prompts if one not in waiting]:
            self.forget(request)
        for request in waiting:
            if request not in self.prompts:
                prompt = self.prompts[request] = PlainPrompt(request)
                self.join(prompt)
                self.urgent.append(prompt)
        self.fresh, self.left = [], self.lookups
        most = self.lookups - self.lookups // 4
        for prompt in self.urgent[:most]:
            self.look_up(prompt)
        for prefix in list(islice(self.groups, max(0, most - len(self.fresh)))):
            if prefix in self.groups:
                self.groups[prefix] = self.groups.pop(prefix)
                self.look_up(self.groups[prefix][0])
        return [self.prompts[request] for request in waiting]

    def look_up(self, prompt: PlainPrompt) -> None:
        if self.left <= 0 or prompt in self.fresh:
            return
        self.left -= 1
        self.fresh.append(prompt)
        if prompt in self.urgent:
            self.urgent.remove(prompt)
        cached, (end, _) = prompt.request.cached_tokens, prompt.prefix
        mates = self.groups[prompt.prefix]
        if cached == prompt.cached:
            mates.remove(prompt)
            mates.append(prompt)
            return
        self.leave(prompt)
        prompt.cached = cached
        self.join(prompt)
        if cached >= end:
            self.alarm(mates)
            return
        for mate in list(mates):
            self.leave(mate)
            mate.cached = min(cached, mate.tokens - 1)
            self.join(mate)

    def starts(self, request: RequestView) -> None:
        if request in self.prompts:
            mates = self.groups[self.prompts[request].prefix]
            self.forget(request)
            self.alarm(mates)

    def alarm(self, mates: list[PlainPrompt]) -> None:
        self.urgent += [mate for mate in mates if mate not in self.urgent]

    def forget(self, request: RequestView) -> None:
        prompt = self.prompts.pop(request, None)
        if prompt is not None:
            self.leave(prompt)
            self.urgent = [one for one in self.urgent if one is not prompt]

    def join(self, prompt: PlainPrompt) -> None:
        prompt.prefix = next_prefix(prompt.request, prompt.cached, self.page_size)
        self.groups.setdefault(prompt.prefix, []).append(prompt)

    def leave(self, prompt: PlainPrompt) -> None:
        self.groups[prompt.prefix].remove(prompt)
        if not self.groups[prompt.prefix]:
            del self.groups[prompt.prefix]


class PlainOrder:
    """All prompts by their ranks at the beginning of the step. Each is looked up in its turn, and
    if its rank is greater then, it gets a later turn."""

    def __init__(self, lookups: int) -> None:
        self.lookups = PlainLookups(lookups)

    def rank(self, prompt: PlainPrompt, now: int) -> Rank:
        raise NotImplementedError

    def in_turn(
        self, waiting: Sequence[RequestView], view: SchedulerView
    ) -> Iterator[tuple[Rank, PlainPrompt]]:
        now = view.processed_tokens
        prompts = self.lookups.begin(waiting, view.page_size)
        ranked = [(self.rank(prompt, now), prompt) for prompt in prompts]
        while ranked:
            first = min(ranked, key=lambda entry: entry[0])
            ranked.remove(first)
            self.lookups.look_up(first[1])
            rank = self.rank(first[1], now)
            if rank > first[0]:
                ranked.append((rank, first[1]))
            else:
                yield rank, first[1]


class PlainShortestFirst(PlainOrder):
    def __init__(self, patience: float, lookups: int) -> None:
        super().__init__(lookups)
        self.patience = patience

    def rank(self, prompt: PlainPrompt, now: int) -> Rank:
        owed = self.patience * (prompt.tokens - prompt.cached) + prompt.arrived - now
        return max(0.0, owed), prompt.index

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        for _, prompt in self.in_turn(waiting, view):
            yield prompt.request


class PlainCacheAware(PlainOrder):
    def __init__(self, patience: float, lookups: int) -> None:
        super().__init__(lookups)
        self.patience = patience

    def rank(self, prompt: PlainPrompt, now: int) -> Rank:
        waited = now - prompt.arrived
        if waited >= self.patience * prompt.tokens:
            return -math.inf, 0, prompt.index
        ratio = (prompt.cached + waited / self.patience) / (prompt.tokens - prompt.cached)
        return -ratio, -prompt.cached, prompt.index

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        computed: set[Prefix] = set()
        deferred: list[RequestView] = []
        for rank, prompt in self.in_turn(waiting, view):
            begins_alike = prompt.prefix in computed and prompt.prefix[0] < prompt.tokens
            if begins_alike and rank[0] > -math.inf:
                deferred.append(prompt.request)
            else:
                computed.add(prompt.prefix)
                yield prompt.request
        yield from deferred


class PlainPriority:
    def __init__(self, patience_tokens: int) -> None:
        self.patience_tokens = patience_tokens

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        def rank(request: RequestView) -> tuple[bool, int]:
            waited = view.processed_tokens - request.arrival_processed_tokens
            is_overdue = waited >= self.patience_tokens
            return not is_overdue, 0 if is_overdue else request.priority

        yield from sorted(waiting, key=rank)
