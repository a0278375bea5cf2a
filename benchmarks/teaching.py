"""Classic teaching workload, and an engine that records its steps.

The model has random weights: 4 layers, 4 heads, 128 wide, 256 ids. Answers are greedy and go on
past end-of-sequence ids, so they depend only on the prompts. The number of their steps and tokens
depends only on the settings.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aioserve import Engine, SamplingParams
from aioserve.config import EngineConfig
from aioserve.execution import loading
from aioserve.execution.runner import LoadedModel, Runner
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.testing.random_model import write_random_model

VOCAB_SIZE = 256
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Step:
    """One step as it was launched."""

    tokens: dict[int, int]
    """Tokens computed for each request, by its place in the order of submission."""
    sampled: frozenset[int]
    """Requests that got a token."""
    kv_bytes: int
    """Bytes of the pages that requests hold; shared pages count once."""


@dataclass(frozen=True)
class Answer:
    """Result of one request."""

    token_ids: tuple[int, ...]
    submitted: float
    token_times: tuple[float, ...]
    """Times at which tokens were read; like `submitted`, on the clock of `time.perf_counter`."""


class WatchedEngine:
    """Engine whose steps are recorded from the moment that `steps` is emptied."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[Step] = []
        self._page_bytes = 0
        self._num_warm_up = 0

    @property
    def kv_bytes_per_token(self) -> int:
        return self._page_bytes // self.engine.config.page_size

    async def warm_up(self) -> None:
        """Serve one request in a namespace of its own, so that no other finds its pages; then
        begin.
        """
        model = self.engine.dump()["model"]
        self._page_bytes = model["kv_cache_bytes"] // self.engine.limits.num_pages
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        await self.engine.generate(list(range(64)), params, cache_salt="warm-up")
        self.steps.clear()
        self._num_warm_up = 1

    def launched(self, plan: StepPlan) -> None:
        first = 1 + self._num_warm_up  # sequences are numbered from 1, in order of submission
        self.steps.append(
            Step(
                {item.sequence_id - first: item.count for item in plan.items},
                frozenset(item.sequence_id - first for item in plan.items if item.rows),
                self.engine.stats().pages_held_by_requests * self._page_bytes,
            )
        )

    def answer(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        on_token: Callable[[int], None] = lambda count: None,
    ) -> Awaitable[Answer]:
        """Submit a request now; await its answer, which has `num_tokens` or raises RuntimeError.

        `on_token` is called with the number of tokens that have come.
        """
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        submitted = time.perf_counter()
        stream = self.engine.stream(list(prompt), params)

        async def read() -> Answer:
            ids, times = [], []
            async with stream:
                async for token in stream:
                    ids.append(token.id)
                    times.append(time.perf_counter())
                    on_token(len(ids))
            if len(ids) != num_tokens:
                raise RuntimeError(f"an answer has {len(ids)} tokens instead of {num_tokens}")
            return Answer(tuple(ids), submitted, tuple(times))

        return read()


@asynccontextmanager
async def watched_engine(model: Path, **options: Any) -> AsyncIterator[WatchedEngine]:
    """Yield an engine in float32 that has served one request.

    Steps don't overlap, so that each is planned with all results of the one before.
    """
    source = _Source(model)
    async with Engine(source, dtype="float32", overlap=False, **options) as engine:
        watched = WatchedEngine(engine)
        source.launched = watched.launched
        await watched.warm_up()
        yield watched


def write_model(directory: Path) -> Path:
    """Write the model; return its directory."""
    return write_random_model(directory, CONFIG, dtype="float32")


def random_ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCAB_SIZE) for _ in range(count)]


def teaching_prompts(num_requests: int, prefix_tokens: int) -> list[list[int]]:
    """Return prompts with a common system prompt, and a query of 10 to 29 tokens of each
    one's own.
    """
    source = random.Random(0)
    prefix = random_ids(source, prefix_tokens)
    return [prefix + random_ids(source, source.randint(10, 29)) for _ in range(num_requests)]


class _Source:
    """Loads the model, and reports each step that is launched."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.launched: Callable[[StepPlan], None] = lambda plan: None

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        loaded = await loading.load(str(self.model), config, num_slots=num_slots)
        return msgspec.structs.replace(loaded, runner=_Runner(loaded.runner, self))


class _Runner:
    def __init__(self, runner: Runner, source: _Source) -> None:
        self.runner = runner
        self.source = source

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        self.source.launched(plan)
        return self.runner.launch(plan, masks)

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        return self.runner.wake_delays_seconds

    async def aclose(self) -> None:
        await self.runner.aclose()
