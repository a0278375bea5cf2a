"""A model without weights for `Engine(model=...)`: whole engines in tests, without a device.

It computes on a `FakeDevice`, so a page that was given away too early, written twice or mixed up
between sequences changes the tokens. The right ones are those of `expected_tokens`. Or it delivers
what a test has written, on a `ScriptedDevice`. Faults of its steps are values that it is given.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.execution.runner import LoadedModel, ModelLimits
from aioserve.isolation import shown
from aioserve.paging.pages import tokens_of_sequence
from aioserve.request import SamplingParams
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import StepPlan
from aioserve.testing.answers import Answers, FakeRequest, GivenAnswers
from aioserve.testing.byte_tokenizer import TURN_ENDS, byte_tokenizer, chat_tokenizer
from aioserve.testing.chat_template import chat_template
from aioserve.testing.embeddings import Embeddings, TextEmbedder, vector_of
from aioserve.testing.fake_device import VOCAB_SIZE, FakeDevice, expected_tokens
from aioserve.testing.scripted_device import ScriptedDevice
from aioserve.testing.scripts import Scripts

__all__ = [
    "FakeDevice",
    "FakeModel",
    "FakeRequest",
    "FakeRunner",
    "Fault",
    "Faults",
    "PlantedError",
    "byte_tokenizer",
    "expected_tokens",
    "random_step_seconds",
]

HASHED_SIZE = 64, 256
"""Pages, and tokens of a context, for tests that look at each page."""
SCRIPTED_SIZE = 8192, 32_768
TOOL_PARSERS = ("auto", "none", "hermes")


class PlantedError(Exception):
    """Raised by a step that was to fail."""


class Fault(Enum):
    """One way in which a step goes wrong."""

    LAUNCH_RAISES = "launch raises"
    """No part of the step is done."""
    STEP_RAISES = "step raises"
    """A part of its copies and KV writes is done, from nothing to everything."""
    BAD_ROW = "bad row"
    """The logits of one row that samples are NaN."""
    SLOW = "slow"
    """The step takes `slow_seconds` longer."""


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Launches that go wrong, and their faults.

    Launches numbered in `at`, counted from 0, have the faults there. Others have faults by chance,
    at the `rates` (0 to 1, together at most 1). Everything about a launch is drawn from `seed` and
    its number.
    """

    at: Mapping[int, Fault] = {}
    rates: Mapping[Fault, float] = {}
    slow_seconds: float = 1.0
    seed: int = 0

    def draw(self, launch: int) -> tuple[Fault | None, random.Random]:
        """Return the fault of a launch, if any, and the random source of its details."""
        source = random.Random(self.seed * 0x9E3779B1 + launch)
        chance = source.random()
        fault = self.at.get(launch)
        if fault is None:
            for candidate, rate in self.rates.items():
                chance -= rate
                if chance < 0:
                    return candidate, source
        return fault, source


def random_step_seconds(low: float, high: float, *, seed: int = 0) -> Callable[[StepPlan], float]:
    """Return a `step_seconds` for `FakeModel`: each step takes between `low` and `high` seconds."""
    source = random.Random(seed)
    return lambda plan: source.uniform(low, high)


ItemPages = list[list[npt.NDArray[np.int32]]]
"""Pages of each group that each item of a plan names."""
"""Page table of each slot: int32 `[pages]`."""


