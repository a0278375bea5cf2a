"""Drafter that does no harm, whatever the one inside it does.

A fault ends drafting for the slots of that call, until they start again. It never ends a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from aioserve.arguments import counted, plain_int
from aioserve.drafting.at_once import AtOnce
from aioserve.drafting.drafter import DraftedSequence, Drafter, TokenIds
from aioserve.isolation import NotAnAnswer, PluginCalls, PluginFault, shown

__all__ = ["GuardedDrafter", "checked_branches", "checked_draft_tokens"]

logger: logging.Logger = logging.getLogger(__name__)

NO_DRAFT_TOKENS: tuple[int, ...] = ()


class GuardedDrafter(AtOnce):
    """Passes calls on to `drafter`, and raises nothing that it raises.

    A valid draft has at most `limit` ids in [0, `vocab_size`). After an exception or an invalid
    draft, a slot has no draft tokens until it starts again; the drafter only hears of its end.
    Faults are counted and logged as those of any plugin. `label` names the drafter in the log;
    None: its class.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, label: str | None = None) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        kind = type(drafter)
        self.is_quick: bool = drafter.is_quick
        self._extends_at_once = kind.extend_all is not Drafter.extend_all
        self._drafts_at_once = kind.draft_all is not Drafter.draft_all
        self._is_asked: dict[int, bool] = {}
        """Maps slots that have started to True while the drafter is asked about them."""
        self._calls = PluginCalls(
            f"drafter {label or kind.__name__}",
            "it is no longer asked about the sequences that it was called for",
            logger,
        )

    @property
    def faults_total(self) -> int:
        """Calls in which the drafter raised or gave an invalid answer."""
        return self._calls.faults_total

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        # A slot that fails to start has not started, and need not end.
        if self._passed_on((), "start", self._drafter.start, slot, _for_reading(sequence)):
            self._is_asked[slot] = True

    def end(self, slot: int) -> None:
        if self._is_asked.pop(slot, None) is not None:
            self._passed_on((), "end", self._drafter.end, slot)

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        asked = [
            (slot, tuple(ids))
            for slot, ids in zip(slots, token_ids, strict=True)
            if self._is_asked.get(slot)
        ]
        if not self._extends_at_once:
            for slot, ids in asked:
                self._passed_on((slot,), "extend", self._drafter.extend, slot, ids)
        elif asked:
            named, ids = zip(*asked, strict=True)
            self._passed_on(named, "extend_all", self._drafter.extend_all, named, ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        found: dict[int, Sequence[int]] = {}
        asked = [
            (slot, limit)
            for slot, limit in zip(slots, limits, strict=True)
            if self._is_asked.get(slot)
        ]
        if asked and self._drafts_at_once:
            self._draft_at_once(asked, found)
        else:
            for slot, limit in asked:
                self._passed_on((slot,), "draft", self._draft_one, slot, limit, found)
        return [found.get(slot, NO_DRAFT_TOKENS) for slot in slots]

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        found: list[list[int]] = []
        if self._is_asked.get(slot):
            self._passed_on((slot,), "branches", self._take_branches, slot, limit, found)
        return found

    def _take_branches(self, slot: int, limit: int, found: list[list[int]]) -> None:
        found += checked_branches(self._drafter.branches(slot, limit), limit, self._vocab_size)

    def _draft_one(self, slot: int, limit: int, found: dict[int, Sequence[int]]) -> None:
        found[slot] = checked_draft_tokens(
            self._drafter.draft(slot, limit), limit, self._vocab_size
        )

    def _draft_at_once(
        self, asked: Sequence[tuple[int, int]], found: dict[int, Sequence[int]]
    ) -> None:
        slots, limits = zip(*asked, strict=True)
        answers: list[object] = []
        if not self._passed_on(slots, "draft_all", self._answers, slots, limits, answers):
            return
        for (slot, limit), answer in zip(asked, answers, strict=True):
            self._passed_on((slot,), "draft_all", self._take, slot, limit, answer, found)

    def _answers(self, slots: Sequence[int], limits: Sequence[int], answers: list[object]) -> None:
        answer = self._drafter.draft_all(slots, limits)
        if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
            raise NotAnAnswer(answer, "which is no sequence")
        answers.extend(islice(answer, len(slots) + 1))
        if len(answers) != len(slots):
            raise NotAnAnswer(answer, f"which has no entry for each of {len(slots)} slots")

    def _take(self, slot: int, limit: int, answer: object, found: dict[int, Sequence[int]]) -> None:
        found[slot] = checked_draft_tokens(answer, limit, self._vocab_size)

    def _passed_on(
        self, slots: Sequence[int], what: str, ask: Callable[..., object], *args: Any
    ) -> bool:
        """Pass a call on and return True if it came back well. Otherwise `slots` get no more draft
        tokens."""
        try:
            self._calls.call(what, ask, *args)
        except PluginFault:
            self._is_asked.update(dict.fromkeys(slots, False))
            return False
        return True


def checked_draft_tokens(answer: object, limit: int, vocab_size: int) -> list[int]:
    """Plain ids of a drafter's answer. Raises `NotAnAnswer` unless it is a sequence of at most
    `limit` ints in [0, `vocab_size`), and anything that its methods raise."""
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
        raise NotAnAnswer(answer, "which is no sequence of token ids")
    draft_tokens: list[int] = []
    for draft_token in islice(answer, limit + 1):
        token_id = draft_token if type(draft_token) is int else plain_int(draft_token)
        if token_id is None or not 0 <= token_id < vocab_size:
            raise NotAnAnswer(answer, f"with {shown(draft_token)}, no id in [0, {vocab_size})")
        draft_tokens.append(token_id)
    if len(draft_tokens) > limit:
        raise NotAnAnswer(answer, f"which is more than {counted(limit, 'draft token')}")
    return draft_tokens


def checked_branches(answer: object, limit: int, vocab_size: int) -> list[list[int]]:
    """Plain ids of branches. Raises `NotAnAnswer` unless they are a sequence of nonempty drafts
    valid for `checked_draft_tokens`. Together they have at most `limit` ids, counting one more for
    each branch."""
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
        raise NotAnAnswer(answer, "which is no sequence of branches")
    branches: list[list[int]] = []
    left = limit
    for branch in islice(answer, limit):
        ids = checked_draft_tokens(branch, limit - 1, vocab_size)
        if not ids:
            raise NotAnAnswer(answer, "with a branch of no draft token")
        left -= 1 + len(ids)
        if left < 0:
            raise NotAnAnswer(answer, f"with more ids, and one for each branch, than {limit}")
        branches.append(ids)
    return branches


def _for_reading(sequence: DraftedSequence) -> DraftedSequence:
    """Copy of a sequence whose ids can't be written by mistake: others read them, too."""
    return msgspec.structs.replace(
        sequence,
        known_ids=_read_only(sequence.known_ids),
        predicted_ids=_read_only(sequence.predicted_ids),
    )


def _read_only(token_ids: TokenIds) -> TokenIds:
    view = token_ids.view()
    view.flags.writeable = False
    return view
