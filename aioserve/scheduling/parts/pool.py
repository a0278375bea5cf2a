"""Pool: add up hidden states of a prompt, step by step
(`aioserve.scheduling.parts.pooling_state`)."""

from __future__ import annotations

from typing import Any

from aioserve.scheduling.parts.base import DoneStep, ItemTokens, RowPart
from aioserve.scheduling.sequence import SequenceState
from aioserve.steps.plan import WorkItem

__all__ = ["Pool"]


class Pool(RowPart):
    def ask(self, asked: ItemTokens) -> dict[str, Any]:
        pooling = asked.sequence.pooling
        part = None if pooling is None else pooling.launch(asked.start, asked.end)
        return {} if part is None else {"pooled": part}

    def take(self, step: DoneStep) -> None:
        pooled = [(run, item.pooled) for run, item, _ in step.entries if item.pooled is not None]
        for (run, part), added in zip(pooled, step.outcome.pooled, strict=True):
            if run.goes_on and run.sequence.pooling is not None:
                run.sequence.pooling.add(added, part.count)

    def drop_launched(self, sequence: SequenceState) -> None:
        if sequence.pooling is not None:
            sequence.pooling.begin_again()

    def distrust(self, sequence: SequenceState) -> None:
        if sequence.pooling is not None:
            sequence.pooling.forget()

    def is_beyond_a_token(self, item: WorkItem) -> bool:
        return item.pooled is not None
