"""Source files of a new drafter's project; see `_plugin_project`."""

from __future__ import annotations

__all__ = ["DRAFTER", "README", "TESTS"]

DRAFTER = '''\
"""Draft tokens by the rule that a sequence goes on as it did before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioserve import ConfigError, DraftedSequence, Drafter, DrafterSpec, hookimpl


class $name(Drafter):
    """Drafts what followed the last `width` tokens of a sequence where they stood before.

    An index says where that is, so that a draft takes as long behind a long prompt as behind a
    short one. Nothing is learnt from one sequence for another, so namespaces need no care.
    """

    def __init__(self, *, width: int = 2) -> None:
        if width < 1:
            raise ConfigError(f"width must be at least 1, got {width}")
        self.width = width
        self._ids: dict[int, list[int]] = {}
        self._places: dict[int, dict[tuple[int, ...], int]] = {}
        """For each slot: where what followed some tokens begins."""

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._ids[slot] = []
        self._places[slot] = {}
        self._append(slot, sequence.predicted_ids.tolist())
        self._append(slot, sequence.known_ids.tolist())

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._append(slot, token_ids)

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        ids = self._ids[slot]
        place = self._places[slot].get(tuple(ids[-self.width :]))
        return [] if place is None else ids[place : place + limit]

    def end(self, slot: int) -> None:
        del self._ids[slot], self._places[slot]

    def _append(self, slot: int, token_ids: Iterable[int]) -> None:
        ids, places = self._ids[slot], self._places[slot]
        for token_id in token_ids:
            if len(ids) >= self.width:
                places[tuple(ids[-self.width :])] = len(ids)
            ids.append(token_id)


@hookimpl
def aioserve_drafters() -> list[DrafterSpec]:
    return [DrafterSpec("$module", $name, "what followed the last tokens before", api=1)]
'''

TESTS = '''\
"""The drafter keeps its contract, drafts what it is for, and changes no token."""

from __future__ import annotations

import numpy as np
import pytest
from aioserve import ConfigError, DraftedSequence, Engine, SamplingParams, Speculation
from aioserve.testing import FakeModel, check_drafter, expected_tokens, run_simulated
from $module import $name


def test_it_keeps_the_contract() -> None:
    check_drafter($name)


@pytest.mark.parametrize("width", [1, 3])
def test_it_keeps_the_contract_with_other_options(width) -> None:
    check_drafter(lambda: $name(width=width), max_examples=50)


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="width must be at least 1, got 0"):
        $name(width=0)


def test_it_drafts_what_followed_before() -> None:
    drafter = $name()
    known_ids = np.array([5, 6, 7, 8, 9, 5], np.int32)
    drafter.start(0, DraftedSequence(known_ids=known_ids, prompt_tokens=6))
    drafter.extend(0, [6])
    assert drafter.draft(0, 3) == [7, 8, 9]
    drafter.extend(0, [1])
    assert drafter.draft(0, 3) == []


def test_an_engine_has_the_same_tokens_with_it() -> None:
    async def serve() -> None:
        speculation = Speculation(drafter="$module:width=1", max_tokens=4)
        async with Engine(FakeModel(), speculation=speculation) as engine:
            completion = await engine.generate([1, 2, 1], SamplingParams(max_tokens=40, seed=3))
            assert list(completion.token_ids) == expected_tokens([1, 2, 1], 40, seed=3)
            assert engine.stats().drafter_faults_total == 0

    run_simulated(serve)
'''

README = """\
# $distribution

A drafter for aioserve: it expects that a sequence goes on as
it did where its last tokens stood before.

    pip install --editable '.[test]'
    aioserve plugins                    # it is listed
    aioserve plugins check $module      # also says how long a draft takes
    pytest

Draft tokens change no token, and how fast they come depends on how many are right:

    aioserve bench latency pyhelp --speculation $module:width=3
    aioserve bench latency pyhelp

Serve with it:

    speculation = Speculation(drafter="$module:width=3", max_tokens=8)
    async with Engine("path/to/model", speculation=speculation) as engine:
        ...

| option | default | |
| --- | --- | --- |
| `width` | 2 | tokens that must have stood there before |
"""
