"""Plan of one engine step: a `StepPlan`, which the scheduler builds and a runner reads.

    slot       0      1      2      3          a place in the runner's state per running sequence
    plan 7     start  .      start  start      "slot 0 belongs to these parameters and this seed"
               item: 12 tokens of one prompt, rows: (11, slot 0), (11, slot 2), (11, slot 3)
    plan 8     one item per slot: the token that the slot sampled last, one row each
    plan 9     end    .                        slot 0 may be forgotten

Only the start of a slot carries anything but numbers; later items and rows name the slot. The
runner keeps its page table, and plans say what changes in it (`aioserve.steps.pages`).
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
"""Stands for a token that the runner's drafter may propose after the previous ones. Before the
forward pass the runner replaces it, or leaves it out together with all after it."""

PENDING_IDS: npt.NDArray[np.int32] = np.array([PENDING_TOKEN], np.int32)
"""`PENDING_TOKEN` alone, as most items have it."""
PENDING_IDS.flags.writeable = False

MAX_SCORED_TOKENS = 256
"""Most tokens that a step scores. Each takes a row of logits, which is 0.6 MB with a vocabulary of
151,936."""

NO_TOKEN_LEFT = "the parameters of this request leave no token to draw"
"""Failure of a row whose logits are fine."""


class SlotStart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Start of a slot: from this plan on it belongs to a sequence. Carries all that the runner must
    know of it."""

    slot: int
    """Number in `[0, num_slots)`. The slot keeps nothing of an earlier owner."""
    params: SamplingParams
    seed: int
    """Key of the sequence's noise. Together with the sampled position it decides every random
    draw."""
    prompt_tokens: int = 0
    """Number of prompt tokens: the completion begins after them."""
    edits_logprobs: bool = False
    """True if the parameters change log-probabilities in place of logits. The log-probabilities
    reported are then the changed ones."""
    known_ids: npt.NDArray[np.int32] | None = None
    """int32 `[known tokens]`: prompt, and what was generated before the slot started. Given only if
    the parameters need them."""
    end_ids: frozenset[int] = frozenset()
    """Token ids that end a completion once it has `min_tokens` tokens."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    logits_processors: tuple[int, ...] = ()
    """Numbers of `params.logits_processors` among the runner's processor makers."""
    drafting: DraftedSequence | None = None
    """Data for the drafter, if draft tokens may be asked for."""
    script: Any = None
    """Value that the model's own `script` made of the request, if it has one."""


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
    """Kind of the tokens of an item."""

    PREFILL = 0
    """Tokens known before the step is planned: part of a prompt, recomputed, or forced."""
    DECODE = 1
    """The last token of a sequence, past its prompt, and the sample after it. It has one row and
    asks for nothing else."""
    VERIFY = 2
    """The last token of a sequence and draft tokens after it. The step keeps the draft tokens that
    it would have sampled itself.

    While other items of this kind are in flight for the slot, only the runner knows where the last
    token is. The plan's `start`, `index` and `count` are then upper bounds. If a grammar forces
    what comes after the last token, the plan brings these ids in place of draft tokens
    (`brings_ids`), at known positions.
    """


DECODE = ItemKind.DECODE


