"""Heads beside a model change no token, and draft what they would from all states of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import Tensor

from aioserve import (
    Completion,
    ConfigError,
    Eagle3Drafter,
    Engine,
    MedusaDrafter,
    ModelError,
    MTPDrafter,
    SamplingParams,
    Speculation,
)
from aioserve.engine.stats import EngineStats
from aioserve.execution.speculation.drafts.draft_head import DraftHead
from aioserve.execution.speculation.drafts.draft_medusa import DraftMedusa
from aioserve.models.heads.loader import make_head
from aioserve.models.heads.medusa import MedusaHeads
from aioserve.models.heads.read import ReadHead
from aioserve.models.loader import load_model
from aioserve.ops import HostBatch, backend_named
from aioserve.testing import FakeModel
from aioserve.testing.random_model import write_random_model
from tests.engine.idle import all_given_back
from tests.engine.test_draft_model import GREEDY, SAMPLED, SHARED, TIGHT
from tests.models.heads.directories import eagle3_config, eagle3_tensors, write_head
from tests.models.heads.runs import HeadRun
from tests.models.heads.test_medusa import SPELLINGS, tensors_of
from tests.models.heads.test_mtp import mtp_config, mtp_tensors
from tests.parity import tiny_models
from tests.parity.tiny_models import VOCAB_SIZE

EDITED = SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=2)
KINDS = ("eagle3", "few", "windows", "mtp", "medusa")
"""Kinds of heads. `few` is an EAGLE-3 head with part of the vocabulary; the second layer of
`windows` has a window."""

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_heads(path)
    return path


def write_heads(path: Path) -> None:
    """Write a model, `target`, and a head of each kind for it."""
    tiny_models.write("llama", path / "target")
    config = eagle3_config()
    write_head(path / "eagle3", config, eagle3_tensors(config))
    config = eagle3_config(draft_vocab_size=90)
    write_head(path / "few", config, eagle3_tensors(config))
    windows = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    config = eagle3_config(windows)
    write_head(path / "windows", config, eagle3_tensors(config))
    write_head(path / "mtp", mtp_config(), mtp_tensors())
    spelled = SPELLINGS["speculators"][0]
    write_head(path / "medusa", spelled, tensors_of("speculators", bias=False, outputs=True))


def write_drafts(path: Path) -> None:
    """Write what `write_heads` does, and a smaller model, `small`."""
    write_heads(path)
    config = tiny_models.CONFIGS["llama"] | {"num_hidden_layers": 1}
    write_random_model(path / "small", config, seed=9, dtype="float32")


def speculation_of(models: Path, kind: str, max_tokens: int = 4) -> Speculation:
    name = "eagle3" if kind in ("few", "windows") else kind
    return Speculation(drafter=f"{name}:path={models / kind}", max_tokens=max_tokens)


def requests(params: Sequence[SamplingParams]) -> list[tuple[list[int], SamplingParams]]:
    """Requests, some of which share a prefix. One has two samples, and some limit their draft
    tokens."""
    every: list[tuple[list[int], SamplingParams]] = []
    for place in range(7):
        changed = {
            "max_tokens": 45,
            "ignore_eos": True,
            "seed": place,
            "n": 2 if place == 5 else 1,
            "max_draft_tokens": {0: 0, 3: 1}.get(place),
        }
        prompt = [*SHARED[: 35 - place % 3], 100 + place] if place % 2 else [*range(place + 1)]
        every.append((prompt, msgspec.structs.replace(params[place % len(params)], **changed)))
    return every


async def answers(
    model: Path,
    params: Sequence[SamplingParams],
    speculation: Speculation | None = None,
    **options: Any,
) -> tuple[list[Completion], EngineStats]:
    async with Engine(str(model), speculation=speculation, **options) as engine:
        given = requests(params)
        if speculation is None:
            given = [(p, msgspec.structs.replace(s, max_draft_tokens=None)) for p, s in given]
        first, *others = given
        done = [await engine.generate(*first)]
        done += await asyncio.gather(*[engine.generate(*request) for request in others])
        assert await all_given_back(engine)
        return done, engine.stats()


@pytest.mark.parametrize("options", [{}, TIGHT, TIGHT | {"num_host_pages": 200}])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_head_changes_a_token(models: Path, kind: str, options: dict[str, Any]) -> None:
    params = [GREEDY, SAMPLED, EDITED]
    expected, _ = await answers(models / "target", params)
    speculation = speculation_of(models, kind)
    done, stats = await answers(models / "target", params, speculation, **options)
    assert sum(stats.tokens_drafted_total) > 0
    assert stats.drafter_faults_total == 0
    assert bool(stats.preemptions_total) == bool(options)
    for mine, theirs in zip(done, expected, strict=True):
        assert [s.token_ids for s in mine.samples] == [s.token_ids for s in theirs.samples]
        assert [s.logprobs for s in mine.samples] == [s.logprobs for s in theirs.samples]


class Loaded:
    """A head and its target, both computed directly."""

    def __init__(self, models: Path, kind: str) -> None:
        self._backend = backend_named("native")
        read = ReadHead.of(models / kind)
        kept = read.config.layers_read(3)
        self._target = load_model(models / "target", backend=self._backend, kept_layers=kept)
        self._head = make_head(read, self._target)

    def draft_tokens(self, ids: Sequence[int], count: int) -> list[int]:
        """Return the head's greedy draft tokens after these tokens."""
        if isinstance(self._head, MedusaHeads):
            return self.medusa_logits(ids)[:count].argmax(-1).tolist()
        run = HeadRun(self._head, self._backend, page_size=8)
        return run.chain(0, ids[1:], self._states(ids), count)[1]

    def medusa_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of each of Medusa's heads after these tokens, float32 `[heads,
        vocab]`."""
        assert isinstance(self._head, MedusaHeads)
        return self._head.logits(self._target.normed(self._states(ids)[-1:]))[:, 0]

    def _states(self, ids: Sequence[int]) -> Tensor:
        """Return the states that the target keeps of all tokens but the last."""
        known = len(ids) - 1
        table = np.arange(known, dtype=np.int32).reshape(1, 1, known)
        counts = np.array([known])
        host = HostBatch.laid_out(counts, counts, table, 1, logit_rows=[known - 1])
        host.token_ids[:] = ids[:-1]
        backend, cache = self._backend, self._target.new_cache(known, 1)
        self._target.forward(backend.prepare(host, cache, backend.allocate_slots(1)), cache)
        states = self._target.kept_states
        self._target.leave_room()
        return states


@pytest.mark.parametrize("options", [{}, {"page_size": 4, "max_num_batched_tokens": 13}])
@pytest.mark.parametrize("kind", KINDS)
async def test_drafts_are_those_of_all_states_of_the_target(
    models: Path, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = drafts_of_heads(kind, monkeypatch)
    speculation = speculation_of(models, kind, max_tokens=3)
    params = msgspec.structs.replace(GREEDY, max_tokens=14, ignore_eos=True)
    async with Engine(str(models / "target"), speculation=speculation, **options) as engine:
        answer = await engine.generate(SHARED, params)
    assert check_drafts(models, kind, made, [*SHARED, *answer.samples[0].token_ids]) >= 8


def drafts_of_heads(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Sequence[int]]]:
    """Record draft tokens that a drafter of a kind makes from now on, with the number of known
    tokens."""
    made: list[tuple[int, Sequence[int]]] = []
    drafter: Any = DraftMedusa if kind == "medusa" else DraftHead
    draft_all = drafter.draft_all

    def noting(self: Any, slots: Sequence[int], limits: Sequence[int]) -> Any:
        found = draft_all(self, slots, limits)
        for slot, draft_tokens in zip(slots, found, strict=True):
            known = self._known[slot] if kind == "medusa" else self._sequences[slot].known
            made.append((known, list(draft_tokens)))
        return found

    monkeypatch.setattr(drafter, "draft_all", noting)
    return made


def check_drafts(
    models: Path, kind: str, made: Sequence[tuple[int, Sequence[int]]], ids: Sequence[int]
) -> int:
    """Check that draft tokens for a prompt and its answer are those from all states of the target.

    Return their number.
    """
    loaded = Loaded(models, kind)
    for known, draft_tokens in made:
        if draft_tokens:  # none while it catches up with the prompt
            assert draft_tokens == loaded.draft_tokens(ids[:known], len(draft_tokens))
    return sum(len(draft_tokens) for _, draft_tokens in made)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
async def test_heads_tell_what_they_drew_from(
    models: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aioserve.execution.speculation import verification

    asked: list[int] = []
    tokens_by_rejection = verification.tokens_by_rejection

    def noting(backend: Any, p: Any, q: Any, draft_tokens: Any, rows: Any) -> Any:
        asked.append(len(draft_tokens))
        assert (q.gather(1, draft_tokens[:, None]) > 0).all()
        return tokens_by_rejection(backend, p, q, draft_tokens, rows)

    monkeypatch.setattr(verification, "tokens_by_rejection", noting)
    speculation = msgspec.structs.replace(speculation_of(models, kind), acceptance="rejection")
    expected, _ = await answers(models / "target", [GREEDY])
    done, stats = await answers(models / "target", [GREEDY], speculation)
    assert [[s.token_ids for s in one.samples] for one in done] == [
        [s.token_ids for s in one.samples] for one in expected
    ]
    assert not asked
    _, stats = await answers(models / "target", [SAMPLED, EDITED], speculation)
    assert stats.drafter_faults_total == 0
    assert 0 < sum(asked) <= sum(stats.tokens_drafted_total)


async def test_the_reference_backend_has_heads_as_well(models: Path) -> None:
    params = msgspec.structs.replace(SAMPLED, max_tokens=8, seed=1)
    tokens: list[tuple[int, ...]] = []
    for speculation in (None, speculation_of(models, "eagle3")):
        options: dict[str, Any] = {"backend": "reference", "speculation": speculation}
        async with Engine(str(models / "target"), **options) as engine:
            answer = await engine.generate(SHARED, params)
            tokens.append(answer.samples[0].token_ids)
    assert tokens[0] == tokens[1]
    assert answer.usage.drafted_tokens > 0


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa"])
async def test_states_are_what_memory_is_taken_for(
    models: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aioserve.execution.loading import cpu

    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: 2**22)
    async with Engine(str(models / "target")) as engine:
        alone = engine.stats().pages_total
    speculation = speculation_of(models, kind)
    async with Engine(str(models / "target"), speculation=speculation) as engine:
        facts, pages = engine.dump()["model"], engine.stats().pages_total
    draft = facts["draft"]
    assert draft["head"] == kind
    taken = facts["kv_cache_bytes"] + draft.get("kv_cache_bytes", 0) + draft["state_bytes"]
    assert 2**22 * 0.9 - taken == pytest.approx(0, abs=taken / pages)
    assert pages < alone


@pytest.mark.parametrize(
    ("named", "kind", "error", "message"),
    [
        (
            "mtp",
            "eagle3",
            ConfigError,
            "has a head of kind eagle3, which the drafter 'eagle3' takes",
        ),
        (
            "medusa",
            "nowhere",
            ModelError,
            "drafter 'medusa' can't be loaded: model '.*nowhere' not",
        ),
        ("eagle3", "target", ModelError, "drafter 'eagle3' can't be loaded: .*architectures"),
    ],
)
async def test_a_head_that_does_not_go_with_the_model_is_refused(
    models: Path, named: str, kind: str, error: type[Exception], message: str
) -> None:
    speculation = Speculation(drafter=f"{named}:path={models / kind}")
    with pytest.raises(error, match=message):
        async with Engine(str(models / "target"), speculation=speculation):
            pass


async def test_a_head_of_another_model_is_refused(models: Path, tmp_path: Path) -> None:
    config = eagle3_config(eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    write_head(tmp_path, config, eagle3_tensors(config))
    message = (
        r"drafter 'eagle3' can't be loaded: .*config.json: .* must be in \[0, 3\] for a target"
    )
    with pytest.raises(ModelError, match=message):
        async with Engine(
            str(models / "target"), speculation=Speculation(drafter=f"eagle3:path={tmp_path}")
        ):
            pass


async def test_memory_that_is_not_there_is_told(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aioserve.execution.speculation.drafts import placing

    options: dict[str, Any] = {"num_pages": 48, "num_host_pages": 10**9}
    with pytest.raises(ConfigError, match="num_host_pages=1000000000 pages"):
        async with Engine(
            str(models / "target"), speculation=speculation_of(models, "medusa"), **options
        ):
            pass
    monkeypatch.setattr(placing, "total_memory_bytes", lambda: 1000)
    with pytest.raises(ModelError, match=r"'mtp' can't be loaded: .* and there are 1000 bytes"):
        async with Engine(str(models / "target"), speculation=speculation_of(models, "mtp")):
            pass


@pytest.mark.parametrize(
    ("model", "kind"), [("", "eagle3"), ("pyhelp", "mtp"), ("pyhelp", "medusa")]
)
async def test_a_head_is_named_unless_one_comes_with_the_model(
    models: Path, model: str, kind: str
) -> None:
    message = f"drafter '{kind}' needs the option path: no such head comes with '{model}"
    with pytest.raises(ConfigError, match=message) as caught:
        async with Engine(model or str(models / "target"), speculation=Speculation(drafter=kind)):
            pass
    assert caught.value.argument == "speculation"


async def test_a_head_needs_a_model_that_is_loaded(models: Path) -> None:
    with pytest.raises(ConfigError, match="drafter 'mtp' needs a model that the engine loads"):
        async with Engine(FakeModel(), speculation=speculation_of(models, "mtp")):
            pass


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa"])
async def test_states_of_a_branch_that_was_right_are_there(
    models: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = msgspec.structs.replace(GREEDY, max_tokens=24, ignore_eos=True)
    async with Engine(str(models / "target")) as engine:
        ids = [*SHARED, *(await engine.generate(SHARED, params)).samples[0].token_ids]
    drafter = DraftMedusa if kind == "medusa" else DraftHead
    draft_all, extend_all = drafter.draft_all, drafter.extend_all
    known, made = len(SHARED), list[tuple[int, list[int]]]()

    def hearing(self: Any, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        nonlocal known
        known += sum(map(len, token_ids))
        extend_all(self, slots, token_ids)

    def chain(self: Any, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        made.append((known, list(draft_all(self, slots, [2])[0])))
        return [[(ids[known] + 1) % VOCAB_SIZE] if known < len(ids) else []]

    monkeypatch.setattr(drafter, "extend_all", hearing)
    monkeypatch.setattr(drafter, "draft_all", chain)
    monkeypatch.setattr(
        drafter,
        "branches",
        lambda self, slot, limit: [ids[known : known + limit - 1]] if known < len(ids) else [],
        raising=False,
    )
    for one in (Eagle3Drafter, MTPDrafter):
        monkeypatch.setattr(one, "branches", MedusaDrafter.branches)
    speculation = msgspec.structs.replace(speculation_of(models, kind, 5), max_branches=1)
    # Without overlap, the position of each step is known, and all known tokens are used for
    # drafting.
    options: dict[str, Any] = {"overlap": False, "page_size": 4}
    async with Engine(str(models / "target"), speculation=speculation, **options) as engine:
        answer = await engine.generate(SHARED, params)
        assert [*SHARED, *answer.samples[0].token_ids] == ids
        assert answer.usage.accepted_draft_tokens >= 9
        assert engine.stats().drafter_faults_total == 0
    assert len([draft_tokens for _, draft_tokens in made if draft_tokens]) >= 4
    check_drafts(models, kind, made, ids)
