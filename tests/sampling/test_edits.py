"""Edits of logits: what each does, in which order, and that histories are those of the ids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from aioserve.request import SamplingParams
from aioserve.sampling.edits import SPARE_IDS, RowEdits, SlotEdits
from tests.tiers import examples

VOCAB = 40
END_IDS = (3, 7)

ids = st.integers(0, VOCAB - 1)
logits_of = st.integers(0, 2**32 - 1).map(
    lambda seed: torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
)
histories = st.tuples(st.lists(ids, min_size=1, max_size=12), st.lists(ids, max_size=12))
bad_words = st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
parameters = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 1.1]),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=4),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=12),
    bad_words=st.sampled_from([(), ("bad",)]),
    min_tokens=st.sampled_from([0, 0, 1, 5, 30]),
)


def edits_of(params, known, prompt_tokens, words=()):
    return SlotEdits(
        params,
        prompt_tokens=prompt_tokens,
        known_ids=np.array(known, np.int32) if params.needs_history else None,
        end_ids=END_IDS,
        bad_word_ids=words if params.bad_words else (),
    )


def edited(params: SamplingParams, prompt: Any, answer: Any, row: Any, words: Any = ()) -> Any:
    row = row.clone()
    edits_of(params, [*prompt, *answer], len(prompt), words).apply(row, len(prompt) + len(answer))
    return row


def defined(params: SamplingParams, prompt: Any, answer: Any, row: Any, words: Any) -> Any:
    """Return the edited row, a token at a time, as the module's docstring defines it."""
    known = [*prompt, *answer]
    values = row.double().tolist()
    for token, bias in dict(params.logit_bias).items():
        values[token] += bias
    for token in set(known):
        factor = params.repetition_penalty
        values[token] = values[token] * factor if values[token] < 0 else values[token] / factor
    for token in set(answer):
        values[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    for word in words if params.bad_words else ():
        if tuple(known[len(known) - len(word) + 1 :]) == word[:-1] or len(word) == 1:
            values[word[-1]] = -math.inf
    if len(answer) < params.min_tokens:
        for token in END_IDS:
            values[token] = -math.inf
    if params.allowed_token_ids is not None:
        allowed = params.allowed_token_ids
        values = [v if token in allowed else -math.inf for token, v in enumerate(values)]
    return torch.tensor(values)


@given(params=parameters, history=histories, row=logits_of, words=bad_words)
def test_edits_are_what_they_are_defined_to_be(params, history, row, words):
    prompt, answer = history
    torch.testing.assert_close(
        edited(params, prompt, answer, row, words),
        defined(params, prompt, answer, row, words),
        rtol=1e-5,
        atol=1e-4,
        check_dtype=False,
    )


@given(params=parameters, history=histories, row=logits_of, words=bad_words)
def test_edits_are_those_of_transformers_in_its_order(params, history, row, words):
    prompt, answer = history
    known: Any = torch.tensor([[*prompt, *answer]])
    expected: Any = row[None].clone()
    if params.logit_bias:
        bias: Any = {(token,): float(value) for token, value in dict(params.logit_bias).items()}
        expected = SequenceBiasLogitsProcessor(bias)(known, expected)
    expected = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(known, expected)
    if params.bad_words and words:
        bad = [list(word) for word in dict.fromkeys(words)]
        expected = NoBadWordsLogitsProcessor(bad, eos_token_id=None)(known, expected)
    least = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, list(END_IDS))
    expected = least(known, expected)
    params = SamplingParams(
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        bad_words=params.bad_words,
        min_tokens=params.min_tokens,
    )

    torch.testing.assert_close(edited(params, prompt, answer, row, words), expected[0])


@settings(max_examples=examples(50))
@given(
    params=parameters,
    prompt=st.lists(ids, min_size=1, max_size=12),
    answer=st.lists(ids, min_size=1, max_size=2 * SPARE_IDS),
    cut=st.integers(0, 2 * SPARE_IDS),
    row=logits_of,
    words=bad_words,
)
def test_a_slot_that_starts_again_from_ids_goes_on_as_the_one_before(
    params, prompt, answer, cut, row, words
):
    """Both give the same bits, since a preempted sequence is computed by both."""
    cut = min(cut, len(answer))
    whole = edits_of(params, prompt, len(prompt), words)
    again = edits_of(params, [*prompt, *answer[:cut]], len(prompt), words)
    for index, token in enumerate(answer):
        position = len(prompt) + index
        rows = [row.clone(), row.clone()]
        for edits, edited_row in zip((whole, again), rows, strict=True):
            if edits is whole or index >= cut:
                edits.apply(edited_row, position)
                edits.note(torch.tensor(token), position)
        if index >= cut:
            assert torch.equal(*rows)


@given(
    history=histories,
    rows=st.lists(logits_of, min_size=2, max_size=5),
    params=parameters,
    chosen=st.integers(0, 4),
)
def test_other_rows_stay_as_they_are_and_place_means_nothing(history, rows, params, chosen):
    prompt, answer = history
    chosen %= len(rows)
    logits = torch.stack(rows)
    position = len(prompt) + len(answer)
    edits = edits_of(params, [*prompt, *answer], len(prompt))
    RowEdits([(chosen, edits, position)]).apply(logits)

    assert torch.equal(logits[chosen], edited(params, prompt, answer, rows[chosen]))
    others = [i for i in range(len(rows)) if i != chosen]
    assert torch.equal(logits[others], torch.stack([rows[i] for i in others]))


def test_a_token_that_is_noted_twice_counts_once():
    """A step is computed again after memory was missing for it."""
    params = SamplingParams(frequency_penalty=1.0)
    edits = edits_of(params, [1], 1)
    for _ in range(2):
        row = torch.zeros(VOCAB)
        edits.apply(row, 1)
        edits.note(torch.tensor(5), 1)
    row = torch.zeros(VOCAB)
    edits.apply(row, 2)

    assert row[5] == -1
    assert row.count_nonzero() == 1


@pytest.mark.parametrize(
    ("params", "edits", "remembers"),
    [
        (SamplingParams(), False, False),
        (SamplingParams(temperature=0.3, top_k=5, top_p=0.9, logprobs=3, stop="x"), False, False),
        (SamplingParams(logit_bias={1: 2.0}), True, False),
        (SamplingParams(allowed_token_ids=[1]), True, False),
        (SamplingParams(min_tokens=1), True, False),
        (SamplingParams(repetition_penalty=1.1), True, True),
        (SamplingParams(presence_penalty=0.1), True, True),
        (SamplingParams(frequency_penalty=-0.1), True, True),
        (SamplingParams(bad_words="x"), True, True),
    ],
    ids=repr,
)
def test_only_what_needs_it_is_edited_and_remembered(params, edits, remembers):
    assert params.edits_logits is edits
    assert params.needs_history is remembers
