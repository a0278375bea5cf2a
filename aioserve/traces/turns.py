"""Which request of a trace goes on with which, told by the blocks of their prompts.

A trace like Mooncake's names no conversations. But the id of a block stands for all tokens up to
its end, so that a prompt with the id of another's last whole block begins with that prompt. Where
that block was in no prompt before, it is that request's own words and not a text that many begin
with: who has it too goes on with the same conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from aioserve.traces.request import TraceRequest

__all__ = ["with_turns"]


def with_turns(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The trace with what `follows` what, by arrival, and the time between the two as
    `think_seconds`: how long the answer took isn't recorded, so that is in it."""
    made = list(trace)
    last_of: dict[int, int] = {}
    """By the last whole block of a prompt that was the first to have it: its index."""
    seen: set[int] = set()
    for index in sorted(range(len(trace)), key=lambda index: trace[index].arrival_seconds):
        request = trace[index]
        ids = request.block_ids[: request.prompt_tokens // request.block_tokens]
        before = next((last_of[id] for id in reversed(ids) if id in last_of), None)
        if before is not None:
            made[index] = replace(
                request,
                follows=trace[before].number,
                think_seconds=request.arrival_seconds - trace[before].arrival_seconds,
            )
        if ids and (ids[-1] not in seen or ids[-1] in last_of):
            last_of[ids[-1]] = index
        seen.update(ids)
    return made
