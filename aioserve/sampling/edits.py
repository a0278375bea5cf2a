"""Changes that a request makes to its logits before the draw, one row at a time.

In this order, each applied to the result of the previous ones:

    logit_bias            added to the logits of its ids
    repetition_penalty    a positive logit is divided by it, a negative one multiplied, for every
                          token of prompt and completion (Keskar et al., "CTRL", 2019)
    presence_penalty      subtracted for every token of the completion
    frequency_penalty     subtracted as often as the completion has the token
    logits_processors     plugins' own (`aioserve.sampling.processors`)
    bad_words             the last token of a bad word is left out behind its others
    min_tokens            ids that end the completion are left out until it has so many tokens
    allowed_token_ids     all others are left out
    structured_output     what its grammar doesn't allow next is left out

The order is that of transformers, for the edits that it has (`sequence_bias` of single tokens,
`repetition_penalty`, `bad_words_ids`, `min_new_tokens`). An id that is left out has a logit of
-inf. Temperature and the limits on what may be drawn come afterwards (`aioserve.sampling.sampler`).
For beams, the same edits apply to log-probabilities, which aren't normalised again.

A slot remembers the ids of its sequence on the device, since the host may not have seen the last
one. Knows torch, on any device, and no backend; nothing is read back. On the CPU, native code
applies masks, since torch would need several calls for each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve import _native
from aioserve.ops.checks import check_tensor
from aioserve.request import SamplingParams
from aioserve.sampling.masks import LateMasks, Mask
from aioserve.sampling.processors import GuardedProcessor
from aioserve.sampling.uploads import upload

__all__ = ["RowEdits", "SlotEdits", "leave_out"]

SPARE_IDS = 256
"""Spare ids of a history, so that it lasts for a while."""


class SlotEdits:
    """Edits of one slot, from its start to its end, and the ids that they depend on.

    `known_ids`, int32 `[known tokens]`, are the ids of the sequence when the slot starts, of which
    the first `prompt_tokens` are the prompt. With `of_logprobs` the edits change log-probabilities.
    Made on any thread; used on that of the steps.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_tokens: int,
        of_logprobs: bool = False,
        known_ids: npt.NDArray[np.int32] | None,
        end_ids: Collection[int],
        bad_word_ids: Sequence[Sequence[int]],
        processors: Sequence[GuardedProcessor] = (),
    ) -> None:
        self._params = params
        self._prompt_tokens = prompt_tokens
        self.of_logprobs: bool = of_logprobs
        self._known_ids = known_ids
        self._end_ids = sorted(end_ids)
        self._bad_word_ids = bad_word_ids
        self._processors = processors
        self._on: _Placed | None = None

    def apply(self, row: Tensor, position: int) -> str | None:
        """Change `row`, float32 `[V]`, from which the token at `position` is drawn. With
        `of_logprobs`, logits become log-probabilities first. Return the failure of a processor, if
        any."""
        params, on = self._params, self._placed(row.device)
        if params.needs_history:
            self._lengthen(on, position)
        if self.of_logprobs:
            row.copy_(torch.log_softmax(row, dim=0))
        if on.bias_ids is not None:
            row.index_add_(0, on.bias_ids, on.biases)
        if params.repetition_penalty != 1:
            ids = on.history[:position]
            logits, penalty = row[ids], params.repetition_penalty
            row[ids] = torch.where(logits < 0, logits * penalty, logits / penalty)
        answer = on.history[self._prompt_tokens : position]
        if params.presence_penalty:
            row[answer] = row[answer] - params.presence_penalty
        if params.frequency_penalty:
            off = row.new_full((), -params.frequency_penalty)
            row.index_put_((answer,), off, accumulate=True)
        prompt, failure = on.history[: self._prompt_tokens], None
        for processor in self._processors:
            failure = failure or processor.apply(prompt, answer, row)
        for word in on.bad_words:
            before = len(word) - 1
            if position < before:
                continue
            same = (on.history[position - before : position] == word[:-1]).all()
            last = word[-1:]  # an index without dimensions would be read back
            row[last] = torch.where(same, -math.inf, row[last])
        if on.end_ids is not None and position - self._prompt_tokens < params.min_tokens:
            row.index_fill_(0, on.end_ids, -math.inf)
        if on.allowed_ids is not None:
            allowed = row[on.allowed_ids]
            row.fill_(-math.inf)
            row[on.allowed_ids] = allowed
        return failure

    def suppose(self, token_ids: Sequence[int], position: int, device: torch.device) -> None:
        """Take draft tokens to stand from `position` on, until drawn ones are noted in their
        place."""
        if self._params.needs_history:
            on, end = self._placed(device), position + len(token_ids)
            self._lengthen(on, end)
            on.history[position:end] = upload(token_ids, np.int64, device)

    def _lengthen(self, on: _Placed, position: int) -> None:
        """Make room in the history for a token at `position`."""
        if position >= len(on.history):
            longer = on.history.new_zeros(position + SPARE_IDS)
            longer[: len(on.history)] = on.history
            on.history = longer

    def note(self, token_id: Tensor, position: int) -> None:
        """Note the token at `position`, an int64 scalar, drawn from the row that `apply`
        changed."""
        if self._on is not None and self._params.needs_history:
            self._on.history[position] = token_id

    def _placed(self, device: torch.device) -> _Placed:
        """Copy on the device, made by the first step that needs it there."""
        if self._on is None:
            self._on = _Placed(
                self._params, self._known_ids, self._end_ids, self._bad_word_ids, device
            )
            self._known_ids = None
        return self._on


