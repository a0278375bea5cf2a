"""The contract between the core loop and runners, which compute steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from aioserve.capacity.models import ModelShape
from aioserve.config import EngineConfig
from aioserve.drafting.drafter import Drafter
from aioserve.errors import AioserveError
from aioserve.models.reranking import Reranker
from aioserve.models.retrieval import Retrieval
from aioserve.request import SamplingParams
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.tokenizer import Tokenizer

__all__ = [
    "CheckedRequest",
    "LoadedModel",
    "ModelLimits",
    "ModelSource",
    "Runner",
    "RunnerFailedError",
    "Text",
]


class RunnerFailedError(AioserveError):
    """The runner can compute nothing any more, and says why. The engine ends with this reason."""


class Runner(Protocol):
    """Computes steps in the order in which they are launched."""

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        """Start a step without blocking. Several may be in flight; each is awaited once.

        `masks` are for its rows whose slots have structured output, and may come later. The
        awaitable raises what the step raised, and `RunnerFailedError` if no later step can succeed
        either. Called on the event loop.
        """
        ...

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        """Recent delays between the end of a step and the event loop hearing of it."""
        ...

    async def aclose(self) -> None:
        """Wait for launched steps to end, and free the device."""
        ...


class ModelLimits(msgspec.Struct, frozen=True):
    """Limits of a loaded model and its KV cache."""

    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and answer together. Fits the KV cache."""
    num_pages: int
    eos_token_ids: frozenset[int]
    num_window_groups: int = 0
    """Groups of layers that drop pages outside the window, as in `KVLayout`."""
    window: int = 0
    """Positions that these keep, in tokens; 0 if there are none."""


class Text(msgspec.Struct, frozen=True):
    """Conversion between a model's tokens and text, as far as it is known."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    why_no_tokenizer: str
    retrieval: Retrieval = Retrieval()
    reranker: Reranker | None = None
    end_ids: tuple[int, ...] | None = None
    """Tokens that end an answer; None means those of the config."""


class CheckedRequest(msgspec.Struct, frozen=True):
    """A checked request before its prompt is encoded."""

    prompt: Any
    """Text, a `Conversation`, token ids as an int32 array, or a prompt with a continuation."""
    params: SamplingParams
    answers: bool
    """True for a request that wants answers; False for beams, and for results of the prompt
    alone."""
    tool_parser: str | None
    """Name of the tool parser that reads calls in its answers, if any."""


class LoadedModel(msgspec.Struct, frozen=True):
    """A model that is ready to serve."""

    name: str
    runner: Runner
    limits: ModelLimits
    defaults: SamplingParams
    """Sampling of requests without parameters, from the model's makers if they say it."""
    tokenizer: Tokenizer | None
    """Tokenizer of the model. Without one it takes and gives only token ids."""
    chat_template: ChatTemplate | None
    description: dict[str, Any]
    """Facts for `Engine.dump()`: architecture, dtype, bytes."""
    why_no_tokenizer: str = "it was loaded without a tokenizer"
    """Message about a missing tokenizer, and its remedy."""
    processors: list[Callable[[str], Any]] = []
    """Makers of logits processors for the runner, by number. The engine fills the list."""
    take_drafter: Callable[[Drafter], None] | None = None
    """Gives the runner its drafter, before the first step. None if the runner verifies no draft
    tokens."""
    max_branches: int = 0
    """Most paths of draft tokens beside the first one of a sequence that its runner verifies."""
    pools: bool = True
    """True if its runner returns sums of hidden states, as `WorkItem.pooled` asks for them."""
    generates: bool = True
    """True if it makes logits, which text and scores of continuations need."""
    retrieval: Retrieval = Retrieval()
    """Defaults for embedding requests."""
    says_sampling: bool = True
    """True if the model's makers say how to sample it."""
    reranker: Reranker | None = None
    """Reranker that makes relevances of documents to queries. Without one, embeddings are
    compared."""
    script: Callable[[CheckedRequest], object] | None = None
    """Called with each accepted request, on the event loop and in order. Its result becomes
    `SlotStart.script` of the request's slots."""
    takes_forced: bool = True
    """True if tokens that a grammar forces may be taken although the runner doesn't draw them."""
    shape: ModelShape | None = None
    """Sizes that decide the work of a step; None: they are unknown."""


class ModelSource(Protocol):
    """An object that loads a model, in place of a model's name."""

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        """Load the model. Called on the engine's event loop, which it must not block."""
        ...
