"""`FakeEngine`: an `EngineLike` without a scheduler, which gives every request one answer.

The second implementation of the contract: a server over it shows that a server needs no more. It
refuses everything that it doesn't do, so that nothing is accepted and ignored.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve import (
    Beam,
    EngineClosedError,
    EngineConfig,
    EngineStats,
    FinishReason,
    InvalidRequestError,
    InvalidSamplingError,
    ModelFacts,
    ModelLimits,
    Observer,
    RequestInfo,
    RequestSummary,
    SamplingParams,
    Usage,
)
from aioserve.engine.interface import TemplateName
from aioserve.engine.options import STREAM_DEFAULTS
from aioserve.engine.stats import PhaseStats
from aioserve.errors import EngineState
from aioserve.models.retrieval import Retrieval
from aioserve.sampling_params import BEAM_DEFAULTS
from aioserve.testing.byte_tokenizer import byte_tokenizer
from aioserve.timings import loop_seconds
from tests.doubles.fake_streams import (
    LOGPROB,
    FakeChatStream,
    FakeRequest,
    FakeTokenStream,
    text_of,
)

__all__ = ["FakeEngine"]

HIDDEN = 8
"""Numbers of an embedding."""
OF_DRAWING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed")
"""Parameters that change nothing, since there is only one answer."""
TAKEN = (*OF_DRAWING, "n", "max_tokens", "logprobs", "prompt_logprobs")
IDENTITY = ("tenant", "cache_salt", "request_id")
"""Options that say on whose behalf a request comes."""


class FakeEngine:
    """Answers each prompt with `answer`, a token for each byte. With `stalls_after`, no request
    gets further than that many tokens. `facts` replace fields of its `ModelFacts`."""

    def __init__(
        self,
        answer: str = "It rains, as ever: 3 \u00b0C.",
        *,
        stalls_after: int | None = None,
        **facts: Any,
    ) -> None:
        self.config: EngineConfig = EngineConfig(num_pages=64)
        self.state: EngineState = "new"
        self._answer = answer.encode()
        self._stalls_after = stalls_after
        self._facts = ModelFacts(**FACTS | facts)
        self._observers: list[Observer] = []
        self._open: dict[str, FakeRequest] = {}
        self._numbers = itertools.count(1)
        self._totals: dict[str, Any] = {"tokens_prefilled_total": 0, "tokens_generated_total": 0}
        self._none_left = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.state = "open"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.state = "closed"
        for request in [*self._open.values()]:
            request.close()

    @property
    def facts(self) -> ModelFacts:
        if self.state == "new":
            raise EngineClosedError("the engine is new", state="new")
        return self._facts

    def stats(self) -> EngineStats:
        zeros: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0)
        work = PhaseStats(**dict.fromkeys(PhaseStats.__struct_fields__, 0))
        none: dict[str, Any] = {
            "tokens_drafted_total": (),
            "tokens_accepted_total": (),
            "requests_finished_total": {},
            "prefill": work,
            "decode": work,
        }
        pages = self.facts.limits.num_pages
        counts: dict[str, Any] = self._totals | {
            "num_running": len(self._open),
            "pages_total": pages,
        }
        return EngineStats(**(zeros | none | counts))

    # -- requests

    def stream(
        self, prompt: Any, params: SamplingParams | None = None, **options: Any
    ) -> FakeTokenStream:
        return FakeTokenStream(self._begun(prompt, params, options))

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | None = None,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        strict_tools: Sequence[str] = (),
        required_tools: Sequence[str] = (),
        parallel_tool_calls: bool = True,
        max_whitespace: int | None = None,
        **options: Any,
    ) -> FakeChatStream:
        if strict_tools or required_tools:
            raise InvalidRequestError("a fake engine calls no tools", argument="tools")
        return FakeChatStream(self._begun(messages, params, options))

    def _begun(
        self, prompt: Any, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> FakeRequest:
        if self.state != "open":
            raise EngineClosedError(f"the engine is {self.state}", state=self.state)
        _check_options(options)
        params = self.facts.default_params if params is None else params
        _check_params(params)
        number = next(self._numbers)
        request = FakeRequest(
            options.get("request_id") or f"request-{number}",
            ids_of(prompt),
            self._answer,
            params,
            self._ended,
            self._stalls_after,
        )
        self._open[request.request_id] = request
        self._totals["tokens_prefilled_total"] += len(request.prompt_ids)
        request.tenant = options.get("tenant")
        info = RequestInfo(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids),
            max_tokens=params.max_tokens or len(self._answer),
            num_samples=params.n,
            arrival_seconds=loop_seconds(),
            tenant=request.tenant,
        )
        for observer in self._observers:
            observer.arrived([info])
        return request

    def _ended(self, request: FakeRequest) -> None:
        del self._open[request.request_id]
        if not self._open:
            self._none_left.set()
        self._totals["tokens_generated_total"] += request.num_given
        summary = RequestSummary(
            request_id=request.request_id,
            tenant=request.tenant,
            finish_reason=request.finish_reason or FinishReason.ABORT,
            error=None if request.error is None else str(request.error),
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=request.num_given,
            first_token_seconds=request.timings.first_token_seconds,
            total_seconds=request.timings.total_seconds,
        )
        for observer in self._observers:
            observer.finished([summary])

    async def beam_search(
        self,
        prompt: Any,
        *,
        beam_width: int = 4,
        max_tokens: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        **options: Any,
    ) -> tuple[Beam, ...]:
        """Return the answer, and shorter and shorter parts of it."""
        _check_options(options)
        ids = tuple(self._answer)[:max_tokens]
        beams: list[Beam] = []
        for width in range(beam_width):
            own = ids[: max(len(ids) - width, 1)]
            total = LOGPROB * len(own)
            score = total / len(own) ** length_penalty
            beams.append(Beam(text_of(own), own, FinishReason.LENGTH, total, score))
        return tuple(beams)

    async def embed_counted(
        self,
        prompts: Any,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        **options: Any,
    ) -> tuple[npt.NDArray[np.float32], Usage]:
        """Vectors that count the bytes of each prompt by their remainders."""
        _check_options(options)
        every = [ids_of(prompt) for prompt in prompts]
        made = [np.bincount(np.array(ids) % HIDDEN, minlength=HIDDEN) for ids in every]
        vectors = np.stack(made).astype(np.float32)
        if normalize is not False:
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors, Usage(sum(map(len, every)), 0)

    async def relevance(
        self, pairs: Sequence[tuple[str, str]], *, instruction: str | None = None, **options: Any
    ) -> tuple[npt.NDArray[np.float32], Usage]:
        """Share of a query's words that the document has."""
        _check_options(options)
        shares = [np.mean([word in text for word in query.split()]) for query, text in pairs]
        return np.array(shares, np.float32), Usage(len(pairs), 0)

    async def encode(
        self, prompt: Any, *, add_special_tokens: bool = True, **options: Any
    ) -> list[int]:
        _check_options(options)
        return ids_of(prompt)

    # -- while it runs

    def observe(self, observer: Observer) -> Callable[[], None]:
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    def reset_prefix_cache(self) -> int:
        return 0

    async def drain(self, deadline_seconds: float | None = None) -> int:
        self.state = "draining"
        try:
            async with asyncio.timeout(deadline_seconds):
                while self._open:
                    self._none_left.clear()
                    await self._none_left.wait()
        except TimeoutError:
            late = [*self._open.values()]
            for request in late:
                request.end(EngineClosedError("the engine is draining", state="draining"))
            return len(late)
        return 0


