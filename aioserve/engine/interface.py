"""`EngineLike`: the contract between an engine and whatever serves it.

    server ──► EngineLike ◄── Engine           a model in this process
                          ◄── a router         several engines as one
                          ◄── a remote engine  a model elsewhere
                          ◄── a test double

It consists of methods and two frozen values, `config` and `facts`. It must not know how an engine
works.
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
    """Facts about a loaded model, as its engine serves it. They never change."""

    name: str
    """Name, hub id or path of the loaded model, as it was given."""
    limits: ModelLimits
    """Vocabulary, context length and KV pages."""
    description: Mapping[str, Any]
    """Name, architecture, dtype and weights, as `Engine.dump()` has them under "model"."""
    tokenizer: Tokenizer | None
    """Tokenizer of the model. Without one, prompts and answers are token ids only."""
    has_chat_template: bool
    """True if prompts may be lists of messages."""
    template_reads: frozenset[TemplateName]
    """Names that the chat template reads. Empty without a template."""
    reads_tool_calls: bool
    """Value of `Engine.reads_tool_calls`."""
    calls_in_channels: bool
    """Value of `Engine.calls_in_channels`."""
    reasons: bool
    """Value of `Engine.reasons`."""
    generates: bool
    """True if the model generates text; False if it only makes embeddings."""
    retrieval: Retrieval
    """Defaults for embedding requests."""
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
        """Prompt that asks for the text between `prefix` and `suffix` (fill in the middle).

        None without a tokenizer, or if the tokenizer has no fill-in tokens.
        """
        form = None if self.tokenizer is None else fill_in_of(self.tokenizer)
        return None if form is None else filled_in(form, prefix, suffix)


class RequestStreamLike(Protocol):
    """Members that every stream of a request has. They mean what they mean in `TokenStream`."""

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
    """Tokens of one request, as `TokenStream` yields them."""

    def __aiter__(self) -> AsyncIterator[Token]: ...
    async def batch(self, min_tokens: int = 1) -> list[Token]: ...


class ChatStreamLike(RequestStreamLike, Protocol):
    """Parts of the answers to messages, as `ChatStream` yields them."""

    @property
    def reasoning_tokens(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[ChatDelta]: ...
    async def batch(self, min_tokens: int = 1, *, by_token: bool = False) -> list[ChatDelta]: ...
    async def completion(self) -> ChatCompletion: ...


class EngineLike(Protocol):
    """An engine that `create_app` can serve. Members mean what they mean in `Engine`, errors
    included.

    `facts` and `stats` raise `EngineClosedError` before the engine is entered. `config` and `state`
    always work. Members are called on the serving event loop, and may block it no longer than those
    of `Engine` do.
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
        tool_parser: ToolParserName | str = "auto",
        reasoning_parser: ReasoningParserName | str = "auto",
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
