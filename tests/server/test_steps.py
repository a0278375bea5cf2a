"""The recorder's state against a plain model, and traces made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import FinishReason, RequestInfo, RequestSummary, StepInfo, StepPart
from aioserve.server.step_log.recorder import (
    Arrived,
    Ended,
    Entry,
    Stepped,
    StepRecorder,
    num_parts,
)
from aioserve.server.step_log.trace import TRACE_BEGIN, TRACE_END, Tracer, encoded
from tests.tiers import examples

IDS = ("a", "b", "c")


def info(request_id: str, now: float, **more: Any) -> RequestInfo:
    return RequestInfo(
        request_id=request_id,
        tenant=more.get("tenant"),
        prompt_tokens=8,
        max_tokens=16,
        num_samples=2,
        arrival_seconds=now,
    )


def summary(request_id: str, arrival: float, now: float) -> RequestSummary:
    reason = FinishReason.LENGTH
    return RequestSummary(
        request_id, None, reason, None, 8, 3, None, now - arrival, arrival_seconds=arrival
    )


def step(number: int, now: float, parts: Any = (), preempted: Any = ()) -> StepInfo:
    return StepInfo(
        step=number,
        begin_seconds=now - 0.75,
        end_seconds=now,
        num_sequences=len(parts),
        computed_tokens=0,
        num_preempted=len(preempted),
        failed=False,
        num_running=1,
        num_waiting=0,
        pages_free=1,
        pages_cached=2,
        pages_fenced=3,
        pages_held_by_requests=4,
        parts=tuple(StepPart(*part) for part in parts),
        preempted=tuple(preempted),
    )


part = st.tuples(
    st.sampled_from(IDS),
    st.integers(0, 1),
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(0, 2),
    st.booleans(),
)
notices = st.lists(
    st.one_of(
        st.tuples(st.just("arrived"), st.sampled_from(IDS), st.sampled_from((0, 0.3, 1.1, 2.7))),
        st.tuples(
            st.just("step"),
            st.lists(part, max_size=4, unique_by=lambda one: one[:2]),
            st.lists(st.tuples(st.sampled_from(IDS), st.integers(0, 1)), max_size=2),
        ),
        st.tuples(st.just("finished"), st.integers(0, 5)),
    ),
    max_size=40,
)


class Model:
    """All events, from which the state is computed anew each time."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.told: list[Any] = []

    def newest(self, request_id: str) -> dict[str, Any] | None:
        """Last request with this id; None if that one has ended, whatever others are open."""
        alike = [one for one in self.requests if one["id"] == request_id]
        return alike[-1] if alike and alike[-1]["open"] else None

    @property
    def open(self) -> list[dict[str, Any]]:
        return [one for one in self.requests if one["open"]]

    def arrived(self, request_id: str, now: float) -> None:
        number = len(self.requests) + 1
        self.requests.append(
            {"id": request_id, "number": number, "at": now, "open": True, "did": []}
        )
        self.told.append(("arrived", number))

    def stepped(self, parts: Any, preempted: Any) -> None:
        gone = []
        for request_id, sample in preempted:
            if (one := self.newest(request_id)) is not None:
                one["did"].append(("preempted", sample))
                gone.append(one["number"])
        computed = []
        for request_id, sample, start, count, sampled, is_decode in parts:
            if (one := self.newest(request_id)) is None:
                continue
            mine = [what for what, which in one["did"] if which == sample]
            begins = not mine or mine[-1] == "preempted"
            one["did"].append(("computed", sample))
            cached = start if begins and not is_decode else 0
            computed.append((one["number"], sample, start, count, sampled, is_decode, cached))
        self.told.append(("step", tuple(gone), computed))

    def ended(self, one: dict[str, Any]) -> None:
        one["open"] = False
        self.told.append(("ended", one["number"]))


def plain(entry: Entry) -> Any:
    if isinstance(entry, Stepped):
        return ("step", entry.preempted, [msgspec.structs.astuple(p) for p in entry.parts])
    return ("arrived" if isinstance(entry, Arrived) else "ended", entry.number)


def walk(notes: Any, recorder: StepRecorder, model: Model) -> Iterator[None]:
    """Report the same events to both. Only requests that have arrived end."""
    now = 0.0
    for number, note in enumerate(notes):
        now += 1.0
        if note[0] == "arrived":
            submitted = now - note[2]  # submitted before it is reported
            recorder.arrived([info(note[1], submitted)])
            model.arrived(note[1], submitted)
        elif note[0] == "step":
            recorder.step_finished(step(number, now, note[1], note[2]))
            model.stepped(note[1], note[2])
        elif model.open:
            one = model.open[note[1] % len(model.open)]
            recorder.finished([summary(one["id"], one["at"], now)])
            model.ended(one)
        yield


@given(notices, st.integers(1, 12), st.integers(4, 12))
@settings(max_examples=examples(200))
def test_the_state_equals_a_plain_model(notes: Any, max_entries: int, max_parts: int) -> None:
    recorder = StepRecorder(max_entries=max_entries, max_parts=max_parts)
    model = Model()
    for _ in walk(notes, recorder, model):
        told = model.told
        assert recorder.end == len(told)
        kept = recorder.entries
        forgotten = len(told) - len(kept)
        assert [plain(entry) for entry in kept] == told[forgotten:]
        assert len(kept) <= max_entries
        assert sum(map(num_parts, kept)) <= max_parts
        if forgotten:  # entries are dropped only if there is no room
            lost = told[forgotten - 1]
            parts = sum(map(num_parts, kept)) + (len(lost[2]) if lost[0] == "step" else 0)
            assert len(kept) == max_entries or parts > max_parts
        assert [one.arrived.number for one in recorder.open_requests] == [
            one["number"] for one in model.open
        ]
        for begin in range(len(told) + 1):
            few = recorder.last_entries(begin, 5)
            all_from_there = kept[max(0, begin - forgotten) :]
            assert few == all_from_there[len(all_from_there) - len(few) :]
            assert sum(map(num_parts, few)) <= 5


