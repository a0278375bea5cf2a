"""What one engine step computes: a `StepPlan`, which the scheduler builds and a runner reads.

    slot       0      1      2      3          a place in the runner's state per running sequence
    plan 7     start  .      start  start      "slot 0 belongs to these parameters and this seed"
               item: 12 tokens of one prompt, rows: (11, slot 0), (11, slot 2), (11, slot 3)
    plan 8     one item per slot: the token that the slot sampled last, one row each
    plan 9     end    .                        slot 0 may be forgotten

Only a slot's start carries anything but numbers; from then on items and rows name the slot. Its
page table is the runner's: plans say what changes in it (`aioserve.steps.pages`).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.drafting.drafter import DraftedSequence
from aioserve.errors import InvariantError
from aioserve.request import SamplingParams
from aioserve.steps.pages import PageCopy, SlotPages

__all__ = [
    "DRAFT_TOKEN",
    "MAX_SCORED_TOKENS",
    "NO_TOKEN_LEFT",
    "PENDING_IDS",
    "PENDING_TOKEN",
    "ItemKind",
    "PooledTokens",
    "SampleRow",
    "ScoredTokens",
    "SlotStart",
    "StepPlan",
    "WorkItem",
]

PENDING_TOKEN = -1
"""Stands for the token that an earlier step samples for the item's slot. It never leaves the core:
the runner replaces it on the device before the forward pass."""

DRAFT_TOKEN = -2
"""Stands for a token that the runner's drafter may propose behind those before it. Like the pending
one it is replaced before the forward pass, or left out with all behind it."""

PENDING_IDS: npt.NDArray[np.int32] = np.array([PENDING_TOKEN], np.int32)
"""`PENDING_TOKEN` alone, as most items have it."""
PENDING_IDS.flags.writeable = False

MAX_SCORED_TOKENS = 256
"""In a step: each takes a row of logits, which is 0.6 MB with a vocabulary of 151,936."""

NO_TOKEN_LEFT = "the parameters of this request leave no token to draw"
"""What a row's failure says where nothing is wrong with its logits."""


class SlotStart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A slot belongs to a sequence from this plan on: all that the runner must know of it."""

    slot: int
    """In `[0, num_slots)`. Nothing of an earlier owner is left in it."""
    params: SamplingParams
    seed: int
    """Key of the sequence's noise; with the sampled position it decides every random draw."""
    prompt_tokens: int = 0
    """Where the answer begins."""
    edits_logprobs: bool = False
    """The parameters change log-probabilities in place of logits, and those that are told are what
    is left then."""
    known_ids: npt.NDArray[np.int32] | None = None
    """int32 `[known tokens]`: prompt, and what was generated before the slot started, where the
    parameters need them."""
    end_ids: frozenset[int] = frozenset()
    """Token ids that end a completion once it has `min_tokens` tokens."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    logits_processors: tuple[int, ...] = ()
    """Numbers of `params.logits_processors` in what the runner makes them with."""
    drafting: DraftedSequence | None = None
    """What the drafter hears of the sequence, where draft tokens for it may be asked for."""
    script: Any = None
    """A value that the model's own `script` made of the request, if it has one."""


TOTALS = (
    "num_tokens",
    "num_sequences",
    "num_rows",
    "num_scored",
    "num_pooled",
    "num_decodes",
    "num_verified",
)


class ItemKind(Enum):
    """What the tokens of an item are."""

    PREFILL = 0
    """Known before the step is planned: part of a prompt, or computed anew, or forced."""
    DECODE = 1
    """The last token of a sequence, behind its prompt, and the sample behind it: one row, and
    nothing is asked of it."""
    VERIFY = 2
    """The last token of a sequence and draft tokens behind it, of which the step keeps as many
    as it would have sampled. While other items of the kind are in flight for its slot, nobody but
    the runner knows where the last token is: `start`, `index` and `count` are the most that they
    can be.
    Where a grammar forces what comes behind the last token, the plan brings these ids in place of
    draft tokens (`brings_ids`), and knows where they are."""


DECODE = ItemKind.DECODE