class _Placed:
    """Data that one slot's edits read, in the memory of a device."""

    __slots__ = ("allowed_ids", "bad_words", "bias_ids", "biases", "end_ids", "history")

    def __init__(
        self,
        params: SamplingParams,
        known_ids: npt.NDArray[np.int32] | None,
        end_ids: list[int],
        bad_word_ids: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        def ids_of(ids: Sequence[int] | npt.NDArray[np.int32]) -> Tensor:
            return upload(ids, np.int64, device)

        bias = dict(params.logit_bias)
        self.bias_ids: Tensor | None = ids_of(list(bias)) if bias else None
        self.biases: Tensor = upload(list(bias.values()), np.float32, device)
        self.bad_words: list[Tensor] = [ids_of(word) for word in bad_word_ids]
        self.end_ids: Tensor | None = ids_of(end_ids) if end_ids and params.min_tokens else None
        allowed = params.allowed_token_ids
        self.allowed_ids: Tensor | None = None if allowed is None else ids_of(allowed)
        self.history: Tensor = ids_of([] if known_ids is None else known_ids)
        """int64 `[known tokens]` or longer: ids in order of position."""


def leave_out(logits: Tensor, masks: Sequence[tuple[int, Mask]]) -> None:
    """Set ids that a row's mask lacks to -inf in `logits`, float32 `[S, V]` on the CPU.

    Raises IndexError for a row that isn't there, ValueError for a mask of another length.
    """
    check_tensor("logits", logits, torch.float32, logits.shape, torch.device("cpu"))
    _native.leave_out(logits.data_ptr(), *logits.shape, masks)


class RowEdits:
    """Edits of a step, as tuples (index of a row, the slot's edits, position of the token drawn).
    Also the masks of what may be drawn; applying them waits for them."""

    def __init__(
        self,
        rows: Sequence[tuple[int, SlotEdits, int]],
        masks: LateMasks | None = None,
        draft_tokens: Sequence[tuple[SlotEdits, Sequence[int], int]] = (),
    ) -> None:
        """`draft_tokens` are the draft tokens that each of these takes to stand from a position
        on."""
        self._rows = rows
        self._draft_tokens = draft_tokens
        self.masks: LateMasks | None = masks
        self.failures: dict[int, str] = {}
        """Failures of processors, by index of a row."""
        masked: frozenset[int] = frozenset() if masks is None else masks.rows
        self.rows: frozenset[int] = masked.union([row for row, *_ in rows])
        """Indices of the rows that are changed."""
        self.of_logprobs: frozenset[int] = frozenset(
            [row for row, edits, _ in rows if edits.of_logprobs]
        )
        """Indices of the rows of beams."""

    def apply_to_logprobs(self, logits: Tensor) -> None:
        """Turn rows of beams of `logits`, float32 `[S, V]`, into changed log-probabilities, in
        place."""
        self._apply(logits, of_logprobs=True)

    def apply(self, logits: Tensor) -> None:
        """Change all other rows of `logits`, float32 `[S, V]`, in place."""
        self._apply(logits, of_logprobs=False)
        if self.masks is None:
            return
        found = self.masks.found()
        if logits.device.type == "cpu":
            leave_out(logits, found)
            return
        for row, mask in found:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=logits.shape[1])
            left_out = upload(bits == 0, np.bool_, logits.device)
            logits[row].masked_fill_(left_out, -math.inf)

    def _apply(self, logits: Tensor, *, of_logprobs: bool) -> None:
        for edits, token_ids, position in self._draft_tokens:
            edits.suppose(token_ids, position, logits.device)
        for row, edits, position in self._rows:
            if edits.of_logprobs is not of_logprobs:
                continue
            failure = edits.apply(logits[row], position)
            self.failures.pop(row, None)  # left by a step that is computed again
            if failure is not None:
                self.failures[row] = failure

    @property
    def late(self) -> frozenset[int]:
        """Rows that were drawn from without the mask that they needed."""
        late = None if self.masks is None else self.masks.late
        return late or frozenset()

    def note(self, token_ids: Tensor) -> None:
        """Note the tokens drawn: `token_ids`, int64 `[S]`."""
        for row, edits, position in self._rows:
            edits.note(token_ids[row], position)
