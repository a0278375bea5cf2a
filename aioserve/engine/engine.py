"""`Engine`: the library's front door.

Nothing here or below installs a signal handler or starts a process. Engines of one process share
only the kernels' threads and instruction set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from aioserve.arguments import unknown_argument
from aioserve.config import ReasoningParserName, ToolParserName
from aioserve.engine.batches import Progress, check_no_progress, completions_of
from aioserve.engine.beam_search import beam_search
from aioserve.engine.chat_stream import ChatFormat, ChatStream
from aioserve.engine.engine_arguments import DEFAULT_MODEL, EngineArguments, takes_arguments
from aioserve.engine.facts import EngineFacts
from aioserve.engine.forking import Forker
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.misuse import EnteredByAsync
from aioserve.engine.options import (
    STREAM_DEFAULTS,
    BeamSearchOptions,
    EarlyStopping,
    EmbedOptions,
    EncodeOptions,
    Pooling,
    PromptOnlyOptions,
    StreamOptions,
    check_names,
    checked_deadline,
    takes,
)
from aioserve.engine.prompt_only import (
    Score,
    embeddings_of,
    scores_of,
    token_ids_of,
)
from aioserve.engine.prompts import Continuation, Prompt, holds_prompts
from aioserve.engine.relevance import relevance_of
from aioserve.engine.selection import Likelihood, Selection, selection_of
from aioserve.engine.stream import TokenStream, collect, with_best_of
from aioserve.plugins import Observer, check_observer_object
from aioserve.request import Beam, Completion, SamplingParams, Usage
from aioserve.sampling_params import BEAM_DEFAULTS
from aioserve.text.messages import Message

__all__ = ["Engine"]


class Engine(EngineFacts, EnteredByAsync):
    """One model that serves many streams, inside the caller's event loop.

        async with Engine("path/to/model") as engine:
            async for token in engine.stream("Once upon a time"):
                print(token.text, end="")

    - `model`: a Hugging Face directory, a hub id in the local cache, or "pyhelp", the model that
      comes with aioserve.
    - `policy`: the name of a scheduling policy from a plugin, optionally with options
      ("round_robin:chunk_size=512"). Also a class in a file ("FILE.py:CLASS"), or a
      `SchedulingPolicy` object, which then belongs to this engine.
    - `plugins`: objects with hook implementations; they needn't be installed. Installed observers
      and admission checks are part of every engine.
    - `progress`: called with bytes done and total bytes while weights load, in the loading thread.
    - `capture_progress`: called with graphs done (from 0) and total graphs while CUDA graphs are
      captured, on the event loop.

    Exceptions of both callbacks propagate from entering. Neither can be given with a `ModelSource`,
    which loads in its own way. The other options are the fields of `aioserve.config.EngineConfig`.

    An engine works from `async with` to its end, once, on one asyncio event loop. Several engines
    may share a loop. The constructor raises `ConfigError` for an option outside its range, or
    without effect beside another. If only the bundled plugins could offer a policy or drafter, the
    constructor also refuses an unknown policy (`UnknownPolicyError`) or drafter (`ConfigError`).

    Entering raises `ModelError`, `UnknownPolicyError`, `PluginError`, `ConfigError` for a name that
    no plugin offers, and `WrongLoopError` outside an asyncio loop. An engine that is dropped
    unclosed is closed by the garbage collector, with a `ResourceWarning`.
    """

    @takes_arguments(EngineArguments)
    def __init__(self, model: Any = DEFAULT_MODEL, **options: Any) -> None:
        if unknown := options.keys() - set(EngineArguments.__struct_fields__):
            raise unknown_argument("Engine", min(unknown), inspect.signature(Engine).parameters)
        arguments = EngineArguments(model, **options)
        lifecycle = EngineLifecycle(arguments.config, arguments)
        super().__init__(lifecycle.config, lifecycle)
        self._forked = Forker(lifecycle)

    # -- lifecycle

    async def __aenter__(self) -> Self:
        await self._lifecycle.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End every request, and return once nothing of the engine runs any more.

        While the engine still loads, return after the load has stopped and `__aenter__` has raised.
        May be called again. Before entering, it makes a later entering fail. Raises
        `WrongLoopError` on another event loop.
        """
        await self._lifecycle.close()

    async def drain(self, deadline_seconds: float | None = None) -> int:
        """Refuse new requests, and wait until the present ones have ended.

        Requests that go on after `deadline_seconds` end with `EngineClosedError`; return their
        number. None waits as long as it takes. Raises `ConfigError` unless the deadline is None or
        a number of at least 0, and then changes nothing.
        """
        return await self._lifecycle.drain(checked_deadline(deadline_seconds))

    def __del__(self) -> None:
        # A constructor that failed has set no lifecycle.
        lifecycle: EngineLifecycle | None = getattr(self, "_lifecycle", None)
        if lifecycle is not None:
            lifecycle.abandon(self)

    def __reduce__(self) -> NoReturn:
        # The end of a copy would end the engine itself.
        raise TypeError("an Engine can't be copied or pickled")

    def __repr__(self) -> str:
        return f"Engine({self._lifecycle.model_label!r}, {self.state})"

    # -- requests

    @takes(StreamOptions, STREAM_DEFAULTS)
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[StreamOptions],
    ) -> TokenStream:
        """Submit a request and return its stream at once.

        `prompt` is text, token ids, or chat messages (dicts with "role" and "content") for a model
        with a chat template. Without `params`, sampling follows the model's generation_config.json,
        or is greedy if that says nothing, until the model ends the answer. Requests share cached
        prefixes only with others of the same `cache_salt` (1 to 256 characters).

        The scheduling policy sees these hints, and may use them as it likes:

        - `tenant`: on whose behalf the request comes, 1 to 512 characters.
        - `priority`: an int of 32 bits. The policy `priority` serves the lowest first.
        - `ttft_target_seconds`: wanted time from this call to the first token, above 0 and finite.
        - `tpot_target_seconds`: wanted average time for each further token, above 0 and finite.
        - `metadata`: a mapping of str to str, copied. At most 16 entries, with keys of up to 64
          characters and values of up to 512.
        - `session_id`: the conversation or agent that the request is part of, 1 to 256 characters.
        - `predicted_output_tokens`: expected length of each answer, at least 1. A forecast, not a
          limit.
        - `deadline_seconds`: see below.

        A request that goes on `deadline_seconds` after this call (above 0 and finite) is ended, in
        whatever state it is. Its reader gets the tokens so far, and then `DeadlineExceededError`.

        Only messages go with `tools` (as in the OpenAI API) and `chat_template_kwargs` (the
        template's own variables, for example `enable_thinking`). For messages, the prompt ends with
        the start of an answer (`add_generation_prompt`), or within the last message, which the
        answer then continues (`continue_final_message`).

        `truncate_prompt_tokens`, in [1, max_model_len), cuts a longer prompt to its last tokens, or
        with `truncation_side="right"` to its first. -1 leaves room for `max_tokens`.

        Raises `InvalidPromptError`, `PromptTooLongError`, `InvalidSamplingError`,
        `DuplicateRequestError`, `QueueFullError`, `EngineClosedError` and `WrongLoopError`. Raises
        `InvalidRequestError` for a bad id, salt, tenant, priority, target, deadline, metadata,
        session, forecast or truncation. Errors that only encoding the prompt can find are raised by
        the first read of the stream instead.
        """
        check_names(self.stream, options, StreamOptions)
        submitted = self._lifecycle.usable().intake.submit(prompt, params, **options)
        return TokenStream(submitted, self._forked)

    # Python keeps all overloads forever, and with them this module and everything it holds.
    if TYPE_CHECKING:

        @overload
        async def generate(
            self,
            prompt: Prompt,
            params: SamplingParams | None = None,
            **options: Unpack[StreamOptions],
        ) -> Completion: ...
        @overload
        async def generate(
            self,
            prompt: Sequence[Prompt],
            params: SamplingParams | Sequence[SamplingParams] | None = None,
            *,
            progress: Progress = None,
            **options: Unpack[StreamOptions],
        ) -> list[Completion]: ...

    @takes(StreamOptions, STREAM_DEFAULTS)
    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress = None,
        **options: Unpack[StreamOptions],
    ) -> Completion | list[Completion]:
        """Return the whole completion at once; otherwise as `stream`. Cancelling ends the request.

        If very many calls are made at once, some wait for turns of the event loop first.

        Several prompts give a list in their order. Request `i` has the id `request_id`-`i`.
        `params` are one for all, or a list with one for each. The first request that fails ends the
        others. `progress` is called with the number of finished requests, from 0 on, and their
        total. None draws a bar on a terminal, which moves with each token; False draws nothing.
        """
        check_names(self.generate, options, StreamOptions)
        self._lifecycle.usable()
        if holds_prompts(prompt):
            # The rest wait until the queue has room.
            at_once = self.config.max_num_seqs + self.config.max_waiting // 2
            return await completions_of(self._submit, prompt, params, at_once, progress, options)
        check_no_progress(progress)
        wanted = cast("SamplingParams | None", params)
        return await collect(await self._submit(cast("Prompt", prompt), wanted, options), wanted)

    async def _submit(
        self, prompt: Prompt, params: SamplingParams | None, options: StreamOptions
    ) -> TokenStream:
        """Return the stream of a request, sampled as `best_of` needs."""
        await self._lifecycle.usable().turns.take()
        return self.stream(prompt, with_best_of(params), **options)

    @takes(BeamSearchOptions, STREAM_DEFAULTS | BEAM_DEFAULTS)
    async def beam_search(
        self,
        prompt: Prompt,
        *,
        beam_width: int = 4,
        max_tokens: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        **options: Unpack[BeamSearchOptions],
    ) -> tuple[Beam, ...]:
        """Return the `beam_width` best answers of a beam search, best first.

        They equal those of transformers' `generate` with `num_beams` and the same `length_penalty`
        and `early_stopping`. A stop string or id ends a beam like an end-of-sequence id, and its
        text like that of any answer (`SamplingParams`). Penalties, biases, processors and forbidden
        tokens change the log-probabilities of a beam, as they do there. `deadline_seconds` limits
        the whole search.

        Each token of the answers takes a round of up to `beam_width` requests of one token, which
        share their pages in the prefix cache. Otherwise it works as `generate`. Raises what
        `stream` does, and `InvalidSamplingError` for a search outside its range
        (`docs/reference/requests.md`).
        """
        check_names(self.beam_search, options, BeamSearchOptions)
        given: dict[str, Any] = dict(options)
        own = {name: given.pop(name) for name in BEAM_DEFAULTS if name in given}
        return await beam_search(
            self._lifecycle,
            prompt,
            SamplingParams(max_tokens=max_tokens, **own),
            beam_width=beam_width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            **given,
        )

    @takes(StreamOptions, STREAM_DEFAULTS)
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
    ) -> ChatStream:
        """Submit messages and return at once a stream of the answer's content, reasoning and tool
        calls.

        `await engine.chat(...).completion()` is the whole answer.

        `tool_parser` and `reasoning_parser` name how the model writes these. The default "auto"
        takes the engine's options of these names, or else the chat template's own format. Tool
        calls are then read only if `tools` are given. Beside a `structured_output`, "auto" reads
        neither, except for reasoning in a channel of its own: the completion is content. But with
        `tools` and a `json_schema` or `json_object`, an answer is either calls alone, or JSON of
        that form.

        `strict_tools` are names of functions in `tools`. An answer then calls only given tools, and
        calls of the named ones have arguments that fit their parameters. All other text is free.
        `required_tools` are names of functions, too. An answer is then one or more calls of these,
        with fitting arguments, and nothing else but reasoning.

        Two more options go with these, and with a JSON form beside `tools`:

        - `parallel_tool_calls`: False allows one call at most.
        - `max_whitespace`: limits white space in the JSON of answers, as in `StructuredOutput`.

        Other options and errors are those of `stream`. Raises `InvalidRequestError` for an unknown
        parser, or an unknown strict or required tool.
        """
        check_names(self.chat, options, StreamOptions)
        live = self._lifecycle.usable()
        # The intake refuses anything but SamplingParams.
        wanted = None
        if params is not None and issubclass(type(params), SamplingParams):
            wanted = params.structured_output
        chat_format = ChatFormat.asked(
            live.model,
            self.config,
            live.parsers,
            wanted,
            options.get("tools"),
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            strict_tools=strict_tools,
            required_tools=required_tools,
            parallel_tool_calls=parallel_tool_calls,
            max_whitespace=max_whitespace,
        )
        return ChatStream(
            live.intake.submit(messages, params, chat_format=chat_format, **options), chat_format
        )

    # -- results for a prompt alone

    @takes(PromptOnlyOptions, STREAM_DEFAULTS)
    async def score(
        self,
        prompt: Prompt,
        continuation: Continuation,
        *,
        top_logprobs: int = 0,
        **options: Unpack[PromptOnlyOptions],
    ) -> Score:
        """Compute how likely the model finds `continuation` after the prompt. Generates nothing.

        `continuation` is text or token ids. `top_logprobs`, in [0, 64], is the number of most
        likely tokens to report at each position. Other options and errors are those of `generate`.
        `ttft_target_seconds` says how soon the score is wanted.
        """
        check_names(self.score, options, PromptOnlyOptions)
        scores = await scores_of(
            self._lifecycle,
            prompt,
            [continuation],
            several=None,
            top_logprobs=top_logprobs,
            **options,
        )
        return scores[0]

    @takes(PromptOnlyOptions, STREAM_DEFAULTS)
    async def score_each(
        self,
        prompt: Prompt,
        continuations: Sequence[Continuation],
        *,
        top_logprobs: int = 0,
        **options: Unpack[PromptOnlyOptions],
    ) -> list[Score]:
        """Score several continuations, each by itself after the prompt, which is computed once.

        Each is a request: number `i` has the id `request_id`-`i`.
        """
        check_names(self.score_each, options, PromptOnlyOptions)
        return await scores_of(
            self._lifecycle,
            prompt,
            continuations,
            several="continuations",
            top_logprobs=top_logprobs,
            **options,
        )

    @takes(PromptOnlyOptions, STREAM_DEFAULTS)
    async def select(
        self,
        prompt: Prompt,
        continuations: Sequence[Continuation],
        *,
        by: Likelihood = "mean",
        **options: Unpack[PromptOnlyOptions],
    ) -> Selection:
        """Return the likeliest of several continuations, each by itself behind the prompt. The
        prompt is computed once. They are compared by their log-probability per token, or with
        `by="total"` by that of the whole, which falls with each further token.

        Options and ids are those of `score_each`. Raises `InvalidPromptError` for no continuations
        and for one without a token, `InvalidRequestError` for another `by`, and what `score_each`
        raises.
        """
        check_names(self.select, options, PromptOnlyOptions)
        return await selection_of(self._lifecycle, prompt, continuations, by=by, **options)

    @takes(EmbedOptions, STREAM_DEFAULTS)
    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        **options: Unpack[EmbedOptions],
    ) -> npt.NDArray[np.float32]:
        """Pool the model's hidden states after the final norm to one vector: float32 `[hidden]`.

        A sequence of N prompts gives `[N, hidden]`, by N requests.

        - `pooling`: the state of the "last" token, that of the first ("cls"), or the "mean" of all.
        - `normalize`: divide by the Euclidean length.
        - `prompt_name`: one of the model's own prompts to put before each text; "" puts nothing
          there.

        The defaults are those of the model's files (`retrieval`), or else "last" and True. Other
        options, ids and errors are those of `score_each`.
        """
        check_names(self.embed, options, EmbedOptions)
        vectors, _ = await self.embed_counted(
            prompts, pooling=pooling, normalize=normalize, prompt_name=prompt_name, **options
        )
        return vectors

    @takes(EmbedOptions, STREAM_DEFAULTS)
    async def embed_counted(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        **options: Unpack[EmbedOptions],
    ) -> tuple[npt.NDArray[np.float32], Usage]:
        """Return the vectors of `embed`, and the token counts of all prompts together."""
        check_names(self.embed_counted, options, EmbedOptions)
        return await embeddings_of(
            self._lifecycle,
            prompts,
            pooling=pooling,
            normalize=normalize,
            prompt_name=prompt_name,
            **options,
        )

    @takes(PromptOnlyOptions, STREAM_DEFAULTS)
    async def relevance(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None = None,
        **options: Unpack[PromptOnlyOptions],
    ) -> tuple[npt.NDArray[np.float32], Usage]:
        """Return how relevant a reranker finds the document of each pair (query, document).

        Relevances are float32 `[N]`, in [0, 1]. Token counts are those of all pairs together.
        `instruction` says what to look for, in place of the reranker's own. Raises
        `InvalidRequestError` if the model is no reranker (`tells_relevance`). Other options, ids
        and errors are those of `embed`.
        """
        check_names(self.relevance, options, PromptOnlyOptions)
        return await relevance_of(self._lifecycle, pairs, instruction=instruction, **options)

    @takes(EncodeOptions, STREAM_DEFAULTS)
    async def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        **options: Unpack[EncodeOptions],
    ) -> list[int]:
        """Return the token ids that a request with this prompt would have.

        The limits are those of requests, and long prompts are encoded off the event loop.
        `add_special_tokens` frames text as the model expects. Raises what `stream` does for a
        prompt.
        """
        check_names(self.encode, options, EncodeOptions)
        intake = self._lifecycle.usable().intake
        return await token_ids_of(intake, prompt, options, add_special_tokens=add_special_tokens)

    # -- while it runs

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes that no request uses; return the number of KV pages they held.

        The number counts pages on the device and on the host. Raises what `stream` does if the
        engine takes no requests.
        """
        return self._lifecycle.usable().scheduler.memory.forget_cached()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Report events to `observer` from now on; call the returned function to stop.

        May be called before the engine is entered. Raises `ConfigError` for an object that is no
        `Observer` or has an async method, and `WrongLoopError` in another thread than the engine's.
        """
        check_observer_object(observer)
        return self._lifecycle.observe(observer)
