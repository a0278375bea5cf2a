"""`Engine`: the library's front door.

Nothing here or below installs a signal handler or starts a process, and nothing but the kernels'
threads and instruction set is shared by the engines of a process.
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
from aioserve.engine.chat import ChatFormat, ChatStream
from aioserve.engine.engine_arguments import DEFAULT_MODEL, EngineArguments, takes_arguments
from aioserve.engine.facts import EngineFacts
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

    `model` is a Hugging Face directory, a hub id in the local cache, or "pyhelp", the model that
    comes with aioserve. `policy` is the name of a scheduling policy that a plugin offers, options
    behind it ("round_robin:chunk_size=512"), a class of a file ("FILE.py:CLASS"), or a
    `SchedulingPolicy` object, which then belongs to this engine. `plugins` are objects with hook
    implementations that needn't be installed. Installed observers and admission checks are part of
    every engine. `progress` is called while weights load, in the loading thread, with bytes done
    and bytes in all; `capture_progress` while CUDA graphs are captured, on the event loop, with
    graphs done and graphs in all, from 0 on. Entering raises what they raise. Neither goes with a
    `ModelSource`, which loads as it likes. The other options are the fields of
    `aioserve.config.EngineConfig`.

    An engine works between `async with` and its end, once, on one event loop of asyncio; several
    engines may live on one loop. Raises `ConfigError` for an option outside its range, or without
    effect beside another, and where none but the bundled plugins could offer the drafter,
    `UnknownPolicyError` where this is so of the policy; entering raises `ModelError`,
    `UnknownPolicyError`, `PluginError`, `ConfigError` for a name that no plugin offers, and
    `WrongLoopError` where no loop of asyncio runs. The collector closes what is left of an engine
    that was dropped unclosed, with a `ResourceWarning`.
    """

    @takes_arguments(EngineArguments)
    def __init__(self, model: Any = DEFAULT_MODEL, **options: Any) -> None:
        if unknown := options.keys() - set(EngineArguments.__struct_fields__):
            raise unknown_argument("Engine", min(unknown), inspect.signature(Engine).parameters)
        arguments = EngineArguments(model, **options)
        lifecycle = EngineLifecycle(arguments.config, arguments)
        super().__init__(lifecycle.config, lifecycle)

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
        """End every request, and return when nothing of the engine runs any more: while it loads,
        when what loads is done and `__aenter__` has raised. May be called again, and before
        entering, which is then refused. Raises `WrongLoopError` on another event loop."""
        await self._lifecycle.close()

    async def drain(self, deadline_seconds: float | None = None) -> int:
        """Take no more requests, and wait until those there are have ended.

        Requests that haven't after `deadline_seconds` are ended with `EngineClosedError`; the
        result is their number. None waits as long as it takes. Raises `ConfigError` for a deadline
        that is no number of at least 0, and has then changed nothing.
        """
        return await self._lifecycle.drain(checked_deadline(deadline_seconds))

    def __del__(self) -> None:
        # A constructor that failed leaves none.
        lifecycle: EngineLifecycle | None = getattr(self, "_lifecycle", None)
        if lifecycle is not None:
            lifecycle.abandon(self)

    def __reduce__(self) -> NoReturn:
        # The end of a copy would be that of the engine.
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
        with a chat template. Without `params` the model is sampled as its makers say in
        generation_config.json, greedily if they say nothing, until it ends by itself. Requests
        share cached prefixes only with others of the same `cache_salt` (1 to 256 characters).

        The scheduling policy sees on whose behalf a request comes, `tenant` (1 to 512 characters),
        its `priority` (an int of 32 bits; the policy `priority` serves the lowest first), and what
        its sender wants: the first token `ttft_target_seconds` after this call, and each further
        one within `tpot_target_seconds` on average (both above 0 and finite). What it makes of them
        is up to the policy. It also sees `metadata`, a mapping of str to str (at most 16, keys of
        up to 64 characters, values of up to 512), of which it gets a copy; which conversation or
        agent the request is part of, `session_id` (1 to 256 characters); and how long its sender
        expects each answer to be, `predicted_output_tokens` (at least 1), a forecast and no limit.

        A request that hasn't ended `deadline_seconds` after this call (above 0 and finite) is
        ended, wherever it is: the reader of its stream gets the tokens that came before, and then
        `DeadlineExceededError`. A policy sees that too.

        With messages alone go `tools` (those of the OpenAI API), `chat_template_kwargs`, which are
        variables of the template's own such as `enable_thinking`, and how the prompt ends: with the
        start of an answer (`add_generation_prompt`), or in the midst of the last message, which the
        answer then goes on with (`continue_final_message`).

        With `truncate_prompt_tokens`, in [1, max_model_len), a longer prompt is cut to so many: its
        last tokens are left, or with `truncation_side="right"` its first. -1 leaves room for
        `max_tokens`.

        Raises `InvalidPromptError`, `PromptTooLongError`, `InvalidSamplingError`,
        `DuplicateRequestError`, `InvalidRequestError` for a bad id, salt, tenant, priority, target,
        deadline, metadata, session, forecast or truncation, `QueueFullError`, `EngineClosedError`
        and `WrongLoopError`. What only encoding the prompt can show is raised by the first read of
        the stream instead.
        """
        check_names(self.stream, options, StreamOptions)
        return TokenStream(self._lifecycle.usable().intake.submit(prompt, params, **options))

    # Python keeps all overloads for ever, and with them this module and what it holds.
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
        """The whole completion at once; otherwise as `stream`. Cancelling it ends the request.
        Where very many are called at once, some wait for turns of the event loop first.

        Several prompts give a list in their order. Number `i` has the id `request_id`-`i`, and
        `params` are one for all, or a list of one for each. The first that fails ends the others.
        `progress` is called with how many are done, from 0 on, and how many there are; None draws a
        bar on a terminal, which moves with each token, and False doesn't."""
        check_names(self.generate, options, StreamOptions)
        self._lifecycle.usable()
        if holds_prompts(prompt):
            # Others find room in the queue.
            at_once = self.config.max_num_seqs + self.config.max_waiting // 2
            return await completions_of(self._submit, prompt, params, at_once, progress, options)
        check_no_progress(progress)
        wanted = cast("SamplingParams | None", params)
        return await collect(await self._submit(cast("Prompt", prompt), wanted, options), wanted)

    async def _submit(
        self, prompt: Prompt, params: SamplingParams | None, options: StreamOptions
    ) -> TokenStream:
        """The stream of a request, with what `best_of` needs."""
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
        """The `beam_width` answers that a beam search finds, best first: those of transformers'
        `generate` with `num_beams` and the same `length_penalty` and `early_stopping`.

        A stop string or id ends a beam as an end-of-sequence id does, and its text as that of any
        answer (`SamplingParams`). Penalties, biases, processors and what forbids tokens change a
        beam's log-probabilities, as they do there. `deadline_seconds` is that of the whole search.

        Each token of the answers takes a round of up to `beam_width` requests of one token, which
        share their pages in the prefix cache; otherwise as `generate`. Raises what `stream` does,
        and `InvalidSamplingError` for a search outside its range (`docs/reference/requests.md`).
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
        tool_parser: ToolParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
        strict_tools: Sequence[str] = (),
        required_tools: Sequence[str] = (),
        parallel_tool_calls: bool = True,
        max_whitespace: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> ChatStream:
        """Submit messages and return the stream of their answer's parts, at once: content,
        reasoning and tool calls. `await engine.chat(...).completion()` is the whole answer.

        `tool_parser` and `reasoning_parser` name how the model writes these; "auto"
        is what the engine's options of these names say, or else what the chat template is written
        for, of tool calls where `tools` are given, and nothing where the params ask for
        `structured_output`, all of which is content. But beside `tools` an answer is calls alone,
        or else JSON of the form, where that is a `json_schema` or a `json_object`.

        With `strict_tools`, names of functions in `tools`, what an answer calls is one of the
        tools, and the arguments of a call to one of these are what its parameters take; all else
        that the model writes is free. With `required_tools`, such names too, an answer is calls of
        these, one at least, and nothing else beside reasoning; their arguments are held likewise.
        With `parallel_tool_calls=False`, which goes with both, it calls one at most;
        `max_whitespace`, too, is that of `StructuredOutput` for the JSON of calls.

        The other options and errors are those of `stream`, and `InvalidRequestError` where a
        parser is unknown, or a strict or required tool is.
        """
        check_names(self.chat, options, StreamOptions)
        live = self._lifecycle.usable()
        # What is no SamplingParams is refused where requests come in.
        wanted = None
        if params is not None and issubclass(type(params), SamplingParams):
            wanted = params.structured_output
        chat_format = ChatFormat.asked(
            live.model,
            self.config,
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

    # -- of a prompt alone

    @takes(PromptOnlyOptions, STREAM_DEFAULTS)
    async def score(
        self,
        prompt: Prompt,
        continuation: Continuation,
        *,
        top_logprobs: int = 0,
        **options: Unpack[PromptOnlyOptions],
    ) -> Score:
        """How likely the model finds `continuation`, text or token ids, behind the prompt; nothing
        is generated. `top_logprobs` of the most likely tokens are told at each place, in [0, 64].
        Other options and errors are those of `generate`; `ttft_target_seconds` says how soon the
        score is wanted."""
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
        """Score several continuations, each by itself behind the prompt, which is computed
        once. They are as many requests: number `i` has the id `request_id`-`i`."""
        check_names(self.score_each, options, PromptOnlyOptions)
        return await scores_of(
            self._lifecycle,
            prompt,
            continuations,
            several="continuations",
            top_logprobs=top_logprobs,
            **options,
        )

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
        """The model's hidden states behind the final norm, pooled to one vector: float32
        `[hidden]` of a prompt, `[N, hidden]` of a sequence of N, which are as many requests.

        `pooling` takes the state of the "last" token, that of the first ("cls"), or the "mean" of
        all; `normalize` divides by the Euclidean length. What is None is as the model's files say
        (`retrieval`), or else "last" and True. `prompt_name` names the prompt of the model's that
        goes before each text; "" is none. Other options, ids and errors are those of `score_each`.
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
        """Return what `embed` does, and the token counts of all prompts together."""
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
        """Return how relevant, in [0, 1], a reranker finds the document of each pair (query,
        document): float32 `[N]`, and the token counts of all. `instruction` says what is looked
        for, in place of the reranker's own. Raises `InvalidRequestError` where the model is none
        (`tells_relevance`); other options, ids and errors are those of `embed`."""
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
        """The token ids that a request with this prompt would have, encoded as it is: within the
        same limits, and off the event loop where it takes long. `add_special_tokens` says whether
        text is framed as the model expects. Raises what `stream` does for a prompt."""
        check_names(self.encode, options, EncodeOptions)
        intake = self._lifecycle.usable().intake
        return await token_ids_of(intake, prompt, options, add_special_tokens=add_special_tokens)

    # -- while it runs

    def reset_prefix_cache(self) -> int:
        """Forget the cached prefixes that no request uses; return how many KV pages they had, on
        the device and on the host. Raises what `stream` does where the engine takes no requests."""
        return self._lifecycle.usable().scheduler.memory.forget_cached()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Tell `observer` of what happens from now on; call what is returned to end that.

        It may be given before the engine is entered. Raises `ConfigError` for what is no `Observer`
        or has an async method, and `WrongLoopError` in another thread than the engine's.
        """
        check_observer_object(observer)
        return self._lifecycle.observe(observer)
