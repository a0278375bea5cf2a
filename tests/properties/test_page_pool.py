"""Native page pool compared with a plain model of it, in any order of calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aioserve.errors import InvariantError
from aioserve.kv.page_pool import NO_STEP, OutOfPagesError, PagePool, PageState
from tests.tiers import examples

mostly = st.sampled_from([True, True, True, True, False])


def int32(pages: list[int]) -> np.ndarray:
    return np.array(pages, np.int32)


@dataclass
class ModelPool:
    """Promises of the pool, in lists and dicts: one entry per page."""

    num_pages: int
    done: int = NO_STEP
    counts: dict[int, int] = field(default_factory=dict)
    last_steps: dict[int, int] = field(default_factory=dict)
    fenced: list[int] = field(default_factory=list)
    """Fenced pages, in the order in which they were given back."""
    free: list[int] = field(default_factory=list)
    """Free pages. The last one is reused first."""
    group_pages: dict[int, list[int]] = field(default_factory=dict)
    idle: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Owners whose group pages are idle, with the time and the order in which they became so."""
    last_idle: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Last entry of each owner in `idle`."""
    now: int = 0
    ticks: int = 0

    def __post_init__(self) -> None:
        self.free = list(reversed(range(self.num_pages)))

    def acquire(self, count: int) -> list[int]:
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.counts[page] = 1
        return pages

    def owner_of(self, page: int) -> int | None:
        return next((o for o, pages in self.group_pages.items() if page in pages), None)

    def others(self, page: int) -> int:
        """References without that of the page's owner."""
        return self.counts.get(page, 0) - (self.owner_of(page) is not None)

    def can_drop(self, pages: list[int]) -> bool:
        return all(pages.count(page) <= self.others(page) for page in pages)

    def release(self, pages: list[int], last_step: int, *, is_used: bool = True) -> None:
        for page in pages:
            self.counts[page] -= 1
        for page in reversed(pages):
            self.look_at_the_owner_of(page, is_used=is_used)
            self.let_go(page, last_step)

    def let_go(self, page: int, last_step: int) -> None:
        self.last_steps[page] = max(self.last_steps.get(page, NO_STEP), last_step)
        if self.counts.get(page) != 0:
            return
        if page in self.group_pages:
            self.detach(page, self.last_steps[page])
        del self.counts[page]
        (self.free if self.last_steps[page] <= self.done else self.fenced).append(page)

    def look_at_the_owner_of(self, page: int, *, is_used: bool = True) -> None:
        owner = self.owner_of(page)
        if owner is None:
            return
        was_idle = self.idle.pop(owner, None)
        if all(self.counts[one] == 1 for one in self.group_pages[owner]):
            if was_idle is None and is_used:
                self.ticks += 1
                self.last_idle[owner] = (self.now, self.ticks)
            self.idle[owner] = self.last_idle[owner]

    def attach(self, owner: int, pages: list[int]) -> None:
        for page in pages:
            self.counts[page] += 1
        self.group_pages[owner] = pages
        self.ticks += 1
        self.last_idle[owner] = (self.now, self.ticks)

    def detach(self, owner: int, last_step: int) -> None:
        self.idle.pop(owner, None)
        for page in reversed(self.group_pages.pop(owner)):
            self.counts[page] -= 1
            self.let_go(page, last_step)

    def complete(self, step: int) -> None:
        self.done = step
        for page in sorted(self.fenced, key=self.last_steps.__getitem__):  # stable
            if self.last_steps[page] <= step:
                self.free.append(page)
                self.fenced.remove(page)

    def state(self, page: int) -> PageState:
        if page in self.counts:
            return PageState.HELD
        return PageState.FENCED if page in self.fenced else PageState.FREE


class PagePoolMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(0, 5) | st.integers(0, 9),
        page_size=st.sampled_from([1, 2, 16, 64]),
        num_group_pages=st.sampled_from([0, 1, 2]),
    )
    def start(self, num_pages: int, page_size: int, num_group_pages: int) -> None:
        self.pool = PagePool(num_pages, page_size, num_group_pages)
        self.model = ModelPool(num_pages)

    def some_pages(self, data: st.DataObject, *, held_only: bool) -> list[int]:
        if held_only:
            choices = sorted(self.model.counts)
        else:
            choices = list(range(-1, self.model.num_pages + 1))
        if not choices:
            return []
        return data.draw(st.lists(st.sampled_from(choices), max_size=4))

    @rule(count=st.integers(-1, 6))
    def acquire(self, count: int) -> None:
        if count < 0:
            with pytest.raises(ValueError, match="count must be at least 0, got -1"):
                self.pool.acquire(count)
        elif count > len(self.model.free):
            with pytest.raises(OutOfPagesError) as caught:
                self.pool.acquire(count)
            assert caught.value.requested == count
            assert caught.value.free == len(self.model.free)
            assert caught.value.fenced == len(self.model.fenced)
        else:
            pages = self.pool.acquire(count)
            assert pages.dtype == np.int32
            assert pages.tolist() == self.model.acquire(count)

    @rule(data=st.data(), held_only=mostly)
    def retain(self, data: st.DataObject, held_only: bool) -> None:
        pages = self.some_pages(data, held_only=held_only)
        if all(page in self.model.counts for page in pages):
            self.pool.retain(int32(pages))
            for page in pages:
                self.model.counts[page] += 1
                if (owner := self.model.owner_of(page)) is not None:
                    self.model.idle.pop(owner, None)
        else:
            with pytest.raises(InvariantError, match=r"retain: page -?[0-9]+ is not"):
                self.pool.retain(int32(pages))

    @rule(data=st.data(), held_only=mostly, ahead=st.integers(-2, 4))
    def release(self, data: st.DataObject, held_only: bool, ahead: int) -> None:
        pages = self.some_pages(data, held_only=held_only)
        last_step = self.model.done + ahead
        if self.model.can_drop(pages):
            self.pool.release(int32(pages), last_step)
            self.model.release(pages, last_step)
        else:
            with pytest.raises(InvariantError, match=r"release: page -?[0-9]+ is "):
                self.pool.release(int32(pages), last_step)

    @rule(data=st.data(), held_only=mostly)
    def unretain(self, data: st.DataObject, held_only: bool) -> None:
        pages = self.some_pages(data, held_only=held_only)
        if self.model.can_drop(pages):
            self.pool.unretain(int32(pages))
            self.model.release(pages, NO_STEP, is_used=False)
        else:
            with pytest.raises(InvariantError, match=r"unretain: page -?[0-9]+ is "):
                self.pool.unretain(int32(pages))

    @precondition(lambda self: self.pool.num_group_pages)
    @rule(data=st.data(), distinct=mostly)
    def attach(self, data: st.DataObject, distinct: bool) -> None:
        model, count = self.model, self.pool.num_group_pages
        choices = sorted(model.counts) if distinct else list(range(-1, model.num_pages + 1))
        if len(choices) <= count:
            return
        if distinct:
            owner, *pages = data.draw(st.permutations(choices))[: count + 1]
        else:
            owner, *pages = data.draw(st.lists(st.sampled_from(choices), min_size=1, max_size=4))
        held = all(page in model.counts for page in (owner, *pages))
        related = any(
            page in model.group_pages or model.owner_of(page) is not None
            for page in (owner, *pages)
        )
        if len(pages) == count and held and not related and len({owner, *pages}) == count + 1:
            self.pool.attach(owner, int32(pages))
            model.attach(owner, pages)
        else:
            with pytest.raises(InvariantError, match="attach: page "):
                self.pool.attach(owner, int32(pages))

    @precondition(lambda self: self.model.group_pages)
    @rule(data=st.data(), ahead=st.integers(-2, 4))
    def detach(self, data: st.DataObject, ahead: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model.group_pages)))
        self.pool.detach(owner, self.model.done + ahead)
        self.model.detach(owner, self.model.done + ahead)

    @precondition(lambda self: self.model.num_pages)
    @rule(data=st.data())
    def a_page_without_group_pages_loses_none(self, data: st.DataObject) -> None:
        page = data.draw(st.integers(0, self.model.num_pages - 1))
        if page not in self.model.group_pages:
            with pytest.raises(InvariantError, match=f"detach: page {page} has no group pages"):
                self.pool.detach(page, NO_STEP)

    @rule(ticks=st.integers(0, 2))
    def go_on(self, ticks: int) -> None:
        self.model.now += ticks
        self.pool.set_clock(self.model.now)

    @rule(ahead=st.integers(-1, 3))
    def complete(self, ahead: int) -> None:
        step = self.model.done + ahead
        if ahead < 0:
            with pytest.raises(InvariantError, match=f"complete: step {step} comes after"):
                self.pool.complete(step)
        else:
            self.pool.complete(step)
            self.model.complete(step)

    @invariant()
    def the_pool_equals_its_model(self) -> None:
        self.pool.sanity_check()
        pages = range(self.model.num_pages)
        assert [self.pool.state(page) for page in pages] == [self.model.state(p) for p in pages]
        counts = [self.model.counts.get(page, 0) for page in pages]
        assert self.pool.ref_counts().tolist() == counts
        assert [self.pool.ref_count(page) for page in pages] == counts
        assert self.pool.num_free == len(self.model.free)
        assert self.pool.num_fenced == len(self.model.fenced)
        assert self.pool.num_held == len(self.model.counts)
        assert self.pool.done_step == self.model.done
        none = [-1] * self.pool.num_group_pages
        assert self.pool.group_pages(int32(list(pages))).tolist() == [
            self.model.group_pages.get(page, none) for page in pages
        ]
        idle = sorted(self.model.idle.items(), key=lambda item: item[1])
        assert self.pool.idle_owners() == [(owner, since) for owner, (since, _) in idle]
        assert self.pool.num_idle == len(idle)
        unshared = sum(self.model.others(page) == 1 for page in pages)
        assert self.pool.num_unshared(int32(list(pages))) == unshared


TestPagePoolEqualsItsModel = PagePoolMachine.TestCase
TestPagePoolEqualsItsModel.settings = settings(max_examples=examples(150), stateful_step_count=40)
