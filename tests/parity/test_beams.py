"""Beam search through the whole engine against transformers: ids and scores.

With whole prompts and chunks, with and without the prefix cache, among neighbours, and with pages
that run out; where some of the ids that beams like end them, and where none does.
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

from aioserve import Beam, Engine, SamplingParams
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
TOLERANCE = 1e-4


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
    """The same model, of which ids end an answer that its beams have in the middle."""

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
    model: Any, prompt: list[int], search: dict[str, Any], eos: list[int]
) -> list[tuple[float, list[int]]]:
    """transformers' beams."""
    width = search["beam_width"]
    told = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        length_penalty=search.get("length_penalty", 1.0),
        early_stopping=search.get("early_stopping", False),
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # It gives no score for a single one.
    scores = [0.0] if width == 1 else told.sequences_scores.tolist()
    beams = []
    for score, row in zip(scores, told.sequences[:, len(prompt) :].tolist(), strict=True):
        ends = [at for at, token_id in enumerate(row, 1) if token_id in eos]
        beams.append((score, row[: min(ends, default=MAX_TOKENS)]))
    return beams


def assert_beams(model: Any, prompt: list[int], search: Any, eos: list[int], beams: Any) -> int:
    """How many of them ended before the longest."""
    expected = generated(model, prompt, search, eos)
    assert [list(beam.token_ids) for beam in beams] == [ids for _, ids in expected]
    for beam, (score, ids) in zip(beams, expected, strict=True):
        if search["beam_width"] > 1:
            assert beam.score == pytest.approx(score, rel=TOLERANCE, abs=TOLERANCE)
        assert beam.finish_reason == ("stop" if ids[-1] in eos else "length")
    return sum(len(ids) < MAX_TOKENS for _, ids in expected)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
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
        ended += assert_beams(model, prompt, search, eos, beams)
    assert ended
    for (prompt, search), beams in zip(cases, answers[len(cases) :], strict=True):
        assert_beams(model, prompt, search, [], beams)
