"""A draft model changes no token, and one equal to the target is always right."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import (
    ChatCompletion,
    Completion,
    ConfigError,
    Engine,
    ModelError,
    SamplingParams,
    Speculation,
)
from aioserve.engine.stats import EngineStats
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.storing import method_named
from aioserve.testing import FakeModel
from aioserve.testing.random_model import write_random_model
from tests.engine.idle import all_given_back
from tests.parity import tiny_models

TIGHT: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 48,
    "max_num_batched_tokens": 13,
    "output_reserve_tokens": 0,
}
"""Options with which prompts are chunked and requests preempted."""
SHARED = [*range(10, 45)]
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=40)
OTHERS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=2),
    SamplingParams(temperature=1.3, frequency_penalty=0.7, min_p=0.05, logit_bias={20: 3.0}),
]

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with the same tokens, one of them with window layers. Also a smaller one of the
    same tokens, and one with other tokens."""
    path = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "gemma3"):
        tiny_models.write(name, path / name)
    config = tiny_models.CONFIGS["qwen3"]
    write_random_model(path / "small", config | {"num_hidden_layers": 1}, seed=9, dtype="float32")
    write_random_model(path / "wider", config | {"vocab_size": 290}, seed=9, dtype="float32")
    return path


def requests(
    params: Sequence[SamplingParams], limits: Mapping[int, int]
) -> list[tuple[list[int], SamplingParams]]:
    """Requests, some of which share a prefix. One has two samples, and some limit their draft
    tokens."""
    every: list[tuple[list[int], SamplingParams]] = []
    for place in range(8):
        changed = {
            "max_tokens": 50,
            "ignore_eos": True,
            "seed": place,
            "n": 2 if place == 5 else 1,
            "max_draft_tokens": limits.get(place),
        }
        prompt = [*SHARED[: 35 - place % 3], 100 + place] if place % 2 else [*range(place + 3)]
        every.append((prompt, msgspec.structs.replace(params[place % len(params)], **changed)))
    return every


async def answers(
    model: Path, params: Sequence[SamplingParams], draft: Path | None = None, **options: Any
) -> tuple[list[Completion], EngineStats]:
    speculation, limits = None, {}
    if draft is not None:
        speculation = Speculation(drafter=f"model:path={draft}", max_tokens=4)
        limits = {0: 0, 3: 1}
    async with Engine(str(model), speculation=speculation, **options) as engine:
        first, *others = requests(params, limits)
        done = [await engine.generate(*first)]
        done += await asyncio.gather(*[engine.generate(*request) for request in others])
        assert await all_given_back(engine)
        return done, engine.stats()


def ids_of(done: Sequence[Completion]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in each.samples] for each in done]


@pytest.mark.parametrize("options", [{}, TIGHT, TIGHT | {"num_host_pages": 200}])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
async def test_a_draft_that_is_the_model_itself_is_always_right(
    models: Path, name: str, options: dict[str, Any]
) -> None:
    expected, _ = await answers(models / name, [GREEDY, SAMPLED], **options)
    done, stats = await answers(models / name, [GREEDY, SAMPLED], models / name, **options)
    assert ids_of(done) == ids_of(expected)
    assert sum(stats.tokens_drafted_total) > 0  # their number depends on measured costs of steps
    assert stats.tokens_accepted_total == stats.tokens_drafted_total
    assert bool(stats.preemptions_total) == bool(options)


@pytest.mark.parametrize("options", [{}, TIGHT])
async def test_no_draft_changes_a_token(models: Path, options: dict[str, Any]) -> None:
    params = [GREEDY, SAMPLED, *OTHERS]
    expected, _ = await answers(models / "qwen3", params)
    for draft in ("small", "qwen3", "gemma3"):
        done, stats = await answers(models / "qwen3", params, models / draft, **options)
        assert sum(stats.tokens_drafted_total) > 0
        assert stats.drafter_faults_total == 0
        for mine, theirs in zip(done, expected, strict=True):
            assert [s.token_ids for s in mine.samples] == [s.token_ids for s in theirs.samples]
            assert [s.logprobs for s in mine.samples] == [s.logprobs for s in theirs.samples]


async def test_the_reference_backend_drafts_as_well(models: Path) -> None:
    drafter = Speculation(drafter=f"model:path={models / 'qwen3'}", max_tokens=3)
    params = msgspec.structs.replace(SAMPLED, max_tokens=8, seed=1)
    async with Engine(str(models / "qwen3"), backend="reference", speculation=drafter) as engine:
        answer = await engine.generate(SHARED, params)
    assert answer.usage.accepted_draft_tokens == answer.usage.drafted_tokens > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
