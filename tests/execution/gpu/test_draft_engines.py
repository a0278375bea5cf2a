"""Engines with a CUDA device and a draft model or head, on a device that is the host.

Drafting changes no token, and makes the same draft tokens as on a CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aioserve import ConfigError, Engine, SamplingParams, Speculation
from aioserve.config import EngineConfig
from aioserve.drafting.heads import Eagle3Drafter, MedusaDrafter
from aioserve.drafting.model import ModelDrafter
from aioserve.execution.gpu.memory import MemoryUse
from aioserve.execution.loading.cuda import CudaPlacement
from aioserve.execution.loading.place import allocated
from aioserve.execution.speculation.drafts.read import AnyReadDraft, ReadDraft, ReadDraftHead
from aioserve.models.decoder import Decoder
from aioserve.models.files import model_files
from aioserve.models.heads.read import ReadHead
from aioserve.models.reading import ReadWeights, WeightReading
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.scheduling.speculation.draft_lengths import DraftLengths, DraftRecord
from tests.engine.test_draft_heads import check_drafts, drafts_of_heads, write_drafts
from tests.execution.gpu.host_device import HostCounts, HostDevice, cuda_is_the_host
from tests.parity import tiny_models

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 4,
    "num_pages": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 12,
    "max_model_len": 32,
}
ON_DEVICE = OPTIONS | {"device": "cuda", "capture_graphs": False}
PROMPTS = [[*range(10, 15), 3], [*range(10, 15), 4, 5]]
"""Prompts; the second begins with a page of the first."""
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(seed=2, top_k=40, max_tokens=6, ignore_eos=True),
]

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a smaller one, and heads."""
    path = tmp_path_factory.mktemp("models")
    write_drafts(path)
    return path


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    return cuda_is_the_host(monkeypatch)


async def reference(models: Path) -> list[tuple[int, ...]]:
    """Return the answers of a CPU without draft tokens."""
    async with Engine(str(models / "target"), backend="reference", **OPTIONS) as engine:
        asked = zip(PROMPTS, PARAMS, strict=True)
        answers = [await engine.generate(prompt, params) for prompt, params in asked]
    return [answer.token_ids for answer in answers]


