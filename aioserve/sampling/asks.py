"""Wishes of a step's rows beyond a draw, without the positions that they draw at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from aioserve.sampling.edits import RowEdits, SlotEdits
from aioserve.sampling.extras import RowExtras
from aioserve.sampling.logprobs import LogprobRows
from aioserve.sampling.masks import LateMasks

__all__ = ["RowAsks"]

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class RowAsks:
    """Edits and log-probabilities that rows ask for. Each sequence has one entry per row, or none
    if no row asks for any."""

    edits: Sequence[SlotEdits | None]
    tops: Sequence[int | None]
    """Number of most likely tokens wanted beside the row's own."""

    def repeated(self, counts: Sequence[int]) -> RowAsks:
        """Repeat each row `counts` times."""
        return RowAsks(_times(self.edits, counts), _times(self.tops, counts))

    def extras(
        self,
        positions: Sequence[int],
        scored: Sequence[tuple[int, npt.NDArray[np.int32]]] = (),
        masks: LateMasks | None = None,
        draft_tokens: Mapping[int, Sequence[int]] | None = None,
    ) -> RowExtras | None:
        """Extras of these rows, each of which draws the token at its position; compare
        `SlotTable.extras`. For the index of a row, `draft_tokens` holds draft tokens that are taken
        to stand from its position on."""
        found = [
            (row, edits, position)
            for row, (edits, position) in enumerate(zip(self.edits, positions, strict=False))
            if edits is not None
        ]
        supposed = (
            [
                (edits, draft_tokens[row], position)
                for row, edits, position in found
                if row in draft_tokens
            ]
            if draft_tokens
            else ()
        )
        edits = RowEdits(found, masks, supposed) if found or masks is not None else None
        wanted = [(row, top) for row, top in enumerate(self.tops) if top is not None]
        logprobs = None
        if wanted or scored:
            tops = [top for _, top in wanted]
            targets = [np.empty(0, np.int64)]
            for top, target_ids in scored:
                tops += [top] * len(target_ids)
                targets.append(target_ids.astype(np.int64))
            logprobs = LogprobRows(
                [row for row, _ in wanted],
                tops,
                first_scored=len(positions),
                target_ids=np.concatenate(targets),
                edited=() if edits is None else edits.of_logprobs,
            )
        return None if edits is None and logprobs is None else RowExtras(edits, logprobs)


def _times(entries: Sequence[T], counts: Sequence[int]) -> list[T]:
    if not entries:
        return []
    return [entry for entry, n in zip(entries, counts, strict=True) for _ in range(n)]
