"""A model without weights that notices every wrong page.

Its next token is a hash of all the KV that its pages hold for the sequence, read through the page
table of the step. A page that was given away too early, written twice, or mixed up between
sequences therefore changes the tokens, and `expected_tokens` says what they should have been.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt
import tokenizers

from aioserve.config import EngineConfig
from aioserve.execution.plan import PENDING_TOKEN, StepOutcome, StepPlan, WorkItem
from aioserve.execution.runner import LoadedModel, ModelLimits
from aioserve.request import SamplingParams
from aioserve.text.tokenizer import Tokenizer

__all__ = ["FakeDevice", "FakeModel", "FakeRunner", "byte_tokenizer", "expected_tokens"]

VOCAB_SIZE = 256
"""One token per byte."""

MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
SHIFT = np.uint64(32)


def expected_tokens(prompt_ids: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The `count` tokens that follow `prompt_ids`, computed without pages."""
    ids = list(prompt_ids)
    for _ in range(count):
        positions = np.arange(len(ids), dtype=np.uint64)
        ids.append(_next_token(_entries(np.array(ids, np.uint64), positions), seed))
    return ids[len(prompt_ids) :]


def byte_tokenizer() -> Tokenizer:
    """Byte `b` of a text has the id `b`."""
    alphabet = {_byte_char(byte): byte for byte in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, source="byte tokenizer")


class FakeDevice:
    """Pages and last tokens of the fake model, and one step at a time. Synchronous."""

    def __init__(self, num_pages: int, page_size: int, num_slots: int) -> None:
        self._kv = np.zeros((num_pages, page_size), np.uint64)
        self._last_tokens = np.zeros(num_slots, np.int64)
        self._page_size = page_size

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Write the KV of every item, then sample from what the pages hold."""
        for item in plan.items:
            self._write(item)
        return StepOutcome(plan.step, tuple(self._sample(item) for item in plan.items))

    def _write(self, item: WorkItem) -> None:
        ids = np.array(item.token_ids, np.int64)
        if len(ids) != item.count:
            raise ValueError(f"item of {item.count} tokens brings {len(ids)} ids")
        ids[ids == PENDING_TOKEN] = self._last_tokens[item.slot]
        positions = np.arange(item.start, item.start + item.count)
        pages = item.page_ids[positions // self._page_size]
        entries = _entries(ids.astype(np.uint64), positions.astype(np.uint64))
        self._kv[pages, positions % self._page_size] = entries

    def _sample(self, item: WorkItem) -> int:
        if item.sampling is None:
            return PENDING_TOKEN
        end = item.start + item.count
        pages = item.page_ids[: -(-end // self._page_size)]
        token_id = _next_token(self._kv[pages].reshape(-1)[:end], item.seed)
        self._last_tokens[item.slot] = token_id
        return token_id


class FakeRunner:
    """Runs a `FakeDevice` on the event loop's clock, one step after the other."""

    def __init__(self, device: FakeDevice, model: FakeModel) -> None:
        self.device = device
        self.wake_delays_seconds: deque[float] = deque()
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._free_at_seconds = 0.0
        self._launched = 0

    def launch(self, plan: StepPlan) -> Awaitable[StepOutcome]:
        future: asyncio.Future[StepOutcome] = self._loop.create_future()
        began = max(self._loop.time(), self._free_at_seconds)
        self._free_at_seconds = began + self._model.step_seconds(plan)
        self._loop.call_at(self._free_at_seconds, self._execute, plan, future, self._launched)
        self._launched += 1
        return future

    async def aclose(self) -> None:
        """Nothing is left to free."""

    def _execute(self, plan: StepPlan, future: asyncio.Future[StepOutcome], index: int) -> None:
        if future.done():
            return
        try:
            outcome = self.device.execute(plan)
            outcome = self._model.disturb(index, plan, outcome)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(outcome)


def _undisturbed(index: int, plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
    return outcome


class FakeModel:
    """Give it to `Engine(model=...)`.

    `step_seconds(plan)` says how long a step takes. `disturb(index, plan, outcome)` may raise or
    change the outcome of the `index`-th step, to plant faults.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_model_len: int = 256,
        eos_token_ids: frozenset[int] = frozenset(),
        step_seconds: Callable[[StepPlan], float] = lambda plan: 0.0,
        disturb: Callable[[int, StepPlan, StepOutcome], StepOutcome] = _undisturbed,
    ) -> None:
        self.num_pages = num_pages
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.step_seconds = step_seconds
        self.disturb = disturb

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        """As an engine calls it; the engine's `num_pages` and `max_model_len` take precedence."""
        num_pages = config.num_pages or self.num_pages
        device = FakeDevice(num_pages, config.page_size, num_slots)
        return LoadedModel(
            name="fake",
            runner=FakeRunner(device, self),
            limits=ModelLimits(
                vocab_size=VOCAB_SIZE,
                max_model_len=min(
                    config.max_model_len or self.max_model_len, num_pages * config.page_size
                ),
                num_pages=num_pages,
                eos_token_ids=self.eos_token_ids,
            ),
            defaults=SamplingParams(temperature=0.0),
            tokenizer=byte_tokenizer(),
            chat_template=None,
            description={"architecture": "fake"},
        )


def _entries(
    ids: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """What the KV of each token holds: it depends on the token and its position."""
    return _scatter(ids * np.uint64(0x100000001B3) + positions + np.uint64(1))


def _next_token(entries: npt.NDArray[np.uint64], seed: int) -> int:
    """Depends on every entry and on their order."""
    weights = np.arange(1, 2 * len(entries), 2, dtype=np.uint64)
    mixed = _scatter(np.atleast_1d((entries * weights).sum(dtype=np.uint64) ^ np.uint64(seed)))
    return int(mixed[0] % np.uint64(VOCAB_SIZE))


def _scatter(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> SHIFT)) * MULTIPLIER
    values = (values ^ (values >> SHIFT)) * MULTIPLIER
    return values ^ (values >> SHIFT)


def _byte_char(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [b for b in range(256) if b not in printable].index(byte))