@pytest.mark.more
@pytest.mark.parametrize("draft", ["target", pytest.param("small", marks=pytest.mark.slow)])
async def test_draft_models_change_no_token(
    models: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await reference(models)
    device = cuda_is_the_host(monkeypatch)
    speculation = Speculation(drafter=f"model:path={models / draft}", max_tokens=3)
    target = str(models / "target")
    async with Engine(target, speculation=speculation, num_host_pages=8, **ON_DEVICE) as engine:
        asked = zip(PROMPTS, PARAMS, strict=True)
        done = await asyncio.gather(*(engine.generate(*request) for request in asked))
        replays = device.replays  # the sizes of steps are random until here
        alone = await engine.generate(PROMPTS[0], PARAMS[0])
        stats, facts = engine.stats(), engine.dump()["model"]
    assert [answer.token_ids for answer in [*done, alone]] == [*expected, expected[0]]
    assert stats.drafter_faults_total == 0
    assert sum(stats.tokens_drafted_total) > 0
    assert device.replays > replays
    if draft == "target":
        assert stats.tokens_accepted_total == stats.tokens_drafted_total
        assert facts["draft"]["weight_bytes"] == facts["weight_bytes"]


make_room = Decoder.make_room


def room_of_its_own(self: Decoder, num_tokens: int) -> None:
    """Check that the memory is free, then allocate: a captured graph writes to the memory of its
    step."""
    assert self._states is None
    make_room(self, num_tokens)


def the_most(
    lengths: DraftLengths, records: Sequence[DraftRecord], others: int, prefilled: int, most: int
) -> list[int]:
    """Replace `DraftLengths.choose`: these heads are wrong, and would not be used for long."""
    return [min(record.limit, most // len(records)) for record in records]


@pytest.mark.more
@pytest.mark.parametrize(
    "kind",
    ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mtp", "medusa"))],
)
async def test_heads_change_no_token_and_draft_by_all_states(
    models: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await reference(models)
    cuda_is_the_host(monkeypatch)
    monkeypatch.setattr(DraftLengths, "choose", the_most)
    monkeypatch.setattr(Decoder, "make_room", room_of_its_own)
    made = drafts_of_heads(kind, monkeypatch)
    speculation = Speculation(drafter=f"{kind}:path={models / kind}", max_tokens=3)
    target = str(models / "target")
    async with Engine(target, speculation=speculation, num_host_pages=8, **ON_DEVICE) as engine:
        for prompt, params, token_ids in zip(PROMPTS, PARAMS, expected, strict=True):
            made.clear()
            assert (await engine.generate(prompt, params)).token_ids == token_ids
            if params.temperature == 0:
                assert check_drafts(models, kind, made, [*prompt, *token_ids]) >= 6
        assert engine.stats().drafter_faults_total == 0
        facts = engine.dump()["model"]["draft"]
    columns = facts["state_bytes"] // (33 * 4 * 4)  # one page is for padding
    assert columns % tiny_models.CONFIGS["llama"]["hidden_size"] == 0
    assert facts["host_state_bytes"] == 8 * 4 * 4 * columns


class Peaks(HostCounts):
    """A device whose measurements give these peaks, one after the other, in bytes."""

    def __init__(self, total: int, taken: int, peaks: Sequence[int]) -> None:
        super().__init__(total, taken, 0)
        self.peaks = peaks
        self.decoder: Decoder | None = None
        """Decoder whose kept states count as held."""
        self.before = 0

    def reset_peak(self) -> None:
        super().reset_peak()
        self.before = self.use().held

    def use(self) -> MemoryUse:
        use, kept = super().use(), self.decoder and self.decoder._states
        if kept is not None:
            use = use._replace(free=use.free - kept.nbytes, held=use.held + kept.nbytes)
        return use._replace(peak=self.before + self.peaks[max(0, self.resets - 1)])


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "peaks"),
    [
        ("eagle3", (3000, 7000)),
        pytest.param("model", (8000, 100), marks=pytest.mark.slow),
        pytest.param("medusa", (8000, 9000), marks=pytest.mark.slow),
    ],
)
async def test_memory_is_counted_of_what_drafts(
    models: Path, kind: str, peaks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is counted for the draft's largest batch, if that exceeds a step's, and for its
    part of each page, padding included. If it runs out all the same, draft tokens are left out."""
    backend, pages, taken = CudaBackend("cpu"), 40, 5000
    config = EngineConfig(
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        memory_utilization=0.5,
        num_host_pages=3,
        graph_sizes=(),
        speculation=Speculation(drafter=kind, max_tokens=2),
    )
    path = models / ("small" if kind == "model" else kind)

    def read(directory: Path) -> ReadWeights:
        options: dict[str, Any] = {"dtype": "float32", "formats": backend.formats}
        with WeightReading(model_files(directory), **options) as reading:
            return reading.read()

    found: AnyReadDraft
    if kind == "model":
        drafter = ModelDrafter(path=str(path))
        found = ReadDraft(drafter, path, read(path), None)
    else:
        named = Eagle3Drafter if kind == "eagle3" else MedusaDrafter
        found = ReadDraftHead(named(path=str(path)), ReadHead.of(path))

    def placed(memory: HostCounts) -> Any:
        placement = CudaPlacement(HostDevice(), backend, memory)
        weights = read(models / "target")
        kept = found.kept_layers(weights.config)
        decoder = placement.load(weights, config, kept)
        draft = placement.load_draft(found, decoder, config)
        one = decoder.kv_shape(1, config.page_size).bytes_per_page + draft.bytes_per_page
        return placement, decoder, draft, one

    *_, one = placed(HostCounts(1, 0, 0))
    if kind == "model":
        found = ReadDraft(drafter, path, read(path), None)  # its weights are used up
    memory = Peaks(2 * (taken + max(peaks) + (pages + 1) * one), taken, peaks)
    placement, decoder, draft, _ = placed(memory)
    memory.decoder = decoder
    with placement.within():
        model = allocated(placement, decoder, config, 3, draft)
    follower = model.drafter
    assert follower is not None
    assert memory.resets == 2
    assert model.num_pages == pages
    facts = follower.facts
    beside = facts.get("kv_cache_bytes", 0) + facts.get("state_bytes", 0)
    assert model.cache.storage.nbytes + beside == (pages + 1) * one
    if follower.states is not None:
        assert facts["host_state_bytes"] == 3 * draft.bytes_per_host_page > 0

    def no_memory(*args: Any) -> Any:
        raise MemoryError("draft_tokens")

    monkeypatch.setattr(type(follower), "draft_all", no_memory)
    assert [*found.drafter.draft_all([0, 1], [2, 2])] == [(), ()]


async def test_rejection_sampling_is_refused_before_anything_is_read(
    models: Path, device: HostDevice
) -> None:
    speculation = Speculation(drafter=f"model:path={models / 'small'}", acceptance="rejection")
    with pytest.raises(ConfigError, match=r'acceptance must be "match" where a draft .* cuda'):
        async with Engine(str(models / "target"), speculation=speculation, **ON_DEVICE):
            pass