class SampleRow(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """One row of logits that a step samples from."""

    offset: int
    """Index among the item's tokens of the one whose logits these are, in `[0, count)`. The token
    sampled from them has position `start + offset + 1`.

    When an item verifies draft tokens, the row goes on for as long as the sampled token equals the
    item's next one. It then has one token more.
    """
    slot: int
    """Slot whose parameters and noise decide; the sampled token becomes its last. If the parameters
    ask for structured output, a mask comes while the step runs (`aioserve.sampling.masks`)."""


class ScoredTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """Tokens of a prompt whose log-probabilities are wanted from this step."""

    offset: int
    """Index among the item's tokens of the one whose logits score the first target."""
    target_ids: npt.NDArray[np.int32]
    """int32 `[N]`, N at least 1. Target `i` follows the token at `offset + i`, which the item
    computes. The last target may follow the item's last token."""

    def __len__(self) -> int:
        return len(self.target_ids)


class PooledTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """Tokens of an item whose hidden states are to be summed: those at `[offset, offset + count)`
    of the item, at least one. A hidden state is the input of the head, after the last layer and the
    final norm."""

    offset: int
    count: int

    def __len__(self) -> int:
        return self.count


class WorkItem(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`count` tokens of one sequence, from position `start`, in one step.

    A token has a position in its text. Its keys and values, an entry, have an index in the slot's
    pages. The entries `[0, index)` are there already; this item writes `[index, index + count)`.
    Several rows may name one offset: samples of a prompt that begin to differ with the token
    sampled there.

    Items of a slot follow each other, with two exceptions. After a late mask an item computes
    again, in the same places, what earlier items did, which may be in flight. An item that verifies
    draft tokens begins after the last token that its slot has by then. That is earlier than planned
    by the number of previous draft tokens that were wrong or weren't made.
    """

    kind: ItemKind
    sequence_id: int
    """Id for logs and tests; the runner goes by the slot."""
    slot: int
    start: int
    index: int
    """Index of its first entry: `start`, less the entries before it that were dropped."""
    count: int
    """Number of tokens, at least 1."""
    token_ids: npt.NDArray[np.int32]
    """int32 `[count]`. One may be `PENDING_TOKEN`, and those from some place on `DRAFT_TOKEN`."""
    rows: tuple[SampleRow, ...] = ()
    """Rows to sample from; none for a prompt that is computed only in part."""
    scored: ScoredTokens | None = None
    pooled: PooledTokens | None = None
    least_start: int = 0
    """Start of a verifying item if all earlier draft tokens are wrong or weren't made. If the
    slot's last token comes even before that, something failed: the outcome is dropped. The item
    must then write only to its own pages, which begin there."""

    @property
    def brings_ids(self) -> bool:
        """True if it verifies tokens that the plan brings, so that no drafter is asked."""
        kind, count = self.kind, self.count
        return kind is ItemKind.VERIFY and count > 1 and self.token_ids.item(1) != DRAFT_TOKEN

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.count

    @property
    def index_end(self) -> int:
        """Index after its last entry."""
        return self.index + self.count

    def most_tokens(self, row: SampleRow) -> int:
        """Most tokens that one of its rows may bring."""
        return self.count - row.offset if self.kind is ItemKind.VERIFY else 1


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Plan of one engine step, in batch order. Decodes come first.

    A runner works from top to bottom: slots end, slots start, their page tables change, pages are
    copied, items are computed, rows are sampled. Even if a step fails in the middle, its slots have
    ended, started and changed.
    """

    step: int
    ended_slots: tuple[int, ...] = ()
    """Slots whose sequences ended, or gave their pages back. No item names them until they start
    anew."""
    started_slots: tuple[SlotStart, ...] = ()
    pages: tuple[SlotPages, ...] = ()
    """Changes to the page tables of slots, in this order."""
    copies: tuple[PageCopy, ...] = ()
    """Copies to make one after the other, before anything of `items` is written. A page may be the
    target of one copy and the source of a later one."""
    items: tuple[WorkItem, ...]
    preempted: tuple[int, ...] = ()
    """Ids of the sequences that gave their pages back since the previous step was planned."""

    num_tokens: int = 0
    """Tokens that this step computes. This total, and those below, follow from the items."""
    num_sequences: int = 0
    """Sequences in this step, including new ones."""
    num_rows: int = 0
    """Rows that this step samples."""
    num_scored: int = 0
    """Tokens of prompts whose log-probabilities this step gives."""
    num_pooled: int = 0
    """Items whose hidden states this step sums up."""
    num_decodes: int = 0
    """Items of kind `DECODE`."""
    num_verified: int = 0
    """Items of kind `VERIFY`."""

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
        """Raise `InvariantError` for an item that doesn't fit its kind, or with rows beyond its
        tokens."""
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