async def test_a_model_whose_weights_are_rounded_drafts_for_itself(
    models: Path, quantization: str
) -> None:
    """The draft is the served model by default; otherwise any other model."""
    expected, _ = await answers(models / "qwen3", [GREEDY, SAMPLED])
    plain_bytes = 0
    for drafter in (
        f"model:path={models / 'qwen3'}",
        f"model:quantization={quantization}",
        f"model:path={models / 'qwen3'},quantization={quantization}",
    ):
        speculation = Speculation(drafter=drafter, max_tokens=4)
        async with Engine(str(models / "qwen3"), speculation=speculation) as engine:
            done = await asyncio.gather(
                *[engine.generate(*request) for request in requests([GREEDY, SAMPLED], {})]
            )
            draft, stats = engine.dump()["model"]["draft"], engine.stats()
        assert ids_of(done) == ids_of(expected)
        taken = sum(draft["weight_bytes"].values())
        if "quantization" not in drafter:
            plain_bytes = taken
            continue
        assert any(name.startswith(quantization) for name in draft["weight_bytes"])
        assert taken < plain_bytes
        # It is right less often than the model itself, but far more often than another one.
        accepted, drafted = stats.tokens_accepted_total, stats.tokens_drafted_total
        assert 0.15 < sum(accepted) / sum(drafted) < 1


async def test_a_draft_that_cannot_be_rounded_is_refused(models: Path, tmp_path: Path) -> None:
    coded = tmp_path / "coded"
    await asyncio.to_thread(
        write_quantized_copy, models / "qwen3", coded, method_named("int8", None)
    )
    speculation = Speculation(drafter=f"model:path={coded},quantization=int4")
    message = "drafter 'model': quantization='int4' must be left out with a model whose weights are"
    with pytest.raises(ConfigError, match=message) as caught:
        async with Engine(str(models / "qwen3"), speculation=speculation):
            pass
    assert caught.value.argument == "speculation"


async def test_pages_of_both_models_are_what_memory_is_taken_for(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aioserve.execution.loading import cpu

    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: 2**22)
    found: list[tuple[int, int]] = []
    for draft in (None, models / "small"):
        speculation = Speculation(drafter=f"model:path={draft}") if draft else None
        async with Engine(str(models / "qwen3"), speculation=speculation) as engine:
            facts, pages = engine.dump()["model"], engine.stats().pages_total
        taken = facts["kv_cache_bytes"] + facts.get("draft", {}).get("kv_cache_bytes", 0)
        assert taken <= 2**22 * 0.9
        found.append((pages, taken))
    (alone, _), (beside, _) = found
    assert beside == pytest.approx(alone * 3 / 4, abs=1)  # three layers, and one more


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (
            "wider",
            ConfigError,
            r"has a vocabulary of 290 tokens, and the model that it is to draft",
        ),
        ("nowhere", ModelError, r"drafter 'model' can't be loaded: model '.*nowhere' not found"),
    ],
)
async def test_a_draft_that_does_not_go_with_the_model_is_refused(
    models: Path, draft: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await answers(models / "qwen3", [GREEDY], models / draft)


async def test_a_draft_with_other_tokens_is_refused(models: Path, tmp_path: Path) -> None:
    other = tiny_models.write("qwen3", tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"~~"'))
    with pytest.raises(ConfigError, match="has other tokens than the model that it is to draft"):
        await answers(models / "qwen3", [GREEDY], other)


async def test_a_model_that_is_an_object_has_no_draft_model() -> None:
    speculation = Speculation(drafter="model:path=pyhelp")
    with pytest.raises(ConfigError, match="needs a model that the engine loads by name, got <"):
        async with Engine(FakeModel(), speculation=speculation):
            pass


@pytest.mark.parametrize("drafter", ["model", "eagle3"])
async def test_pyhelp_has_drafts_of_its_own(drafter: str) -> None:
    messages = [{"role": "user", "content": "What does functools.lru_cache do?"}]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=60)
    answers: list[ChatCompletion] = []
    for speculation in (None, Speculation(drafter=drafter, max_tokens=4)):
        async with Engine("pyhelp", speculation=speculation) as engine:
            answers.append(await engine.chat(messages, params).completion())
    plain, speculative = answers
    assert [t.id for t in speculative.answers[0].tokens] == [t.id for t in plain.answers[0].tokens]
    assert 0 < speculative.usage.accepted_draft_tokens <= speculative.usage.drafted_tokens


async def test_a_draft_model_is_named_unless_one_comes_with_the_model(models: Path) -> None:
    speculation = Speculation(drafter="model")
    with pytest.raises(ConfigError, match="needs the option path: no draft model comes with '/"):
        async with Engine(str(models / "qwen3"), speculation=speculation):
            pass