def ids_of(prompt: Any) -> list[int]:
    """One id per byte of a text, or of the contents of messages; ids as they are."""
    if isinstance(prompt, str):
        return list(prompt.encode())
    if prompt and isinstance(prompt[0], Mapping):
        return list("\n".join([str(one.get("content") or "") for one in prompt]).encode())
    return [int(one) for one in prompt]


def _check_params(params: SamplingParams) -> None:
    """Raise `InvalidSamplingError` for a parameter that would change the answer."""
    usual = msgspec.structs.asdict(SamplingParams())
    for name, value in msgspec.structs.asdict(params).items():
        if name not in TAKEN and value != usual[name]:
            raise InvalidSamplingError(
                f"{name} must be left out with a fake engine, got {value!r}",
                argument=name,
                value=value,
            )


def _check_options(options: Mapping[str, Any]) -> None:
    usual = STREAM_DEFAULTS | BEAM_DEFAULTS
    for name, value in options.items():
        if name not in IDENTITY and value not in (None, usual.get(name)):
            raise InvalidRequestError(
                f"{name} must be left out with a fake engine, got {value!r}", argument=name
            )


FACTS: dict[str, Any] = {
    "name": "fake",
    "limits": ModelLimits(
        vocab_size=256, max_model_len=1024, num_pages=64, eos_token_ids=frozenset()
    ),
    "description": {"name": "fake", "architecture": "FakeForCausalLM", "dtype": "float32"},
    "tokenizer": byte_tokenizer(),
    "has_chat_template": True,
    "template_reads": frozenset(get_args(TemplateName)) - {"tools"},
    "reads_tool_calls": False,
    "calls_in_channels": False,
    "reasons": False,
    "generates": True,
    "retrieval": Retrieval(),
    "tells_relevance": False,
    "default_params": SamplingParams(),
    "says_sampling": True,
}
