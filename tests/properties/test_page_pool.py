"""The native page pool against a plain model of it, through any order of calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aioserve.errors import InvariantError
from aioserve.kv.page_pool import NO_STEP, OutOfPagesError, PagePool, PageState

mostly = st.sampled_from([True, True, True, True, False])


def int32(pages: list[int]) -> np.ndarray:
    return np.array(pages, np.int32)


@dataclass
class ModelPool:
    """What the pool promises, in lists and dicts: one entry per page."""

    num_pages: int
    done: int = NO_STEP
    counts: dict[int, int] = field(default_factory=dict)
    last_steps: dict[int, int] = field(default_factory=dict)
    fenced: list[int] = field(default_factory=list)
    """In the order in which the pages were given back."""
    free: list[int] = field(default_factory=list)
    """The end is reused first."""

    def __post_init__(self) -> None:
        self.free = list(reversed(range(self.num_pages)))

    def acquire(self, count: int) -> list[int]:
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.counts[page] = 1
        return pages

    def can_drop(self, pages: list[int]) -> bool:
        return all(pages.count(page) <= self.counts.get(page, 0) for page in pages)

    def release(self, pages: list[int], last_step: int) -> None:
        for page in reversed(pages):
            self.last_steps[page] = max(self.last_steps.get(page, NO_STEP), last_step)
        for page in pages:
            self.counts[page] -= 1
        for page in reversed(pages):
            if self.counts.get(page) == 0:
                del self.counts[page]
                (self.free if self.last_steps[page] <= self.done else self.fenced).append(page)

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
    @initialize(num_pages=st.integers(0, 5), page_size=st.sampled_from([1, 2, 16, 64]))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
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


TestPagePoolEqualsItsModel = PagePoolMachine.TestCase
TestPagePoolEqualsItsModel.settings = settings(max_examples=150, stateful_step_count=40)
