"""Scheduling hints: one declaration that callers, policies and plugins share."""

from __future__ import annotations

from typing import get_type_hints

import msgspec
import pytest

from aioserve import InvalidRequestError, PromptOnlyOptions, RequestInfo, RequestView, StreamOptions
from aioserve.hints import HintOptions, SchedulingHints, checked_hints

NAMES = set(SchedulingHints.__struct_fields__)
GIVEN = {
    "tenant": "acme",
    "priority": -3,
    "ttft_target_seconds": 0.5,
    "tpot_target_seconds": 0.05,
    "deadline_seconds": 60.0,
    "metadata": {"step": "plan"},
    "session_id": "s",
    "predicted_output_tokens": 7,
}


def test_each_hint_is_an_option_of_streams_and_an_attribute_of_views_and_infos() -> None:
    assert get_type_hints(HintOptions).keys() == NAMES
    assert get_type_hints(StreamOptions).keys() > NAMES
    assert get_type_hints(PromptOnlyOptions).keys() - {"request_id", "cache_salt"} < NAMES
    assert all(hasattr(seen, name) for seen in (RequestView, RequestInfo) for name in NAMES)


def test_hints_are_taken_as_they_are_given() -> None:
    assert GIVEN.keys() == NAMES
    assert msgspec.structs.asdict(checked_hints(GIVEN)) == GIVEN
    assert checked_hints({}) == SchedulingHints()


@pytest.mark.parametrize("hint", sorted(NAMES))
def test_each_hint_is_checked_under_its_own_name(hint: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        checked_hints({hint: object()})
    assert raised.value.argument == hint
