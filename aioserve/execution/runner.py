"""The contract between the core loop and whatever computes steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from aioserve.config import EngineConfig
from aioserve.drafting.drafter import Drafter
from aioserve.errors import AioserveError
from aioserve.models.reranking import Reranker
from aioserve.models.retrieval import Retrieval
from aioserve.request import SamplingParams
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.text.chat import ChatTemplate
from aioserve.text.tokenizer import Tokenizer

__all__ = [
    "Asked",
    "LoadedModel",
    "ModelLimits",
    "ModelSource",
    "Runner",
    "RunnerFailedError",
    "Text",
]


class RunnerFailedError(AioserveError):
    """The runner computes nothing any more, and says why. The engine ends, with this reason."""


class Runner(Protocol):
    """Computes steps in the order in which they are launched."""

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        """Start a step without blocking; several may be in flight, each is awaited once. `masks`
        are of those of its rows whose slots ask for structured output, and may come later.

        The awaitable raises what the step raised, and `RunnerFailedError` where no other step can
        succeed either. Called on the event loop.
        """
        ...

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        """Recent delays between the end of a step and the event loop hearing of it."""
        ...

    async def aclose(self) -> None:
        """Let launched steps end and free the device."""
        ...


class ModelLimits(msgspec.Struct, frozen=True):
    """What a loaded model and its KV cache allow."""

    vocab_size: int
    max_model_len: int
    """Prompt and answer together, in tokens; fits the KV cache."""
    num_pages: int
    eos_token_ids: frozenset[int]
    num_window_groups: int = 0
    """Groups of layers whose pages leave with the window, as in `KVLayout`."""
    window: int = 0
    """Last positions that these keep, in tokens; 0: there are none."""


class Text(msgspec.Struct, frozen=True):
    """How a model's tokens become text, if they do."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    why_no_tokenizer: str
    retrieval: Retrieval = Retrieval()
    reranker: Reranker | None = None
    end_ids: tuple[int, ...] | None = None
    """Tokens that end an answer; None: those that the config names."""


class Asked(msgspec.Struct, frozen=True):
    """A request as its caller gave it, checked, before its prompt is encoded."""

    prompt: Any
    """Text, a `Conversation`, token ids as an int32 array, or a prompt with a continuation."""
    params: SamplingParams
    answers: bool
    """True where answers are asked for; else beams, or something of the prompt alone."""
    tool_parser: str | None
    """Name of what reads calls of tools in its answers; None: nothing does."""


class LoadedModel(msgspec.Struct, frozen=True):
    """A model that is ready to serve."""

    name: str
    runner: Runner
    limits: ModelLimits
    defaults: SamplingParams
    """Sampling of requests without parameters of their own. The model's makers set it if they say
    it."""
    tokenizer: Tokenizer | None
    """None: the model takes and gives token ids alone."""
    chat_template: ChatTemplate | None
    description: dict[str, Any]
    """Facts for `Engine.dump()`: architecture, dtype, bytes."""
    why_no_tokenizer: str = "it was loaded without a tokenizer"
    """Message about a model that has none, and what to do about it."""
    processors: list[Callable[[str], Any]] = []
    """What the runner makes logits processors with, by number: filled by the engine."""
    take_drafter: Callable[[Drafter], None] | None = None
    """Gives its runner what drafts for the items that verify, before the first step; None: its
    runner verifies none."""
    max_branches: int = 0
    """Most paths of draft tokens beside the first one of a sequence that its runner verifies."""
    pools: bool = True
    """Whether its runner gives sums of hidden states, as `WorkItem.pooled` asks for them."""
    generates: bool = True
    """Whether it makes logits, which text and scores of continuations come of."""
    retrieval: Retrieval = Retrieval()
    """How texts are embedded, where a request doesn't say."""
    says_sampling: bool = True
    """True if the model's makers say how it is sampled."""
    reranker: Reranker | None = None
    """What tells the relevance of documents to queries; None: their embeddings are compared."""
    script: Callable[[Asked], object] | None = None
    """Hears of each request that is taken, on the event loop and in order; what it returns is
    `SlotStart.script` of each of its slots."""
    takes_forced: bool = True
    """True if tokens that a grammar forces may be taken although the runner doesn't draw them."""


class ModelSource(Protocol):
    """Something that an engine can load instead of a named model."""

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        """Called on the engine's event loop, which it must not block."""
        ...