class _Launched(msgspec.Struct):
    plan: StepPlan
    future: asyncio.Future[StepOutcome]
    index: int
    fault: Fault | None
    source: random.Random
    pages: ItemPages
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
        self._page_tables = SlotPageTables(device.num_slots, device.num_groups)
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._free_at_seconds = 0.0
        self._num_launched = 0

    @property
    def copies_in_flight(self) -> list[PageCopy]:
        """Copies of steps that are launched and not done."""
        return [copy for launched in self._in_flight for copy in launched.plan.copies]

    @property
    def pages_in_flight(self) -> list[npt.NDArray[np.int32]]:
        """Pages that items of steps in flight name."""
        return [pages for one in self._in_flight for of_item in one.pages for pages in of_item]

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        index = self._num_launched
        self._num_launched += 1
        fault, source = self._model.faults.draw(index)
        if fault is Fault.LAUNCH_RAISES:
            raise PlantedError(f"launch {index}")
        self._page_tables.take(plan)
        pages = [
            [own.copy() for own in self.device.pages_of(item, self._page_tables)]
            for item in plan.items
        ]
        for launched in self._in_flight:
            _check_fence(launched, plan, pages, self.device)
        seconds = self._model.step_seconds(plan)
        if fault is Fault.SLOW:
            seconds += self._model.faults.slow_seconds
        future: asyncio.Future[StepOutcome] = self._loop.create_future()
        self._free_at_seconds = max(self._loop.time(), self._free_at_seconds) + seconds
        self._in_flight.append(_Launched(plan, future, index, fault, source, pages, masks))
        self._loop.call_at(self._free_at_seconds, self._execute_next)
        return future

    async def aclose(self) -> None:
        """Do nothing: nothing is left to free."""

    def _execute_next(self) -> None:
        """Execute the next step in order; timers of one moment may fire in any order."""
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


def _check_fence(earlier: _Launched, plan: StepPlan, pages: ItemPages, device: FakeDevice) -> None:
    """Raise ValueError if `plan` writes to a page that `earlier`, still in flight, names for other
    slots only.

    While a step is in flight, its slots aren't reused.
    """
    named: dict[int, set[int]] = {}
    for item, of_item in zip(earlier.plan.items, earlier.pages, strict=True):
        for page in np.concatenate(of_item).tolist():
            named.setdefault(page, set()).update({item.slot, *(row.slot for row in item.rows)})
    for item, of_item in zip(plan.items, pages, strict=True):
        written = [own[-device.num_written(item) :] for own in of_item]
        for page in np.concatenate(written).tolist():
            owners = named.get(page)
            if owners and item.slot not in owners:
                raise ValueError(
                    f"step {plan.step} writes page {page} for slot {item.slot}, which step "
                    f"{earlier.plan.step}, still in flight, names for slots {sorted(owners)}"
                )


def _with_a_bad_row(plan: StepPlan, outcome: StepOutcome, source: random.Random) -> StepOutcome:
    if not plan.num_rows:
        return outcome
    row = source.randrange(plan.num_rows)
    counts = [outcome.token_counts.get(index, 1) for index in range(plan.num_rows)]
    first, count = sum(counts[:row]), counts[row]
    ids = outcome.token_ids  # none of the row's tokens counts, and one stands there
    logprobs = {
        at if at < first else at + 1 - count: told
        for at, told in outcome.logprobs.items()
        if not first <= at < first + count
    }
    return msgspec.structs.replace(
        outcome,
        token_ids=(*ids[:first], 0, *ids[first + count :]),
        token_counts={other: n for other, n in outcome.token_counts.items() if other != row},
        row_errors={row: "the logits are NaN"},
        logprobs=logprobs,
    )


