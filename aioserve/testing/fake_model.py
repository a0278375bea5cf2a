"""A model without weights for `Engine(model=...)`: whole engines in tests, without a device.

It computes on a `FakeDevice`, so a page that was given away too early, written twice or mixed up
between sequences changes the tokens; `expected_tokens` says what they should have been.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.execution.runner import LoadedModel, ModelLimits
from aioserve.isolation import shown
from aioserve.kv.pages import pages_for
from aioserve.request import SamplingParams
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import StepPlan
from aioserve.testing.fake_device import VOCAB_SIZE, FakeDevice, expected_tokens
from aioserve.testing.faults import Fault, Faults, PlantedError
from aioserve.text.tokenizer import Tokenizer

__all__ = ["FakeDevice", "FakeModel", "FakeRunner", "byte_tokenizer", "expected_tokens"]


def byte_tokenizer() -> Tokenizer:
    """Byte `b` of a text has the id `b`."""
    alphabet = {_byte_char(byte): byte for byte in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, source="byte tokenizer")


PageTables = dict[int, npt.NDArray[np.int32]]
"""By slot."""


class _Launched(msgspec.Struct):
    plan: StepPlan
    future: asyncio.Future[StepOutcome]
    index: int
    fault: Fault | None
    source: random.Random
    page_ids: PageTables
    """Page tables of the slots whose items it has."""
    masks: LateMasks | None


class FakeRunner:
    """Runs a `FakeDevice` on the event loop's clock, one step after the other.

    A launch raises ValueError for a plan that writes to a page which a step in flight names for
    another slot.
    """

    def __init__(self, device: FakeDevice, model: FakeModel) -> None:
        self.device = device
        self.wake_delays_seconds: deque[float] = deque()
        self._in_flight: deque[_Launched] = deque()
        self._page_tables = SlotPageTables(device.num_slots)
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._free_at_seconds = 0.0
        self._num_launched = 0

    @property
    def copies_in_flight(self) -> list[PageCopy]:
        """What steps copy that are launched and not done."""
        return [copy for launched in self._in_flight for copy in launched.plan.copies]

    @property
    def pages_in_flight(self) -> list[npt.NDArray[np.int32]]:
        """The page tables of their items."""
        return [page_ids for one in self._in_flight for page_ids in one.page_ids.values()]

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        index = self._num_launched
        self._num_launched += 1
        fault, source = self._model.faults.draw(index)
        if fault is Fault.LAUNCH_RAISES:
            raise PlantedError(f"launch {index}")
        self._page_tables.take(plan)
        slots = [item.slot for item in plan.items]
        page_ids = {slot: self._page_tables.page_ids(slot).copy() for slot in slots}
        for launched in self._in_flight:
            _check_fence(launched, plan, page_ids, self.device.page_size)
        seconds = self._model.step_seconds(plan)
        if fault is Fault.SLOW:
            seconds += self._model.faults.slow_seconds
        future: asyncio.Future[StepOutcome] = self._loop.create_future()
        self._free_at_seconds = max(self._loop.time(), self._free_at_seconds) + seconds
        self._in_flight.append(_Launched(plan, future, index, fault, source, page_ids, masks))
        self._loop.call_at(self._free_at_seconds, self._execute_next)
        return future

    async def aclose(self) -> None:
        """Nothing is left to free."""

    def _execute_next(self) -> None:
        """Steps are done in their order, although timers of one moment may fire in any."""
        launched = self._in_flight.popleft()
        if launched.future.done():
            return
        try:
            outcome = self._execute(launched)
        except Exception as error:
            launched.future.set_exception(error)
        else:
            launched.future.set_result(outcome)

    def _execute(self, launched: _Launched) -> StepOutcome:
        plan = launched.plan
        if launched.fault is Fault.STEP_RAISES:
            parts = launched.source.randint(0, len(plan.copies) + len(plan.items))
            self.device.execute_in_part(plan, parts)
            raise PlantedError(f"step {plan.step}, after {parts} of its copies and items")
        outcome = self.device.execute(plan, launched.masks)
        if launched.fault is Fault.BAD_ROW:
            outcome = _with_a_bad_row(plan, outcome, launched.source)
        return self._model.disturb(launched.index, plan, outcome)


def _check_fence(earlier: _Launched, plan: StepPlan, page_ids: PageTables, page_size: int) -> None:
    """Raise ValueError if `plan` writes to a page that `earlier`, which isn't done, names for
    other slots alone. While a step is in flight, nobody else gets its slots."""
    named: dict[int, set[int]] = {}
    for item in earlier.plan.items:
        for page in earlier.page_ids[item.slot][: pages_for(item.end, page_size)].tolist():
            named.setdefault(page, set()).update({item.slot, *(row.slot for row in item.rows)})
    for item in plan.items:
        end = pages_for(item.end, page_size)
        for page in page_ids[item.slot][item.start // page_size : end].tolist():
            owners = named.get(page)
            if owners and item.slot not in owners:
                raise ValueError(
                    f"step {plan.step} writes page {page} for slot {item.slot}, which step "
                    f"{earlier.plan.step}, still in flight, names for slots {sorted(owners)}"
                )


def _with_a_bad_row(plan: StepPlan, outcome: StepOutcome, source: random.Random) -> StepOutcome:
    if not plan.num_rows:
        return outcome
    bad = {source.randrange(plan.num_rows): "the logits are NaN"}
    return msgspec.structs.replace(outcome, row_errors=bad)


def _undisturbed(index: int, plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
    return outcome


class FakeModel:
    """Give it to `Engine(model=...)`.

    `step_seconds(plan)` says how long a step takes, `faults` which launches go wrong.
    `disturb(index, plan, outcome)` may raise or change the outcome of the `index`-th step, to plant
    faults of other kinds. Raises `ConfigError` for `step_seconds` that is no function.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_model_len: int = 256,
        eos_token_ids: frozenset[int] = frozenset(),
        step_seconds: Callable[[StepPlan], float] = lambda plan: 0.0,
        faults: Faults = Faults(),  # noqa: B008
        disturb: Callable[[int, StepPlan, StepOutcome], StepOutcome] = _undisturbed,
    ) -> None:
        if not callable(step_seconds):
            raise ConfigError(
                f"step_seconds: must be a function of a step's plan, got {shown(step_seconds)}"
            )
        self.num_pages = num_pages
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.step_seconds = step_seconds
        self.faults = faults
        self.disturb = disturb

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        """As an engine calls it; the engine's `num_pages` and `max_model_len` take precedence."""
        num_pages = config.num_pages or self.num_pages
        device = FakeDevice(num_pages, config.page_size, num_slots, config.num_host_pages)
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


_PRINTABLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]


def _byte_char(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies."""
    return chr(byte) if byte in _PRINTABLE else chr(0x100 + _OTHERS.index(byte))
