"""The bookkeeping of beam search against all possible sequences, and against tensors."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.engine.beam_search import Beams, EndedBeam
from aioserve.request import FinishReason, SamplingParams, TopLogprob
from aioserve.testing.fake_model import byte_tokenizer
from aioserve.text.assembler import TextAssembler
from tests.tiers import examples

VOCAB_SIZE = 5
NEVER = -1e9
Ids = tuple[int, ...]


class Toy:
    """A model of five tokens: log-probabilities that depend on all tokens before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def logprobs(self, ids: Ids) -> list[float]:
        source = random.Random(f"{self._seed} {ids}")
        weights = [source.random() ** 3 + 1e-3 for _ in range(VOCAB_SIZE)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def total(self, ids: Ids) -> float:
        return sum([self.logprobs(ids[:at])[token_id] for at, token_id in enumerate(ids)])

    def top(self, ids: Ids, count: int) -> list[TopLogprob]:
        pairs = [TopLogprob(id, logprob) for id, logprob in enumerate(self.logprobs(ids))]
        return sorted(pairs, key=lambda pair: -pair.logprob)[:count]


def searched(toy: Toy, width: int, options: dict[str, Any]) -> list[EndedBeam]:
    beams = Beams(width, **options)
    count = width + len(options["end_ids"])
    while beams.running:
        assert all(len(beam.token_ids) == beams.num_tokens for beam in beams.running)
        assert not any(options["end_ids"] & set(beam.token_ids) for beam in beams.running)
        beams.advance([toy.top(beam.token_ids, count) for beam in beams.running])
    return beams.ended


def with_tensors(
    toy: Toy, width: int, options: dict[str, Any], stops: Sequence[Ids] = ()
) -> list[tuple[Ids, float]]:
    """Run `_beam_search` of transformers 5.23 for one prompt.

    The ids of any entry of `stops`, in a row, end a sequence. Every candidate is then considered.
    """
    end_ids, max_tokens = options["end_ids"], options["max_tokens"]
    length_penalty, early_stopping = options["length_penalty"], options["early_stopping"]
    beams_to_keep = width * (VOCAB_SIZE if stops else max(2, 1 + len(end_ids)))
    sequences: list[Ids] = [()] * width
    beam_scores = np.full(width, NEVER)
    is_sent_finished = np.zeros(width, bool)
    running: list[Ids] = [()] * width
    running_scores = np.array([0.0] + [NEVER] * (width - 1))
    cur_len = 0
    while True:
        log_probs = np.array([toy.logprobs(ids) for ids in running]) + running_scores[:, None]
        order = np.argsort(-log_probs.reshape(-1), kind="stable")[:beams_to_keep]
        topk_log_probs = log_probs.reshape(-1)[order]
        topk = [(*running[i // VOCAB_SIZE], int(i % VOCAB_SIZE)) for i in order]
        hits = np.array(
            [ids[-1] in end_ids or cur_len + 1 >= max_tokens or has_any(ids, stops) for ids in topk]
        )

        topk_running = topk_log_probs + hits * NEVER
        next_indices = np.argsort(-topk_running, kind="stable")[:width]
        did_finish = hits & (np.arange(len(topk)) < width)
        scores = topk_log_probs / (cur_len + 1) ** length_penalty + ~did_finish * NEVER
        merged = [*sequences, *topk]
        merged_scores = np.concatenate([beam_scores, scores])
        merged_finished = np.concatenate([is_sent_finished, did_finish])
        best = np.argsort(-merged_scores, kind="stable")[:width]
        sequences = [merged[i] for i in best]
        beam_scores, is_sent_finished = merged_scores[best], merged_finished[best]

        running = [topk[i] for i in next_indices]
        running_scores = topk_running[next_indices]
        cur_len += 1
        best_length = max_tokens if early_stopping == "never" and length_penalty > 0 else cur_len
        best_possible = running_scores[0] / best_length**length_penalty
        worst = np.where(is_sent_finished, beam_scores.min(), NEVER)
        improvement_possible = (best_possible > worst).any()
        exists_open_beam = not (is_sent_finished.all() and early_stopping is True)
        if not (improvement_possible and exists_open_beam and not hits.all()):
            return list(zip(sequences, beam_scores.tolist(), strict=True))


def has_any(ids: Ids, stops: Sequence[Ids]) -> bool:
    return any(
        ids[at : at + len(stop)] == stop for stop in stops for at in range(len(ids) - len(stop) + 1)
    )


options = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 2, 3, 5, 8]),
        "end_ids": st.sampled_from([frozenset(), frozenset({3}), frozenset({1, 4})]),
        "length_penalty": st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
        "early_stopping": st.sampled_from([False, True, "never"]),
    }
)
toys = st.integers(0, 2**32).map(Toy)


