"""The checks for plugin authors find what breaks the contract."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from hypothesis import Phase, settings

from aioserve import Observer, Refusal
from aioserve.testing import check_admission, check_eviction, check_observer, plugin_checks
from aioserve.testing.examples import quiet_settings


@pytest.mark.parametrize(
    "key",
    [
        lambda use: use.hits,
        lambda use: -use.last_used_tick / 2,
        lambda use: use.created_tick > 7,
        lambda use: float("inf"),
    ],
)
def test_a_good_strategy_passes(key):
    check_eviction(lambda: Keyed(key), max_examples=30)


class Keyed:
    def __init__(self, key) -> None:
        self.key = key


COUNTER = itertools.count()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (lambda use: None, "is None, not a number"),
        (lambda use: str(use.hits), "is '0', not a number"),
        (lambda use: float("nan") if use.hits > 99 else 0, "is nan, not a number"),
        (lambda use: next(COUNTER), "it must depend on the use alone"),
    ],
)
def test_a_bad_strategy_is_found_with_the_use_that_shows_it(key, message):
    with pytest.raises(AssertionError, match=message) as caught:
        check_eviction(lambda: Keyed(key))
    assert "key(PageUse(created_tick=0, " in str(caught.value)


def test_a_strategy_that_raises_is_found():
    with pytest.raises(ZeroDivisionError):
        check_eviction(lambda: Keyed(lambda use: 1 / use.hits))


class Logs(Observer):
    def arrived(self, requests):
        for request in requests:
            logging.getLogger("quiet").debug("%s", request.request_id)

    def step_finished(self, step):
        self.last = step.step


def test_a_good_observer_passes():
    check_observer(Logs, max_examples=30)


class Mean(Observer):
    def step_finished(self, step):
        self.mean = step.computed_tokens / (not step.failed)


class Late(Observer):
    def finished(self, requests: Any):
        self.last = [-request.first_token_seconds for request in requests]


class Waiting(Observer):
    async def arrived(self, requests):
        pass


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (Mean, ZeroDivisionError),
        (Late, TypeError),
        (Waiting, AssertionError),
        (dict, AssertionError),
    ],
)
def test_a_bad_observer_is_found(make, error, monkeypatch: pytest.MonkeyPatch):
    """The first calls that show the fault find it. Most of the time would go to the search for
    smaller ones."""

    def unshrunk(max_examples: int, **others: Any) -> settings:
        return settings(quiet_settings(max_examples, **others), phases=[Phase.generate])

    monkeypatch.setattr(plugin_checks, "quiet_settings", unshrunk)
    with pytest.raises(error):
        check_observer(make)


def count_letters(request: Any) -> Refusal | None:
    return Refusal("too long") if len(request.tenant) > 9 else None


def test_admission_is_asked_about_all_kinds_of_requests():
    check_admission(lambda request: None if request.tenant else Refusal("who are you?"))
    with pytest.raises(AssertionError, match="is False, neither a Refusal nor None"):
        check_admission(lambda request: request.prompt_tokens < 100 and None)
    with pytest.raises(TypeError):
        check_admission(count_letters)
