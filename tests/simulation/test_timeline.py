"""Records of steps in a timeline."""

from __future__ import annotations

from aioserve.simulation.timeline import Preempted, Timeline
from aioserve.steps.plan import PENDING_IDS, ItemKind, StepPlan, WorkItem


def add(
    timeline: Timeline, step: int, items: list[tuple[int, int, bool]], preempted: list[int]
) -> None:
    """A step of a second; `items` are request, tokens, and whether it goes on with its answer."""
    work = [
        WorkItem(
            kind=ItemKind.DECODE if tokens == 1 else ItemKind.PREFILL,
            sequence_id=n,
            slot=0,
            start=0,
            index=0,
            count=tokens,
            token_ids=PENDING_IDS,
        )
        for n, tokens, _ in items
    ]
    plan = StepPlan(step=step, items=tuple(work))
    timeline.add(
        plan,
        requests=[request for request, _, _ in items],
        decodes=[decodes for _, _, decodes in items],
        preempted=preempted,
        began_seconds=float(step),
        ended_seconds=step + 1.0,
        waiting=3,
        running=len(items),
        pages_held=5 * step,
        pages_cached=1,
    )


def test_decodes_in_a_row_are_one_span_and_chunks_are_one_each() -> None:
    timeline = Timeline()
    add(timeline, 0, [(7, 9, False)], [])
    add(timeline, 1, [(7, 4, False), (8, 2, False)], [])
    add(timeline, 2, [(7, 1, True), (8, 1, True)], [])
    add(timeline, 3, [(7, 1, True)], [8])
    add(timeline, 4, [(7, 1, True), (8, 1, True)], [])
    spans = [
        (s.request, s.decodes, s.began_seconds, s.ended_seconds, s.tokens) for s in timeline.spans
    ]
    assert spans == [
        (7, False, 0.0, 1.0, 9),
        (7, False, 1.0, 2.0, 4),
        (8, False, 1.0, 2.0, 2),
        (7, True, 2.0, 5.0, 3),
        (8, True, 2.0, 3.0, 1),
        (8, True, 4.0, 5.0, 1),
    ]
    assert timeline.preemptions == [Preempted(8, 3.0)]
    assert timeline.column("prefill_tokens").tolist() == [9, 6, 0, 0, 0]
    assert timeline.column("decode_tokens").tolist() == [0, 0, 2, 1, 2]
    assert timeline.column("pages_held").tolist() == [0, 5, 10, 15, 20]
    assert len(timeline) == 5