def test_steps_of_many_parts_make_room_by_their_parts() -> None:
    recorder = StepRecorder(max_entries=100, max_parts=10)
    recorder.arrived([info("a", 0.5)])
    for number in range(1, 8):
        parts = [("a", sample, 8 + number, 1, 1, True) for sample in range(4)]
        recorder.step_finished(step(number, float(number), parts))
        assert sum(map(num_parts, recorder.entries)) == 4 * min(number, 2)
    assert (len(recorder.entries), recorder.end) == (2, 8)


def entries_of(notes: Any) -> list[Entry]:
    recorder = StepRecorder()
    for _ in walk(notes, recorder, Model()):
        pass
    return recorder.entries


@given(notices)
@settings(max_examples=examples(50))
def test_a_trace_is_json_wherever_it_is_cut(notes: Any) -> None:
    tracer = Tracer()
    text = TRACE_BEGIN + encoded(tracer.begin(0.0), first=True)
    for entry in entries_of(notes):
        text += encoded(tracer.events(entry), first=False)
    text += encoded(tracer.finish(), first=False)
    whole = json.loads(text + TRACE_END)
    for cut in range(0, len(text) + 1, 23):
        lines = text[:cut].rpartition(b"\n")[0].rstrip(b",")
        if lines:  # text after the last whole line isn't an event
            found = json.loads(lines + TRACE_END)
            assert found == whole[: len(found)]


@given(notices)
@settings(max_examples=examples(200))
def test_what_is_on_a_track_lies_within_or_beside_each_other(notes: Any) -> None:
    tracer = Tracer()
    events = tracer.begin(0.0)
    for entry in entries_of(notes):
        events += tracer.events(entry)
    events += tracer.finish()
    tracks: dict[int, list[Any]] = {}
    for event in events:
        if event.pid == 2 and event.ph in "BEX":
            tracks.setdefault(event.tid, []).append(event)
    for track in tracks.values():
        bounds = [event for event in track if event.ph in "BE"]
        assert [event.ph for event in bounds] == [
            *"BE" * (len(bounds) // 2),
            *"B" * (len(bounds) % 2),
        ]
        times = [event.ts for event in bounds]
        assert times == sorted(times)
        slices = sorted(
            [event for event in track if event.ph == "X"],
            key=lambda one: (one.ts, one.ts + one.dur),
        )
        for before, after in pairwise(slices):
            assert before.ts + before.dur <= after.ts
        for one in slices:
            begins = [event.ts for event in bounds if event.ph == "B" and event.ts <= one.ts]
            ends = [event.ts for event in bounds if event.ph == "E" and event.ts > one.ts]
            assert begins
            assert not ends or one.ts + one.dur <= ends[0]


def test_a_trace_says_what_a_request_did() -> None:
    recorder = StepRecorder()
    recorder.arrived([info("mine", 1.0, tenant="one")])
    recorder.step_finished(step(1, 2.0, [("mine", 0, 4, 2, 0, False)]))
    recorder.step_finished(step(2, 3.0, [("mine", 0, 6, 2, 1, False)]))
    recorder.step_finished(step(3, 3.5, [("mine", 0, 8, 1, 1, True)]))
    recorder.step_finished(step(4, 4.0, [("mine", 0, 9, 1, 1, True)]))
    recorder.step_finished(step(5, 5.0, [], [("mine", 0)]))
    recorder.step_finished(step(6, 6.0, [("mine", 0, 3, 7, 1, False)]))
    recorder.finished([summary("mine", 1.0, 6.5)])
    for tenant, name in ((None, "mine"), ("one", "mine"), ("two", "request 1")):
        tracer = Tracer(tenant)
        events = [event for entry in recorder.entries for event in tracer.events(entry)]
        mine = [event for event in events if event.pid == 2 and event.ph in "BEX"]
        assert [event.name for event in mine if event.ph in "BE"] == [name, name]
        assert [(e.name, e.ts / 1e6, (e.ts + e.dur) / 1e6) for e in mine if e.dur is not None] == [
            ("queued", 1.0, 1.25),
            ("prefill", 1.25, 2.0),
            ("prefill", 2.25, 3.0),
            ("decode", 3.0, 4.0),
            ("preempted", 4.0, 5.25),
            ("prefill", 5.25, 6.0),
        ]
        cached = [event for event in events if event.name == "cached"]
        assert [event.args for event in cached] == [{"cached_tokens": 4}, {"cached_tokens": 3}]


def test_what_came_before_the_first_entry_is_passed_over() -> None:
    recorder = StepRecorder()
    recorder.finished([summary("early", 0.0, 1.0)])
    recorder.step_finished(step(1, 1.0, [("early", 0, 0, 1, 1, False)], [("early", 0)]))
    (stepped,) = recorder.entries
    assert isinstance(stepped, Stepped)
    assert (stepped.parts, stepped.preempted) == ((), ())


def test_the_end_of_a_request_is_told() -> None:
    recorder = StepRecorder()
    recorder.arrived([info("a", 2.0)])
    recorder.finished([summary("a", 2.0, 5.0)])
    ended = recorder.entries[-1]
    assert isinstance(ended, Ended)
    assert (ended.end_seconds, ended.completion_tokens) == (pytest.approx(5.0), 3)
    assert not recorder.open_requests