def _undisturbed(index: int, plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
    return outcome


class FakeModel:
    """Model for `Engine(model=...)`.

    Without `answers` and `embeddings` it draws tokens that are a hash of all that its pages hold
    (`expected_tokens`), for tests of plugins. With one of them it stands in for a model in tests of
    a program. It then has a chat template (ChatML, with tools as Hermes calls them). Each token of
    an answer is a byte that the engine's own steps bring.

    `answers`: a text, or a call `{"name": ..., "arguments": ...}`, answers every request. Each
    request takes the next of a sequence or an iterator, in the order in which the engine takes
    requests. A request fails if none is left, or if its answer calls a tool that isn't offered. A
    function gets the messages, a list of dicts, or the text of a prompt that is no chat, and
    returns the answer. It is called on the event loop. An answer may be a list of texts and calls.
    All `n` answers of a request are the same, and no text of an answer is a special token. An
    answer fails its request if the request's structured output, tools or other parameters forbid
    it: the error says where.

    `embeddings` makes the vector of a text, which the engine scales to length 1 unless told
    otherwise. By default vectors have 64 numbers, and texts that share words have near ones.

    `requests` has a record of each request for an answer, a `FakeRequest`, oldest first.

    By default `num_pages` is 64 and `max_model_len` 256, or 8,192 and 32,768 if it stands in for a
    model. A step takes `step_seconds(plan)`, and `faults` say which launches go wrong.
    With `num_window_groups`, that many groups of its layers keep only the last `window` tokens. To
    plant other kinds of faults, `disturb(index, plan, outcome)` may raise or change the outcome of
    the `index`-th step.

    Raises `ConfigError` for invalid `answers`, `embeddings` and `step_seconds`, and for
    `eos_token_ids` beside answers, which end by themselves.
    """

    def __init__(
        self,
        *,
        answers: GivenAnswers | None = None,
        embeddings: TextEmbedder | None = None,
        num_pages: int | None = None,
        max_model_len: int | None = None,
        num_window_groups: int = 0,
        window: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        step_seconds: Callable[[StepPlan], float] = lambda plan: 0.0,
        faults: Faults = Faults(),  # noqa: B008
        disturb: Callable[[int, StepPlan, StepOutcome], StepOutcome] = _undisturbed,
    ) -> None:
        if not callable(step_seconds):
            raise ConfigError(
                f"step_seconds: must be a function of a step's plan, got {shown(step_seconds)}"
            )
        self._is_scripted = answers is not None or embeddings is not None
        if self._is_scripted and eos_token_ids:
            raise ConfigError(
                f"eos_token_ids must be left out with answers, got {shown(eos_token_ids)}: each "
                "ends by itself",
                argument="eos_token_ids",
                value=eos_token_ids,
            )
        self._answers = None if answers is None else Answers(answers)
        self._embeddings = Embeddings(embeddings or vector_of)
        self.requests: list[FakeRequest] = []
        pages, length = SCRIPTED_SIZE if self._is_scripted else HASHED_SIZE
        self.num_pages: int = pages if num_pages is None else num_pages
        self.max_model_len: int = length if max_model_len is None else max_model_len
        self.num_window_groups = num_window_groups
        self.window = window
        self.eos_token_ids = eos_token_ids
        self.step_seconds = step_seconds
        self.faults = faults
        self.disturb = disturb

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        """Load for an engine, whose `num_pages` and `max_model_len` take precedence.

        Raises `ConfigError` for a `tool_parser` that doesn't read the calls of answers.
        """
        num_pages = config.num_pages or self.num_pages
        groups = {"num_window_groups": self.num_window_groups, "window": self.window}
        device = (ScriptedDevice if self._is_scripted else FakeDevice)(
            num_pages,
            config.page_size,
            num_slots,
            config.num_host_pages,
            num_window_groups=self.num_window_groups,
            window=self.window,
        )
        loaded = LoadedModel(
            name="fake",
            runner=FakeRunner(device, self),
            limits=ModelLimits(
                vocab_size=VOCAB_SIZE,
                max_model_len=min(
                    config.max_model_len or self.max_model_len,
                    tokens_of_sequence(num_pages, config.page_size, **groups),
                ),
                num_pages=num_pages,
                eos_token_ids=self.eos_token_ids,
                **groups,
            ),
            defaults=SamplingParams(temperature=0.0),
            tokenizer=byte_tokenizer(),
            chat_template=None,
            description={"architecture": "fake"},
            take_drafter=device.take_drafter,
        )
        return self._scripted(loaded, config) if self._is_scripted else loaded

    def _scripted(self, loaded: LoadedModel, config: EngineConfig) -> LoadedModel:
        """Return the model with the parts that programs need."""
        if config.tool_parser not in TOOL_PARSERS:
            raise ConfigError(
                f"tool_parser must be one of {', '.join(TOOL_PARSERS)} with a FakeModel that has "
                f"answers, got {config.tool_parser!r}",
                argument="tool_parser",
                value=config.tool_parser,
            )
        tokenizer = chat_tokenizer()
        (end_id,) = tokenizer.encode(TURN_ENDS)
        scripts = Scripts(self._answers, self._embeddings, tokenizer, end_id, self.requests)
        return msgspec.structs.replace(
            loaded,
            limits=msgspec.structs.replace(
                loaded.limits,
                vocab_size=tokenizer.vocab_size,
                eos_token_ids=frozenset({end_id}),
            ),
            tokenizer=tokenizer,
            chat_template=chat_template(),
            script=scripts.script,
            takes_forced=False,
        )