@settings(max_examples=examples(500))
@given(toy=toys, width=st.integers(1, VOCAB_SIZE - 2), options=options)
def test_beams_are_those_of_transformers(toy: Toy, width: int, options: dict[str, Any]) -> None:
    found = searched(toy, width, options)
    expected = with_tensors(toy, width, options)
    assert [beam.token_ids for beam in found] == [ids for ids, _ in expected]
    assert np.allclose([beam.score for beam in found], [score for _, score in expected])
    for beam in found:
        stops = beam.token_ids[-1] in options["end_ids"]
        assert beam.finish_reason == (FinishReason.STOP if stops else FinishReason.LENGTH)
        assert math.isclose(beam.cumulative_logprob, toy.total(beam.token_ids))


stop_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3).map(tuple)


@settings(max_examples=examples(500))
@given(
    toy=toys,
    width=st.integers(1, VOCAB_SIZE - 2),
    options=options,
    stops=st.lists(stop_ids, min_size=1, max_size=4),
    include=st.booleans(),
)
def test_a_stop_string_ends_a_beam_where_it_is_complete(
    toy: Toy, width: int, options: dict[str, Any], stops: list[Ids], include: bool
) -> None:
    texts = [bytes(stop).decode() for stop in stops]
    params = SamplingParams(stop=texts, include_stop_str_in_output=include)
    beams = Beams(width, **options, assembler=TextAssembler(byte_tokenizer(), params))
    while beams.running:
        assert len(beams.running) <= width
        assert not any(has_any(beam.token_ids, stops) for beam in beams.running)
        beams.advance([toy.top(beam.token_ids, VOCAB_SIZE) for beam in beams.running])
    expected = with_tensors(toy, width, options, stops)
    assert [beam.token_ids for beam in beams.ended] == [ids for ids, _ in expected]
    assert np.allclose([beam.score for beam in beams.ended], [score for _, score in expected])
    for beam in beams.ended:
        ended = beam.token_ids[-1] in options["end_ids"] or has_any(beam.token_ids, stops)
        assert beam.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)


@given(toy=toys, options=options)
def test_with_room_for_all_every_sequence_is_found(toy: Toy, options: dict[str, Any]) -> None:
    options["max_tokens"] = most = min(options["max_tokens"], 3)
    end_ids = options["end_ids"]
    every = [
        ids
        for length in range(1, most + 1)
        for ids in itertools.product(range(VOCAB_SIZE), repeat=length)
        if not end_ids & set(ids[:-1]) and (length == most or ids[-1] in end_ids)
    ]
    found = searched(toy, VOCAB_SIZE**most + 1, options)

    def score(ids: Ids) -> float:
        return toy.total(ids) / len(ids) ** options["length_penalty"]

    assert {beam.token_ids for beam in found} == set(every)
    assert np.allclose([beam.score for beam in found], sorted(map(score, every), reverse=True))


@given(toy=toys, max_tokens=st.integers(1, 7))
def test_a_single_beam_is_the_greedy_answer(toy: Toy, max_tokens: int) -> None:
    greedy: Ids = ()
    while len(greedy) < max_tokens:
        greedy += (toy.top(greedy, 1)[0].id,)
    options = {"end_ids": frozenset(), "length_penalty": 1.0, "early_stopping": False}
    (beam,) = searched(toy, 1, {"max_tokens": max_tokens, **options})
    assert beam.token_ids == greedy


@given(
    toy=toys,
    allowed=st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=2),
    max_tokens=st.integers(1, 3),
)
def test_where_few_tokens_may_come_there_are_as_many_beams_as_they_make(
    toy: Toy, allowed: set[int], max_tokens: int
) -> None:
    beams = Beams(8, max_tokens=max_tokens, end_ids=(), length_penalty=1.0, early_stopping=False)
    while beams.running:
        told = [toy.top(beam.token_ids, VOCAB_SIZE) for beam in beams.running]
        beams.advance(
            [
                [TopLogprob(one.id, one.logprob if one.id in allowed else -math.inf) for one in top]
                for top in told
            ]
        )
    every = sorted(itertools.product(allowed, repeat=max_tokens), key=toy.total, reverse=True)
    assert [beam.token_ids for beam in beams.ended] == every
