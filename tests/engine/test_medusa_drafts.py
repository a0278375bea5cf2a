"""Draft tokens of Medusa's heads: a chain, and branches that are the next best of the first
head."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from aioserve import Engine, SamplingParams
from aioserve.drafting.drafter import DraftedSequence
from aioserve.execution.speculation.drafts.draft_medusa import DraftMedusa
from aioserve.ops import SampleRows, backend_named
from aioserve.scheduling.speculation.draft_lengths import DraftLengths, DraftRecord
from tests.engine.test_draft_heads import Loaded, answers, models, speculation_of
from tests.engine.test_draft_model import GREEDY, SAMPLED, SHARED

__all__ = ["models"]

pytestmark = pytest.mark.asyncio


class MedusaDraft(NamedTuple):
    ids: list[int]
    """All tokens known to it."""
    samples: SampleRows
    """Sampling of the next token, one row."""
    limit: int
    chain: list[int]
    others: list[int]
    """Branches, of one token each."""

    def firsts(self, logits: Tensor) -> list[int]:
        """Choose as many tokens from the first head's logits, float32 `[V]`, as chain and branches
        begin with.

        They are the best ones, or are drawn without replacement.
        """
        count = len(self.others) + 1
        if not self.samples["temperature"].any():
            return logits.argsort(descending=True)[:count].tolist()
        backend, left, found = backend_named("native"), logits[None].clone(), list[int]()
        for _ in range(count):
            slots = backend.allocate_slots(int(self.samples.slots[0]) + 1)
            found += backend.draw(left, self.samples, slots).token_ids.tolist()
            left[0, found[-1]] = -torch.inf
        return found


def drafts_of_medusa(
    monkeypatch: pytest.MonkeyPatch, end_ids: Collection[int] | None = None
) -> list[MedusaDraft]:
    """Record chains and branches from now on. `end_ids` replaces those of the model."""
    made: list[MedusaDraft] = []
    known: dict[int, list[int]] = {}
    start, extend_all = DraftMedusa.start, DraftMedusa.extend_all
    draft_all = DraftMedusa.draft_all

    def starting(self: Any, slot: int, sequence: DraftedSequence) -> None:
        known[slot] = sequence.known_ids.tolist()
        if end_ids is not None:
            self._end_ids = frozenset(end_ids)
        start(self, slot, sequence)

    def hearing(self: Any, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        for slot, ids in zip(slots, token_ids, strict=True):
            known[slot].extend(ids)
        extend_all(self, slots, token_ids)

    def drafting(self: Any, slots: Sequence[int], limits: Sequence[int]) -> Any:
        found = draft_all(self, slots, limits)
        for slot, chain, limit in zip(slots, found, limits, strict=True):
            others = [one for (one,) in self.branches(slot, limit - len(chain))]
            samples = self._samples([slot], [len(known[slot])])
            made.append(MedusaDraft([*known[slot]], samples, limit, [*chain], others))
        return found

    monkeypatch.setattr(DraftMedusa, "start", starting)
    monkeypatch.setattr(DraftMedusa, "extend_all", hearing)
    monkeypatch.setattr(DraftMedusa, "draft_all", drafting)
    return made


def choose_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give steps many draft tokens, then few, regardless of their cost."""
    turns = cycle([9, 5, 3, 1])

    def choose(
        self: DraftLengths, records: Sequence[DraftRecord], others: int, prefilled: int, most: int
    ) -> list[int]:
        wanted = next(turns)
        return [min(record.limit, wanted, most // len(records)) for record in records]

    monkeypatch.setattr(DraftLengths, "choose", choose)


@pytest.mark.parametrize("options", [{}, {"page_size": 2, "max_num_seqs": 2}])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_medusa_branches_are_what_the_first_head_drafts_otherwise(
    models: Path, params: SamplingParams, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = drafts_of_medusa(monkeypatch)
    choose_by_turns(monkeypatch)
    speculation = msgspec.structs.replace(speculation_of(models, "medusa", 9), max_branches=2)
    expected, _ = await answers(models / "target", [params])
    done, stats = await answers(models / "target", [params], speculation, **options)
    assert [[s.token_ids for s in one.samples] for one in done] == [
        [s.token_ids for s in one.samples] for one in expected
    ]
    assert stats.drafter_faults_total == 0
    assert {len(one.others) for one in made} == {0, 1, 2}
    loaded = Loaded(models, "medusa")
    for one in made:
        if not one.chain:
            assert not one.others
            continue
        assert len(one.others) == min(2, max(0, one.limit - 2) // 2)
        assert len(one.chain) <= max(2, one.limit - 2 * len(one.others))
        logits = loaded.medusa_logits(one.ids)
        assert [one.chain[0], *one.others] == one.firsts(logits[0])
        if params is GREEDY:
            assert one.chain == logits[: len(one.chain)].argmax(-1).tolist()


async def test_medusa_drafts_nothing_behind_an_end(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a chain nor branches of the previous step."""
    params = msgspec.structs.replace(GREEDY, max_tokens=24, ignore_eos=True)
    async with Engine(str(models / "target")) as engine:
        answer = (await engine.generate(SHARED, params)).samples[0].token_ids
    made = drafts_of_medusa(monkeypatch, end_ids := set(answer[8:10]))
    choose_by_turns(monkeypatch)
    speculation = msgspec.structs.replace(speculation_of(models, "medusa", 9), max_branches=2)
    async with Engine(str(models / "target"), speculation=speculation) as engine:
        assert (await engine.generate(SHARED, params)).samples[0].token_ids == answer
    behind = [one for one in made if one.ids[-1] in end_ids]
    assert 0 < len(behind) < len(made)
    assert not any(one.chain or one.others for one in behind)
