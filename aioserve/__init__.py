"""LLM serving inside an asyncio program.

    async with Engine("Qwen/Qwen3-0.6B") as engine:
        async for token in engine.stream("Once upon a time"):
            print(token.text, end="", flush=True)

Importing this package is cheap: torch is imported when an engine loads its model.
"""

from __future__ import annotations

from aioserve.config import (
    Device,
    DType,
    EngineConfig,
    Preemption,
    Quantization,
    Speculation,
)
from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.drafting.heads import Eagle3Drafter, MedusaDrafter, MTPDrafter
from aioserve.drafting.model import ModelDrafter
from aioserve.drafting.ngram import NgramDrafter
from aioserve.drafting.suffix import SuffixDrafter
from aioserve.engine.chat_stream import ChatAnswer, ChatCompletion, ChatDelta, ChatStream
from aioserve.engine.engine import Engine
from aioserve.engine.interface import ChatStreamLike, EngineLike, ModelFacts, TokenStreamLike
from aioserve.engine.llm import LLM
from aioserve.engine.options import (
    BeamSearchOptions,
    EmbedOptions,
    EncodeOptions,
    MessageOptions,
    Pooling,
    PromptOnlyOptions,
    StreamOptions,
)
from aioserve.engine.prompt_only import Score
from aioserve.engine.prompts import Continuation, Prompt
from aioserve.engine.selection import Likelihood, Selection
from aioserve.engine.stats import EngineStats, PhaseStats
from aioserve.engine.stream import TokenStream
from aioserve.errors import (
    AioserveError,
    ConfigError,
    DeadlineExceededError,
    DuplicateRequestError,
    EngineClosedError,
    EngineError,
    EngineFailedError,
    EngineState,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    InvariantError,
    ModelError,
    ModelNotFoundError,
    PluginError,
    PromptTooLongError,
    QueueFullError,
    RequestFailedError,
    RequestRefusedError,
    RequestRejectedError,
    StepError,
    StreamBusyError,
    StreamStalledError,
    TraceError,
    UnknownPolicyError,
    UnparsedError,
    UnsupportedModelError,
    WeightsError,
    WrongLoopError,
)
from aioserve.execution.runner import LoadedModel, ModelLimits, ModelSource
from aioserve.kv.eviction import EvictionStrategy, PageUse
from aioserve.models.families.family import ModelFamily
from aioserve.models.quantization.declared import WeightFormat, WeightPart, WeightReader
from aioserve.plugins import (
    DrafterSpec,
    EvictionSpec,
    LogitsProcessorSpec,
    ModelFamilySpec,
    Observer,
    ObserverSpec,
    PolicySpec,
    ReasoningParserSpec,
    RequestInfo,
    RequestSummary,
    StepInfo,
    StepPart,
    ToolParserSpec,
    WeightFormatSpec,
    hookimpl,
)
from aioserve.request import (
    Beam,
    Completion,
    FinishReason,
    Logprobs,
    Sample,
    SamplingParams,
    Token,
    TopLogprob,
    Usage,
)
from aioserve.sampling.processors import LogitsProcessor
from aioserve.scheduling.policy import (
    Preempt,
    Refusal,
    SchedulingPolicy,
    StepBudget,
    TokenShare,
    Verdict,
)
from aioserve.scheduling.step_times import StepSummary
from aioserve.scheduling.view import Pin, RequestView, SchedulerView
from aioserve.schema_classes import Validates
from aioserve.structured_output import StructuredOutput
from aioserve.text.messages import Message
from aioserve.text.output_parsers.declared import (
    CallFormat,
    CustomCalls,
    JsonCalls,
    ReasoningMarks,
    ToolCallReader,
)
from aioserve.text.output_parsers.parts import ToolCall, ToolCallDelta
from aioserve.text.tokenizer import Tokenizer
from aioserve.timings import InterTokenLatency, Timings

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AioserveError",
    "Beam",
    "BeamSearchOptions",
    "CallFormat",
    "ChatAnswer",
    "ChatCompletion",
    "ChatDelta",
    "ChatStream",
    "ChatStreamLike",
    "Completion",
    "ConfigError",
    "Continuation",
    "CustomCalls",
    "DType",
    "DeadlineExceededError",
    "Device",
    "DraftedSequence",
    "Drafter",
    "DrafterSpec",
    "DuplicateRequestError",
    "Eagle3Drafter",
    "EmbedOptions",
    "EncodeOptions",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "EngineFailedError",
    "EngineLike",
    "EngineState",
    "EngineStats",
    "EvictionSpec",
    "EvictionStrategy",
    "FinishReason",
    "InterTokenLatency",
    "InvalidPromptError",
    "InvalidRequestError",
    "InvalidSamplingError",
    "InvariantError",
    "JsonCalls",
    "Likelihood",
    "LoadedModel",
    "LogitsProcessor",
    "LogitsProcessorSpec",
    "Logprobs",
    "MTPDrafter",
    "MedusaDrafter",
    "Message",
    "MessageOptions",
    "ModelDrafter",
    "ModelError",
    "ModelFacts",
    "ModelFamily",
    "ModelFamilySpec",
    "ModelLimits",
    "ModelNotFoundError",
    "ModelSource",
    "NgramDrafter",
    "Observer",
    "ObserverSpec",
    "PageUse",
    "PhaseStats",
    "Pin",
    "PluginError",
    "PolicySpec",
    "Pooling",
    "Preempt",
    "Preemption",
    "Prompt",
    "PromptOnlyOptions",
    "PromptTooLongError",
    "Quantization",
    "QueueFullError",
    "ReasoningMarks",
    "ReasoningParserSpec",
    "Refusal",
    "RequestFailedError",
    "RequestInfo",
    "RequestRefusedError",
    "RequestRejectedError",
    "RequestSummary",
    "RequestView",
    "Sample",
    "SamplingParams",
    "SchedulerView",
    "SchedulingPolicy",
    "Score",
    "Selection",
    "Speculation",
    "StepBudget",
    "StepError",
    "StepInfo",
    "StepPart",
    "StepSummary",
    "StreamBusyError",
    "StreamOptions",
    "StreamStalledError",
    "StructuredOutput",
    "SuffixDrafter",
    "Timings",
    "Token",
    "TokenShare",
    "TokenStream",
    "TokenStreamLike",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallReader",
    "ToolParserSpec",
    "TopLogprob",
    "TraceError",
    "UnknownPolicyError",
    "UnparsedError",
    "UnsupportedModelError",
    "Usage",
    "Validates",
    "Verdict",
    "WeightFormat",
    "WeightFormatSpec",
    "WeightPart",
    "WeightReader",
    "WeightsError",
    "WrongLoopError",
    "hookimpl",
]
