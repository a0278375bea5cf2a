"""Check of a drafter's contract on random sequences.

Several sequences at a time start, grow and end, in slots that are reused. They have few different
tokens, so that something can be predicted, and belong to two namespaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from aioserve.drafting.drafter import DraftedSequence, Drafter, TokenIds
from aioserve.drafting.guarded import checked_branches, checked_draft_tokens
from aioserve.errors import ConfigError
from aioserve.isolation import NotAnAnswer, shown
from aioserve.plugins import check_drafter_object
from aioserve.testing.examples import check_arguments, smallest_failure

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["DraftTimes", "check_drafter"]

SLOTS = 3
NAMESPACES = (b"", b"other")
NUM_IDS = 4
"""Different tokens in a workload, so that most come again."""
MAX_LIMIT = 8
MAX_SMALLER = 60
"""Smaller workloads that are tried after a failure, for one that is easier to read."""
MIN_EVENTS, MAX_EVENTS = 10, 30
NO_VOCAB_SIZE = 2**31
"""Stand-in for the model's vocabulary size, which a drafter isn't told: int32 has no larger ids."""
TIMED_TOKENS = 32_768
TIMED_IDS = 2_000
TIMED_RUN_TOKENS = 32
TIMED_STEPS = 100


class DraftTimes(msgspec.Struct, frozen=True):
    """Times of a drafter for a sequence with a prompt of 32,768 tokens, on this machine."""

    start_seconds: float
    step_seconds: float
    """Mean time to take in the token of a step and to draft the tokens after it."""


def check_drafter(make_drafter: Callable[[], Drafter], *, max_examples: int = 100) -> DraftTimes:
    """Raise `AssertionError`, with the fewest calls that show it, unless the drafter keeps its
    contract.

    - It raises nothing, and returns token ids, no more than it may, in branches too.
    - A new object that hears the same returns the same.
    - It drafts for a namespace as if there were no other, in whatever slots.
    - It drafts for all slots at once what it drafts for one after the other.
    - It drafts the same if it is asked twice, if it says that it `is_quick`.

    `make_drafter` makes a new drafter with each call: a class, or a function for one with options.
    The author judges the returned times. Needs hypothesis. Raises `ConfigError` for invalid
    arguments.
    """
    check_arguments("make_drafter", make_drafter, max_examples)
    drafter = make_drafter()
    try:
        check_drafter_object(drafter)
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    if make_drafter() is drafter:
        raise AssertionError("make_drafter must make a new drafter with each call")

    def check(events: list[Event]) -> None:
        groups = list(_calls_of(events))
        first_drafts = _replay(make_drafter(), groups)
        again = _replay(make_drafter(), groups)
        _compare(groups, first_drafts, again, "a new one that hears the same")
        at_once = _replay(make_drafter(), groups, at_once=True)
        _compare(groups, first_drafts, at_once, "one that is asked about all slots at once")
        if drafter.is_quick:
            twice = _replay(make_drafter(), groups, times=2)
            _compare(groups, first_drafts, twice, "one that is asked twice")
        for namespace in NAMESPACES:
            own = [_alone(group, namespace) for group in groups]
            alone = _replay(make_drafter(), own)
            told = f"one that hears of namespace {namespace!r} alone, in other slots"
            _compare(groups, first_drafts, alone, told)

    failed = smallest_failure(
        _workloads(), check, max_examples, max_smaller=MAX_SMALLER, size_of=_num_calls
    )
    if failed is not None:
        error = failed[1]
        raise AssertionError(str(error)) from error.__cause__
    return _times(make_drafter())


# -- workloads


class Growth(msgspec.Struct, frozen=True):
    """Draft for a sequence, which then has these next tokens."""

    limit: int
    token_ids: tuple[int, ...]


class Start(msgspec.Struct, frozen=True):
    """Start of a sequence, if a slot is free."""

    namespace: bytes
    prompt_ids: tuple[int, ...]
    predicted_ids: tuple[int, ...]
    first_id: int


class Step(msgspec.Struct, frozen=True):
    """One step: entry `i` is for the sequence in slot `i`, if there is one; None: it pauses."""

    growths: tuple[Growth | None, ...]


class End(msgspec.Struct, frozen=True):
    """End of the sequence in a slot, if there is one; or its preemption, after which it starts
    again.
    """

    slot: int
    starts_again: bool


Event = Start | Step | End


def _workloads() -> SearchStrategy[list[Event]]:
    from hypothesis import strategies as st

    ids = st.integers(0, NUM_IDS - 1)

    def several(least: int, most: int) -> SearchStrategy[tuple[int, ...]]:
        return st.lists(ids, min_size=least, max_size=most).map(tuple)

    growth = st.builds(Growth, st.integers(1, MAX_LIMIT), several(1, MAX_LIMIT + 1))
    start = st.builds(Start, st.sampled_from(NAMESPACES), several(1, 24), several(0, 12), ids)
    step = st.builds(Step, st.tuples(*[growth | st.none()] * SLOTS))
    end = st.builds(End, st.integers(0, SLOTS - 1), st.booleans())
    event = st.one_of(end, start, start, step, step)  # the first is the simplest
    return st.lists(event, min_size=MIN_EVENTS, max_size=MAX_EVENTS)


# -- calls of a drafter


class Call(msgspec.Struct, frozen=True):
    """Call of one of the methods for one slot."""

    method: Literal["start", "extend", "draft", "end"]
    slot: int
    namespace: bytes
    argument: Any = None
    """Argument beside the slot."""

    def __str__(self) -> str:
        told: Any = "" if self.argument is None else f", {self.argument}"
        if isinstance(self.argument, DraftedSequence):
            known, predicted = self.argument.known_ids, self.argument.predicted_ids
            told = f", known_ids={known.tolist()}, namespace={self.namespace!r}"
            told += f", predicted_ids={predicted.tolist()}" if len(predicted) else ""
        return f"{self.method}({self.slot}{told})"


Group = list[Call]
"""Calls of one method for different slots, which may be one call for all."""


class _Sequence:
    def __init__(self, slot: int, start: Start) -> None:
        self.slot = slot
        self.start = start
        self.known_ids: list[int] = list(start.prompt_ids)

    def calls_to_start(self, first_id: int) -> Iterator[Group]:
        start = self.start
        drafted = DraftedSequence(
            known_ids=_ids(self.known_ids),
            prompt_tokens=len(start.prompt_ids),
            namespace=start.namespace,
            predicted_ids=_ids(start.predicted_ids),
        )
        yield [Call("start", self.slot, start.namespace, drafted)]
        yield [self.extended((first_id,))]

    def extended(self, token_ids: tuple[int, ...]) -> Call:
        self.known_ids.extend(token_ids)
        return Call("extend", self.slot, self.start.namespace, token_ids)


def _calls_of(events: Sequence[Event]) -> Iterator[Group]:
    live: dict[int, _Sequence] = {}
    for event in events:
        if isinstance(event, Start):
            free = next((slot for slot in range(SLOTS) if slot not in live), None)
            if free is not None:
                live[free] = _Sequence(free, event)
                yield from live[free].calls_to_start(event.first_id)
        elif isinstance(event, Step):
            grown = [
                (live[slot], growth)
                for slot, growth in enumerate(event.growths)
                if growth is not None and slot in live
            ]
            yield [Call("draft", one.slot, one.start.namespace, it.limit) for one, it in grown]
            yield [one.extended(it.token_ids) for one, it in grown]
        elif (sequence := live.pop(event.slot, None)) is not None:
            yield [Call("end", sequence.slot, sequence.start.namespace)]
            if event.starts_again:
                live[event.slot] = sequence
                yield from sequence.calls_to_start(sequence.known_ids[-1])


def _num_calls(events: Sequence[Event]) -> int:
    return sum([len(group) for group in _calls_of(events)])


def _alone(group: Group, namespace: bytes) -> Group:
    """Return the calls about one namespace, in other slots."""
    return [
        msgspec.structs.replace(call, slot=SLOTS + call.slot)
        for call in group
        if call.namespace == namespace
    ]


def _ids(token_ids: Sequence[int]) -> TokenIds:
    ids = np.array(token_ids, np.int32)
    ids.flags.writeable = False
    return ids


# -- results

Drafts = dict[tuple[int, int], list[Any]]
"""Draft tokens by the number of their group and their slot, with a list for each branch after
them. Slots are counted from 0 wherever they begin.
"""


def _replay(
    drafter: Drafter, groups: Sequence[Group], *, at_once: bool = False, times: int = 1
) -> Drafts:
    """Return the draft tokens of all calls. Each draft is asked for `times` times, and the last
    counts.
    """
    drafts: Drafts = {}
    for number, group in enumerate(groups):
        whole = at_once and group and group[0].method in ("extend", "draft")
        for calls in [group] if whole else [[call] for call in group]:
            try:
                for _ in range(times if calls[0].method == "draft" else 1):
                    answers = _answers(drafter, calls, at_once=bool(whole))
                for call, answer in zip(calls, answers, strict=True):
                    if call.method == "draft":
                        found = checked_draft_tokens(answer, call.argument, NO_VOCAB_SIZE)
                        branches = _branches(drafter, call.slot, call.argument - len(found))
                        drafts[number, call.slot % SLOTS] = [*found, *branches]
            except KeyboardInterrupt:
                raise
            except NotAnAnswer as error:
                answer, why = error.args
                raise _failure(groups[: number + 1], f"answered {shown(answer)}, {why}") from None
            except BaseException as error:
                raise _failure(groups[: number + 1], f"raised {shown(error)}") from error
    return drafts


def _branches(drafter: Drafter, slot: int, left: int) -> list[list[int]]:
    if left < 2:
        return []
    return checked_branches(drafter.branches(slot, left), left, NO_VOCAB_SIZE)


def _answers(drafter: Drafter, calls: Sequence[Call], *, at_once: bool) -> Sequence[object]:
    """Return an answer to each of some calls, which are one call if `at_once`."""
    if not at_once:
        [call] = calls
        method = getattr(drafter, call.method)
        return [method(call.slot) if call.argument is None else method(call.slot, call.argument)]
    slots, arguments = [call.slot for call in calls], [call.argument for call in calls]
    if calls[0].method == "extend":
        drafter.extend_all(slots, arguments)
        return [None] * len(calls)
    answers = drafter.draft_all(slots, arguments)
    if not isinstance(answers, Sequence) or len(answers) != len(calls):
        raise NotAnAnswer(answers, f"which is no sequence with an entry for each of slots {slots}")
    return answers


def _compare(groups: Sequence[Group], first_drafts: Drafts, others: Drafts, who: str) -> None:
    """Raise if `others`, drafted in these calls by another object, differ from `first_drafts`."""
    for (number, slot), found in others.items():
        if found != first_drafts[number, slot]:
            raise _failure(
                groups[: number + 1],
                f"answered {found}, and {first_drafts[number, slot]} elsewhere: the first is {who}",
            )


def _failure(groups: Sequence[Group], what: str) -> AssertionError:
    calls = [str(call) for group in groups for call in group]
    return AssertionError("\n  ".join([f"the last of these calls {what}:", *calls]))


def _times(drafter: Drafter) -> DraftTimes:
    """Time a drafter on runs of tokens that come again and again, as in a file that is edited."""
    noise = np.random.default_rng(0)
    runs = noise.integers(0, TIMED_IDS, (TIMED_TOKENS // TIMED_RUN_TOKENS // 4, TIMED_RUN_TOKENS))
    order = noise.integers(0, len(runs), TIMED_TOKENS // TIMED_RUN_TOKENS + TIMED_STEPS)
    token_ids = runs[order].reshape(-1).astype(np.int32)
    known_ids, rest = token_ids[:TIMED_TOKENS], token_ids[TIMED_TOKENS:].tolist()
    drafted = DraftedSequence(known_ids=known_ids, prompt_tokens=TIMED_TOKENS)
    began = time.perf_counter()
    drafter.start(0, drafted)
    started = time.perf_counter()
    for token_id in rest[:TIMED_STEPS]:
        drafter.extend(0, [token_id])
        drafter.draft(0, MAX_LIMIT)
    ended = time.perf_counter()
    drafter.end(0)
    return DraftTimes(started - began, (ended - started) / TIMED_STEPS)
