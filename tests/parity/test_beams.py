"""Beam search through the whole engine against transformers: ids and scores.

Prompts are whole or chunked, with and without the prefix cache, among neighbours, and with pages
that run out. Likely ids end beams in some models, and in others none does. Penalties and all other
edits of a beam's log-probabilities are covered.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from aioserve import (
    Beam,
    Engine,
    LogitsProcessor,
    LogitsProcessorSpec,
    SamplingParams,
    hookimpl,
)
from tests.parity.cases import on_backends
from tests.parity.tiny_models import VOCAB_SIZE

MODELS = ("llama", "qwen3", "gemma3")
MAX_TOKENS = 14
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {"num_pages": 256},
    "chunks and preemption": {
        "page_size": 4,
        "num_pages": 60,
        "max_num_batched_tokens": 13,
        "output_reserve_tokens": 0,
        "overlap": False,
    },
    "nothing is cached": {"num_pages": 256, "prefix_caching": False},
}
SEARCHES: tuple[dict[str, Any], ...] = (
    {"beam_width": 1},
    {"beam_width": 4},
    {"beam_width": 3, "length_penalty": 0.0, "early_stopping": True},
    {"beam_width": 5, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 2, "length_penalty": -0.5, "early_stopping": "never"},
)
EDITS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 3.0},
    {"repetition_penalty": 0.8, "presence_penalty": 0.9, "frequency_penalty": 0.4},
    {"presence_penalty": -0.6, "logit_bias": {9: 3.0, 30: -8.0, 200: 1.5}, "min_tokens": 9},
    {"allowed_token_ids": tuple(range(4, 80)), "frequency_penalty": 1.7, "min_tokens": 14},
    {"logits_processors": ("by_history",), "repetition_penalty": 1.1},
)
TOLERANCE = 1e-4


class ByHistory(LogitsProcessor):
    """Processor by which the tokens of prompt and completion decide the next one."""

    def process(self, prompt_ids, answer_ids, logits):
        logits[prompt_ids] -= 0.5
        logits[answer_ids] -= 2.0
        logits[int(prompt_ids.sum() + 7 * answer_ids.sum()) % len(logits)] += 1.5


class Plugin:
    @hookimpl
    def aioserve_logits_processors(self):
        return [LogitsProcessorSpec("by_history", ByHistory)]


class AsDefined:
    """Edits that transformers lacks, as a processor of its own on ids and log-probabilities."""

    def __init__(self, edits: dict[str, Any], prompt_tokens: int) -> None:
        self._edits = edits
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        changed = scores.clone()
        for ids, row in zip(input_ids, changed, strict=True):
            prompt, answer = ids[: self._prompt_tokens], ids[self._prompt_tokens :]
            counts = torch.bincount(answer, minlength=len(row))
            row -= self._edits.get("presence_penalty", 0.0) * (counts > 0)
            row -= self._edits.get("frequency_penalty", 0.0) * counts
            if "logits_processors" in self._edits:
                ByHistory().process(prompt, answer, row)
            if allowed := self._edits.get("allowed_token_ids"):
                left_out = torch.ones(len(row), dtype=torch.bool)
                left_out[list(allowed)] = False
                row[left_out] = -torch.inf
        return changed


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 9, 23, 30, 47)
    ]


@pytest.fixture(scope="module")
def with_ends(
    directory_of: Callable[[str], Path], oracle: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Write the model with end ids that its beams have in the middle of a completion."""

    @cache
    def write(name: str) -> Path:
        model, found = oracle(name), []
        for prompt in prompts()[1:4]:
            ids = generated(model, prompt, {"beam_width": 4}, [])[0][1]
            found.append(ids[len(ids) // 2])
        directory = tmp_path_factory.mktemp("ends") / name
        shutil.copytree(directory_of(name), directory)
        config = json.loads((directory / "config.json").read_text())
        config["eos_token_id"] = sorted(set(found))
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "generation_config.json").unlink(missing_ok=True)
        return directory

    return write


@torch.inference_mode()
def generated(
    model: Any,
    prompt: list[int],
    search: dict[str, Any],
    eos: list[int],
    edits: dict[str, Any] | None = None,
) -> list[tuple[float, list[int]]]:
    """Search for beams with transformers."""
    width, edits = search["beam_width"], edits or {}
    bias = {(token_id,): value for token_id, value in edits.get("logit_bias", {}).items()}
    told = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        length_penalty=search.get("length_penalty", 1.0),
        early_stopping=search.get("early_stopping", False),
        repetition_penalty=edits.get("repetition_penalty", 1.0),
        sequence_bias=bias or None,
        min_new_tokens=edits.get("min_tokens"),
        logits_processor=LogitsProcessorList([AsDefined(edits, len(prompt))] if edits else []),
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # With a single beam, transformers returns no score.
    scores = [0.0] if width == 1 else told.sequences_scores.tolist()
    beams = []
    for score, row in zip(scores, told.sequences[:, len(prompt) :].tolist(), strict=True):
        ends = [at for at, token_id in enumerate(row, 1) if token_id in eos]
        beams.append((score, row[: min(ends, default=MAX_TOKENS)]))
    return beams


def assert_beams(
    expected: list[tuple[float, list[int]]], search: Any, eos: list[int], beams: Any
) -> int:
    """Compare beams, and return the number of those that ended before the token limit."""
    assert [list(beam.token_ids) for beam in beams] == [ids for _, ids in expected]
    for beam, (score, ids) in zip(beams, expected, strict=True):
        if search["beam_width"] > 1:
            assert beam.score == pytest.approx(score, rel=TOLERANCE, abs=TOLERANCE)
        assert beam.finish_reason == ("stop" if ids[-1] in eos else "length")
    return sum(len(ids) < MAX_TOKENS for _, ids in expected)


@on_backends(MODELS, SETTINGS)
@pytest.mark.asyncio
async def test_beams_and_scores_are_those_of_transformers(
    name, settings, with_ends, oracle, backend
):
    directory, model = with_ends(name), oracle(name)
    eos = json.loads((directory / "config.json").read_text())["eos_token_id"]
    noise = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    options = {**SETTINGS[settings], "backend": backend.name, "dtype": "float32"}
    cases = [(prompt, search) for prompt, search in zip(prompts(), SEARCHES, strict=True)]
    async with Engine(str(directory), **options) as engine:
        neighbours = [engine.stream(prompt, noise) for prompt in prompts()[:3]]
        answers: list[tuple[Beam, ...]] = await asyncio.gather(
            *(
                engine.beam_search(p, max_tokens=MAX_TOKENS, ignore_eos=ignore, **search)
                for ignore in (False, True)
                for p, search in cases
            )
        )
        for neighbour in neighbours:
            assert len([token async for token in neighbour]) == 40
    ended = 0
    for (prompt, search), beams in zip(cases, answers[: len(cases)], strict=True):
        ended += assert_beams(generated(model, prompt, search, eos), search, eos, beams)
    assert ended
    for (prompt, search), beams in zip(cases, answers[len(cases) :], strict=True):
        assert_beams(generated(model, prompt, search, []), search, [], beams)


@pytest.fixture(scope="module")
def edited(with_ends: Callable[[str], Path], oracle: Any) -> Callable[[str], list[Any]]:
    """Return prompts, searches, edits, and transformers' beams with and without the edits."""

    @cache
    def find(name: str) -> list[Any]:
        eos = json.loads((with_ends(name) / "config.json").read_text())["eos_token_id"]
        model, found = oracle(name), []
        # In transformers, a single beam is drawn from logits.
        searches = [search for search in SEARCHES if search["beam_width"] > 1]
        for index, edits in enumerate(EDITS):
            for prompt in (prompts()[index], prompts()[(index + 3) % len(EDITS)]):
                search = searches[len(found) % len(searches)]
                both = [generated(model, prompt, search, eos, some) for some in (edits, {})]
                found.append((prompt, search, edits, *both))
        return found

    return find


@on_backends(MODELS, SETTINGS)
@pytest.mark.asyncio
async def test_edited_beams_are_those_of_transformers_with_the_same_processors(
    name, settings, with_ends, edited, backend
):
    directory, cases = with_ends(name), edited(name)
    eos = json.loads((directory / "config.json").read_text())["eos_token_id"]
    options = {**SETTINGS[settings], "backend": backend.name, "dtype": "float32"}
    noise = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, logprobs=2, presence_penalty=1)
    async with Engine(str(directory), plugins=[Plugin()], **options) as engine:
        neighbours = [engine.stream(prompt, noise) for prompt in prompts()[:3]]
        answers = await asyncio.gather(
            *(
                engine.beam_search(prompt, max_tokens=MAX_TOKENS, **search, **edits)
                for prompt, search, edits, *_ in cases
            )
        )
        for neighbour in neighbours:
            assert len([token async for token in neighbour]) == 40
    ended, changed = 0, set()
    for (_, search, edits, expected, unchanged), beams in zip(cases, answers, strict=True):
        ended += assert_beams(expected, search, eos, beams)
        if [ids for _, ids in expected] != [ids for _, ids in unchanged]:
            changed.add(EDITS.index(edits))
    assert ended
    assert changed == set(range(len(EDITS)))