class SampleRow(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """One row of logits that a step samples from."""

    offset: int
    """Index among the item's tokens of the one whose logits these are, in `[0, count)`. The token
    sampled from them has position `start + offset + 1`. Where the item is to verify draft tokens,
    the row goes on for as long as the sampled token is the item's next one, and has a token
    more."""
    slot: int
    """Slot of the parameters and the noise that decide; the sampled token becomes its last. Where
    these ask for structured output, a mask comes while the step runs
    (`aioserve.sampling.masks`)."""


class ScoredTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """Tokens of a prompt whose log-probabilities are wanted from this step."""

    offset: int
    """Index among the item's tokens of the one whose logits tell of the first target."""
    target_ids: npt.NDArray[np.int32]
    """int32 `[N]`, N at least 1: target `i` is behind the token at `offset + i`, which the item
    computes; the last one may be behind its last token."""

    def __len__(self) -> int:
        return len(self.target_ids)


class PooledTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """Tokens of an item over whose hidden states a sum is wanted: those at `[offset, offset +
    count)` of the item, at least one. A hidden state is what the head makes logits of: it has
    passed the last layer and the final norm."""

    offset: int
    count: int

    def __len__(self) -> int:
        return self.count


class WorkItem(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`count` tokens of one sequence, from position `start`, in one step.

    A token has a position in its text, and its keys and values, an entry, have an index in the
    slot's pages. The entries `[0, index)` are there already; this item writes
    `[index, index + count)`. Several rows may name one offset: samples of a prompt that begin to
    differ with the token that is sampled there.

    Items of a slot follow each other, but where a mask came late they go back: one computes again,
    in the same places, what earlier ones did, which may be in flight. And one that verifies draft
    tokens begins behind the last token that its slot has by then: as much sooner as draft tokens
    before it were wrong or weren't made."""

    kind: ItemKind
    sequence_id: int
    """For logs and tests; the runner goes by the slot."""
    slot: int
    start: int
    index: int
    """Index of its first entry: `start`, less the entries before it that were dropped."""
    count: int
    """At least 1."""
    token_ids: npt.NDArray[np.int32]
    """int32 `[count]`; one may be `PENDING_TOKEN`, and those from some place on `DRAFT_TOKEN`."""
    rows: tuple[SampleRow, ...] = ()
    """What is sampled; none while a prompt is only computed in part."""
    scored: ScoredTokens | None = None
    pooled: PooledTokens | None = None
    least_start: int = 0
    """Where an item that verifies begins if all draft tokens before it were wrong or weren't made.
    If not even that far is known, something before it failed: its outcome is nothing, and it must
    write to none but its own pages, which begin there."""

    @property
    def brings_ids(self) -> bool:
        """Whether it verifies tokens that the plan knows, so that no drafter is asked."""
        kind, count = self.kind, self.count
        return kind is ItemKind.VERIFY and count > 1 and self.token_ids.item(1) != DRAFT_TOKEN

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + self.count

    @property
    def index_end(self) -> int:
        """Index behind its last entry."""
        return self.index + self.count

    def most_tokens(self, row: SampleRow) -> int:
        """How many tokens may come of one of its rows."""
        return self.count - row.offset if self.kind is ItemKind.VERIFY else 1


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One engine step: what to compute, in batch order. Decodes come first.

    A runner goes from top to bottom: slots end, slots start, their page tables change, pages are
    copied, items are computed, rows are sampled. Where a step fails in the middle, its slots have
    ended, started and changed all the same.
    """

    step: int
    ended_slots: tuple[int, ...] = ()
    """Their sequences ended, or gave their pages back: no item names them until they start anew."""
    started_slots: tuple[SlotStart, ...] = ()
    pages: tuple[SlotPages, ...] = ()
    """What changes in the page tables of slots, in this order."""
    copies: tuple[PageCopy, ...] = ()
    """Done one after the other, in this order, before anything of `items` is written: a page may
    be the target of one copy and the source of a later one."""
    items: tuple[WorkItem, ...]
    preempted: tuple[int, ...] = ()
    """Ids of the sequences that gave their pages back since the step before was planned."""

    num_tokens: int = 0
    """Tokens that this step computes. This total, and those below, follow from the items."""
    num_sequences: int = 0
    """Sequences in this step, those included that begin with it."""
    num_rows: int = 0
    """Rows that this step samples."""
    num_scored: int = 0
    """Tokens of prompts whose log-probabilities this step gives."""
    num_pooled: int = 0
    """Items of which this step gives a sum of hidden states."""
    num_decodes: int = 0
    """Items of that kind."""
    num_verified: int = 0
    """Items of that kind."""

    def __post_init__(self) -> None:
        others = [item for item in self.items if item.kind is not DECODE]
        decodes = tokens = sequences = rows = len(self.items) - len(others)
        scored = pooled = verified = 0
        for item in others:
            tokens += item.count
            rows += len(item.rows)
            sequences += len(item.rows) or 1
            scored += 0 if item.scored is None else len(item.scored)
            pooled += item.pooled is not None
            verified += item.kind is ItemKind.VERIFY
        totals = (tokens, sequences, rows, scored, pooled, decodes, verified)
        for name, total in zip(TOTALS, totals, strict=True):
            msgspec.structs.force_setattr(self, name, total)

    def check(self) -> None:
        """Raise `InvariantError` for an item that isn't what its kind says, or whose rows are of
        none of its tokens."""
        for index, item in enumerate(self.items):
            what = f"step {self.step}: item {index} ({item.kind.name}, {item.count} tokens)"
            if item.count < 1 or item.start < 0 or len(item.token_ids) != item.count:
                raise InvariantError(
                    f"{what} computes from {item.start} and brings {len(item.token_ids)} ids"
                )
            if not 0 <= item.index <= item.start:
                raise InvariantError(
                    f"{what} computes from {item.start}, and writes from index {item.index}"
                )
            if item.kind is ItemKind.DECODE and (
                item.count != 1
                or [(row.offset, row.slot) for row in item.rows] != [(0, item.slot)]
                or (item.scored, item.pooled) != (None, None)
            ):
                raise InvariantError(f"{what} must have one token, and a row of its own alone")
            if item.kind is ItemKind.VERIFY and [row.offset for row in item.rows] != [0]:
                raise InvariantError(f"{what} must have one row, of its first token")
            offsets = [row.offset for row in item.rows]
            for part in (item.scored, item.pooled):
                if part is not None:
                    offsets += [part.offset, part.offset + len(part) - 1]
            for offset in offsets:
                if not 0 <= offset < item.count:
                    raise InvariantError(f"{what} has a row of token {offset}")
