"""`EngineLike`: the contract between an engine and whoever serves it.

    server ──► EngineLike ◄── Engine           a model in this process
                          ◄── a router         several engines as one
                          ◄── a remote engine  a model elsewhere
                          ◄── a test double

It is verbs, and two frozen values: `config` and `facts`. Knows values alone; must not know how an
engine works.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, Unpack

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig, ReasoningParserName, ToolParserName
from aioserve.engine.chat_answers import ChatCompletion, ChatDelta
from aioserve.engine.options import (
    BeamSearchOptions,
    EarlyStopping,
    EmbedOptions,
    EncodeOptions,
    Pooling,
    PromptOnlyOptions,
    StreamOptions,
)
from aioserve.engine.prompts import Prompt
from aioserve.engine.stats import EngineStats
from aioserve.errors import EngineState
from aioserve.execution.runner import ModelLimits
from aioserve.models.retrieval import Retrieval
from aioserve.plugins import Observer
from aioserve.request import Beam, FinishReason, Logprobs, SamplingParams, Token, Usage
from aioserve.text.fill_in import fill_in_of, filled_in
from aioserve.text.messages import Message
from aioserve.text.tokenizer import Tokenizer
from aioserve.timings import Timings

__all__ = [
    "ChatStreamLike",
    "EngineLike",
    "ModelFacts",
    "RequestStreamLike",
    "TemplateName",
    "TokenStreamLike",
]

TemplateName = Literal[
    "developer", "enable_thinking", "reasoning_effort", "thinking", "thinking_budget", "tools"
]
"""Roles and variables of chat templates that a server asks for."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model, as its engine serves it; none of them changes."""

    name: str
    """Name, hub id or path that was loaded, as it was given."""
    limits: ModelLimits
    """Vocabulary, context length and KV pages."""
    description: Mapping[str, Any]
    """Name, architecture, dtype and weights, as `Engine.dump()` has them under "model"."""
    tokenizer: Tokenizer | None
    """None: prompts and answers are token ids alone."""
    has_chat_template: bool
    """True if prompts may be lists of messages."""
    template_reads: frozenset[TemplateName]
    """Names that the chat template reads; none without one."""
    reads_tool_calls: bool
    """The fact that `Engine.reads_tool_calls` tells."""
    calls_in_channels: bool
    """The fact that `Engine.calls_in_channels` tells."""
    reasons: bool
    """The fact that `Engine.reasons` tells."""
    generates: bool
    """True if the model makes text; False if it makes embeddings alone."""
    retrieval: Retrieval
    """Defaults of embeddings."""
    tells_relevance: bool
    """True if the model is a reranker, so that `EngineLike.relevance` takes pairs of texts."""
    default_params: SamplingParams
    """Sampling of requests without parameters."""
    says_sampling: bool
    """True if the model's files set `default_params`."""

    def reads(self, name: TemplateName) -> bool:
        """True if the chat template reads that role or variable."""
        return name in self.template_reads

    def filled_in(self, prefix: str, suffix: str) -> str | None:
        """The prompt of the gap between two texts (FIM); None where the tokenizer has no marks of
        one, or there is no tokenizer."""
        form = None if self.tokenizer is None else fill_in_of(self.tokenizer)
        return None if form is None else filled_in(form, prefix, suffix)


class RequestStreamLike(Protocol):
    """The part that all streams of a request share. Properties and methods mean what they mean in
    `TokenStream`."""

    @property
    def request_id(self) -> str: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]: ...
    @property
    def stop_reasons(self) -> tuple[int | str | None, ...]: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...
    @property
    def prompt_logprobs(self) -> tuple[Logprobs | None, ...]: ...
    @property
    def timings(self) -> Timings: ...
    async def started(self) -> None: ...
    def close(self) -> None: ...


class TokenStreamLike(RequestStreamLike, Protocol):
    """The tokens of one request, as `TokenStream` has them."""

    def __aiter__(self) -> AsyncIterator[Token]: ...
    async def batch(self, min_tokens: int = 1) -> list[Token]: ...


class ChatStreamLike(RequestStreamLike, Protocol):
    """The parts of the answers to messages, as `ChatStream` has them."""

    @property
    def reasoning_tokens(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[ChatDelta]: ...
    async def batch(self, min_tokens: int = 1, *, by_token: bool = False) -> list[ChatDelta]: ...
    async def completion(self) -> ChatCompletion: ...


class EngineLike(Protocol):
    """An engine that `create_app` can serve. Every member means what it means in `Engine`, its
    errors included.

    `facts` and `stats` raise `EngineClosedError` before the engine is entered; `config` and `state`
    are there always. Members are called on the event loop that serves, and block it for no longer
    than those of `Engine`.
    """

    @property
    def config(self) -> EngineConfig: ...
    @property
    def facts(self) -> ModelFacts: ...
    @property
    def state(self) -> EngineState: ...
    def stats(self) -> EngineStats: ...

    # -- requests

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[StreamOptions],
    ) -> TokenStreamLike: ...
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tool_parser: ToolParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
        strict_tools: Sequence[str] = (),
        required_tools: Sequence[str] = (),
        parallel_tool_calls: bool = True,
        max_whitespace: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> ChatStreamLike: ...
    async def beam_search(
        self,
        prompt: Prompt,
        *,
        beam_width: int = 4,
        max_tokens: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        **options: Unpack[BeamSearchOptions],
    ) -> tuple[Beam, ...]: ...
    async def embed_counted(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        **options: Unpack[EmbedOptions],
    ) -> tuple[npt.NDArray[np.float32], Usage]: ...
    async def relevance(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None = None,
        **options: Unpack[PromptOnlyOptions],
    ) -> tuple[npt.NDArray[np.float32], Usage]: ...
    async def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        **options: Unpack[EncodeOptions],
    ) -> list[int]: ...

    # -- while it runs

    def observe(self, observer: Observer) -> Callable[[], None]: ...
    def reset_prefix_cache(self) -> int: ...
    async def drain(self, deadline_seconds: float | None = None) -> int: ...
