"""`Engine`: the library's front door.

Nothing here or below installs a signal handler or starts a process, and nothing but the kernels'
threads and instruction set is shared by the engines of a process.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import anyio
import numpy as np
import numpy.typing as npt

from aioserve.config import Attention, Backend, Device, DType, EngineConfig, Preemption
from aioserve.engine.answers import drawn_for, read_whole
from aioserve.engine.beam_search import BeamSearch
from aioserve.engine.beams import EarlyStopping
from aioserve.engine.chat import AnswerForm, ChatStream, StreamOptions, held_calls
from aioserve.engine.continuations import Continuation
from aioserve.engine.event_loop import check_on, running_loop
from aioserve.engine.intake import ChatArguments, Message, Prompt
from aioserve.engine.live import Chosen, LiveEngine
from aioserve.engine.looks import LookOptions
from aioserve.engine.options import check_listener, checked_deadline, checked_plugins
from aioserve.engine.pooling import Pooling, embeddings_of
from aioserve.engine.prompts import listed
from aioserve.engine.reports import dump_of, stats_of
from aioserve.engine.scoring import Score, scores_of
from aioserve.engine.stats import EngineStats
from aioserve.engine.stream import TokenStream
from aioserve.engine.token_ids import ids_of_prompt
from aioserve.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    EngineState,
    ModelError,
    WrongLoopError,
)
from aioserve.execution import loading
from aioserve.execution.runner import LoadedModel, ModelLimits, ModelSource
from aioserve.isolation import shown
from aioserve.plugins import Observer, PluginRegistry, check_observer_object, check_policy_object
from aioserve.request import Beam, Completion, SamplingParams, Usage
from aioserve.scheduling.books import SLOTS_PER_SEQUENCE
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.text.answers.forms import ReasoningParserName, ToolParserName
from aioserve.text.tokenizer import Tokenizer

__all__ = ["Engine"]

MAX_POLICY_CHARS = 1000


class Engine:
    """One model that serves many streams, inside the caller's event loop.

        async with Engine("path/to/model") as engine:
            async for token in engine.stream("Once upon a time"):
                print(token.text, end="")

    `model` is a Hugging Face directory, a hub id in the local cache, or "pyhelp", the model that
    comes with aioserve. `policy` is the name of a scheduling policy that a plugin offers, options
    behind it ("round_robin:chunk_size=512"), or a `SchedulingPolicy` object, which then belongs to
    this engine. `plugins` are objects with hook implementations that needn't be installed.
    Installed observers and admission checks are part of every engine. `progress` is called while
    weights load, in the loading thread, with bytes done and bytes in all; `capture_progress` while
    CUDA graphs are captured, on the event loop, with graphs done and graphs in all, from 0 on. What
    they raise, entering raises. Neither goes with a `ModelSource`, which loads as it likes. The
    other options are the fields of `aioserve.config.EngineConfig`.

    An engine works between `async with` and its end, once, on one event loop of asyncio; several
    engines may live on one loop. Raises `ConfigError` for an option outside its range, or without
    effect beside another; entering raises `ModelError`, `UnknownPolicyError`, `PluginError`,
    `ConfigError` for a name that no plugin offers, and `WrongLoopError` where no loop of asyncio
    runs. What is left of an engine that nobody holds and nobody closed is closed by the collector,
    with a `ResourceWarning`.
    """

    def __init__(
        self,
        model: str | Path | ModelSource = "pyhelp",
        *,
        policy: str | SchedulingPolicy = "fcfs",
        plugins: Sequence[object] = (),
        progress: Callable[[int, int], None] | None = None,
        capture_progress: Callable[[int, int], None] | None = None,
        device: Device = "auto",
        backend: Backend = "auto",
        dtype: DType = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        memory_utilization: float = 0.9,
        prefix_caching: bool = True,
        partial_page_reuse: bool = True,
        eviction: str = "lru",
        num_host_pages: int = 0,
        preemption: Preemption = "auto",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        output_reserve_tokens: int = 64,
        overlap: bool = True,
        jump_forward: bool = True,
        step_program: bool = True,
        graph_sizes: Sequence[int] | None = None,
        capture_graphs: bool = True,
        attention: Attention = "auto",
        special_tokens_in_messages: bool = False,
        seed: int = 0,
        max_waiting: int = 4096,
        max_waiting_tokens: int = 4_194_304,
        refuse_late: bool = False,
        max_buffered_tokens: int = 256,
        stall_timeout_seconds: float = 60.0,
    ) -> None:
        self.config: EngineConfig = EngineConfig(
            device=device,
            backend=backend,
            dtype=dtype,
            page_size=page_size,
            num_pages=num_pages,
            memory_utilization=memory_utilization,
            prefix_caching=prefix_caching,
            partial_page_reuse=partial_page_reuse,
            eviction=eviction,
            num_host_pages=num_host_pages,
            preemption=preemption,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            output_reserve_tokens=output_reserve_tokens,
            overlap=overlap,
            jump_forward=jump_forward,
            step_program=step_program,
            graph_sizes=graph_sizes,
            capture_graphs=capture_graphs,
            attention=attention,
            special_tokens_in_messages=special_tokens_in_messages,
            seed=seed,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            refuse_late=refuse_late,
            max_buffered_tokens=max_buffered_tokens,
            stall_timeout_seconds=stall_timeout_seconds,
        )
        if isinstance(policy, str):
            policy = str.__str__(policy)
            if len(policy) > MAX_POLICY_CHARS:
                raise ConfigError(
                    f"policy must be a name of at most {MAX_POLICY_CHARS} characters, options "
                    f"included, got {len(policy)}"
                )
        else:
            check_policy_object(policy)
        given = checked_plugins(plugins)
        if isinstance(model, str):
            model = str.__str__(model)  # plain text, whatever a subclass makes of it
        elif not isinstance(model, Path) and not callable(getattr(model, "load", None)):
            raise ConfigError(
                f"model must be a name, a directory or an object that loads, got {shown(model)}",
                argument="model",
                value=model,
            )
        check_listener("progress", progress, model)
        check_listener("capture_progress", capture_progress, model)
        self._source = model
        self._policy = policy
        self._plugins = given
        self._progress = progress
        self._capture_progress = capture_progress
        self._observing: list[Observer] = []
        """Given to `observe`."""
        self._live: LiveEngine | None = None
        self._state: EngineState = "new"
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that it was entered on."""
        self._entering: asyncio.Task[Any] | None = None
        self._entered_or_not = asyncio.Event()
        """`__aenter__` is over, however it ended."""
        self._closing: asyncio.Task[None] | None = None

    # -- life

    async def __aenter__(self) -> Engine:
        if self._state != "new":
            raise EngineClosedError(
                "an engine can be entered once; make another", state=self._state
            )
        loop = running_loop()
        if loop is None:
            raise WrongLoopError(
                "an engine needs asyncio, and no event loop of asyncio runs here; under trio, run "
                "it with asyncio in a thread of its own"
            )
        self._state, self._loop, self._entering = "loading", loop, asyncio.current_task()
        try:
            registry = await asyncio.to_thread(PluginRegistry, self._plugins)
            self._check_loading()
            chosen = self._choose(registry)
            model = await self._load()
            try:
                self._check_loading()
                self._live = LiveEngine(self.config, chosen, model)
            except BaseException:
                await _finish(model.runner.aclose())
                raise
        except BaseException:
            self._state = "closed"
            raise
        finally:
            self._entering = None
            self._entered_or_not.set()
        self._state = "open"
        return self

    def _check_loading(self) -> None:
        """Raise if the engine was closed while it was loading."""
        if self._state != "loading":
            raise EngineClosedError("the engine was closed while it was loading", state="closed")

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End every request, and return when nothing of the engine runs any more: while it loads,
        when what loads is done and `__aenter__` has raised. May be called again, and before
        entering, which is then refused. Raises `WrongLoopError` on another event loop."""
        if self._loop is None:
            self._state = "closed"
            return
        check_on(self._loop, "the engine")
        if self._entering is not None and self._entering is asyncio.current_task():
            raise EngineError("an engine can't be closed by the task that enters it")
        self._state = "closed"
        await self._entered_or_not.wait()
        if self._live is not None:
            if self._closing is None:
                self._closing = asyncio.ensure_future(self._live.aclose())
            await _finish(self._closing)

    def __del__(self) -> None:
        # After a constructor that failed, there is no state.
        live: LiveEngine | None = getattr(self, "_live", None)
        if live is not None and self._state != "closed":
            live.abandon()
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=1, source=self)

    def _choose(self, registry: PluginRegistry) -> Chosen:
        registry.check_selected()
        observers = registry.make_observers()
        for observer in self._observing:
            observers.attach(observer, type(observer).__name__)
        policy, name = self._policy, None
        if isinstance(policy, str):
            policy, name = registry.policy(policy), registry.policy_label(policy)
        return Chosen(
            policy,
            name,
            registry.eviction(self.config.eviction),
            observers,
            registry.admission(),
            registry.logits_processor,
        )

    async def _load(self) -> LoadedModel:
        num_slots = SLOTS_PER_SEQUENCE * self.config.max_num_seqs
        if isinstance(self._source, str | Path):
            return await loading.load(
                str(self._source),
                self.config,
                num_slots=num_slots,
                progress=self._progress,
                capture_progress=self._capture_progress,
            )
        return await self._source.load(self.config, num_slots=num_slots)

    async def drain(self, deadline_seconds: float | None = None) -> int:
        """Take no more requests, and wait until those there are have ended.

        Those that haven't after `deadline_seconds` are ended with `EngineClosedError`; how many is
        the result. None waits as long as it takes. Raises `ConfigError` for a deadline that is no
        number of at least 0, and has then changed nothing.
        """
        deadline = checked_deadline(deadline_seconds)
        live = self._entered()
        if self._state != "draining":
            live = self._usable()
        live.check()
        self._state = "draining"
        with anyio.move_on_after(deadline):
            await live.wait_idle()
            return 0
        drained = "the engine was drained before this request ended"
        error = EngineClosedError(drained, state=self._state)
        return await live.core.delivery.abort_all(error)

    # -- requests

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
        deadline_seconds: float | None = None,
        metadata: Mapping[str, str] | None = None,
        session_id: str | None = None,
        predicted_output_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> TokenStream:
        """Submit a request and return its stream at once.

        `prompt` is text, token ids, or chat messages (dicts with "role" and "content") for a model
        with a chat template. Without `params` the model is sampled as its makers say in
        generation_config.json, greedily if they say nothing, until it ends by itself. Requests
        share cached prefixes only with others of the same `cache_salt` (1 to 256 characters).

        The scheduling policy sees on whose behalf a request comes, `tenant` (1 to 256 characters),
        its `priority` (an int of 32 bits; the policy `priority` serves the lowest first), and what
        its sender wants: the first token `ttft_target_seconds` after this call, and each further
        one within `tpot_target_seconds` on average (both above 0 and finite). What it makes of them
        is up to the policy. It also sees `metadata`, a mapping of str to str (at most 16, keys of
        up to 64 characters, values of up to 512), of which it gets a copy; which conversation or
        agent the request is part of, `session_id` (1 to 256 characters); and how long its sender
        expects each answer to be, `predicted_output_tokens` (at least 1), a forecast and no limit.

        A request that hasn't ended `deadline_seconds` after this call (above 0 and finite) is
        ended, wherever it is: whoever reads its stream gets the tokens that came before, and then
        `DeadlineExceededError`. A policy sees that too.

        With messages alone go `tools` (those of the OpenAI API), `chat_template_kwargs`, which are
        variables of the template's own such as `enable_thinking`, and how the prompt ends: with the
        start of an answer (`add_generation_prompt`), or in the midst of the last message, which the
        answer then goes on with (`continue_final_message`).

        Raises `InvalidPromptError`, `PromptTooLongError`, `InvalidSamplingError`,
        `DuplicateRequestError`, `InvalidRequestError` for a bad id, salt, tenant, priority, target,
        deadline, metadata, session or forecast, `QueueFullError`, `EngineClosedError` and
        `WrongLoopError`. What only encoding the prompt can show is raised by the first read of the
        stream instead.
        """
        mailbox = self._usable().intake.submit(
            prompt,
            params,
            request_id=request_id,
            cache_salt=cache_salt,
            tenant=tenant,
            priority=priority,
            ttft_target_seconds=ttft_target_seconds,
            tpot_target_seconds=tpot_target_seconds,
            deadline_seconds=deadline_seconds,
            metadata=metadata,
            session_id=session_id,
            predicted_output_tokens=predicted_output_tokens,
            chat=ChatArguments(
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            ),
        )
        return TokenStream(mailbox)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
        deadline_seconds: float | None = None,
        metadata: Mapping[str, str] | None = None,
        session_id: str | None = None,
        predicted_output_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Completion:
        """The whole answer at once; otherwise as `stream`. Cancelling it ends the request."""
        stream = self.stream(
            prompt,
            drawn_for(params),
            request_id=request_id,
            cache_salt=cache_salt,
            tenant=tenant,
            priority=priority,
            ttft_target_seconds=ttft_target_seconds,
            tpot_target_seconds=tpot_target_seconds,
            deadline_seconds=deadline_seconds,
            metadata=metadata,
            session_id=session_id,
            predicted_output_tokens=predicted_output_tokens,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return await read_whole(stream, params)

    async def beam_search(
        self,
        prompt: Prompt,
        *,
        beam_width: int = 4,
        max_tokens: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        ignore_eos: bool = False,
        cache_salt: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        metadata: Mapping[str, str] | None = None,
        session_id: str | None = None,
    ) -> tuple[Beam, ...]:
        """The `beam_width` answers that a beam search finds, best first: those of transformers'
        `generate` with `num_beams` and the same `length_penalty` and `early_stopping`.

        Each token of the answers takes a round of up to `beam_width` requests of one token, which
        share their pages in the prefix cache; otherwise as `generate`. Raises what `stream` does,
        and `InvalidSamplingError` for a search outside its range (`docs/reference/engine.md`).
        """
        wishes = {
            "cache_salt": cache_salt,
            "tenant": tenant,
            "priority": priority,
            "metadata": metadata,
            "session_id": session_id,
        }
        search = BeamSearch(
            self._usable().model,
            beam_width=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            ignore_eos=ignore_eos,
        )
        return await search.run(partial(self.stream, **wishes), prompt)

    async def score(
        self,
        prompt: Prompt,
        continuation: Continuation,
        *,
        top_logprobs: int = 0,
        **options: Unpack[LookOptions],
    ) -> Score:
        """How likely the model finds `continuation`, text or token ids, behind the prompt; nothing
        is generated. `top_logprobs` of the most likely tokens are told at each place, in [0, 64].
        Other options and errors are those of `generate`; `ttft_target_seconds` says how soon the
        score is wanted."""
        scores = await scores_of(
            self._usable,
            prompt,
            [continuation],
            several=None,
            top_logprobs=top_logprobs,
            **options,
        )
        return scores[0]

    async def score_each(
        self,
        prompt: Prompt,
        continuations: Sequence[Continuation],
        *,
        top_logprobs: int = 0,
        **options: Unpack[LookOptions],
    ) -> list[Score]:
        """The same for several continuations, each by itself behind the prompt, which is computed
        once. They are as many requests: number `i` has the id `request_id`-`i`."""
        live = self._usable()
        return await scores_of(
            self._usable,
            prompt,
            listed("continuations", continuations, live.config.max_waiting),
            several="continuations",
            top_logprobs=top_logprobs,
            **options,
        )

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        **options: Unpack[LookOptions],
    ) -> npt.NDArray[np.float32]:
        """The model's hidden states behind the final norm, pooled to one vector: float32
        `[hidden]` of a prompt, `[N, hidden]` of a sequence of N, which are as many requests.

        `pooling` takes the state of the "last" token, that of the first ("cls"), or the "mean" of
        all; `normalize` divides by the Euclidean length. Other options, ids and errors are those
        of `score_each`.
        """
        vectors, _ = await self.embed_counted(
            prompts, pooling=pooling, normalize=normalize, **options
        )
        return vectors

    async def embed_counted(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        **options: Unpack[LookOptions],
    ) -> tuple[npt.NDArray[np.float32], Usage]:
        """The same, and the token counts of all prompts together."""
        return await embeddings_of(
            self._usable, prompts, pooling=pooling, normalize=normalize, **options
        )

    async def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids that a request with this prompt would have, encoded as its is: within the
        same limits, and off the event loop where it takes long. Of text alone, `add_special_tokens`
        says whether it is framed as the model expects. Raises what `stream` does for a prompt."""
        chat = ChatArguments(
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        intake = self._usable().intake
        return await ids_of_prompt(intake, prompt, chat, add_special_tokens=add_special_tokens)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tool_parser: ToolParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
        strict_tools: Sequence[str] = (),
        parallel_tool_calls: bool = True,
        **options: Unpack[StreamOptions],
    ) -> ChatStream:
        """Submit messages and return the stream of their answer's parts, at once: content,
        reasoning and tool calls. `await engine.chat(...).completion()` is the whole answer.

        `tool_parser` and `reasoning_parser` name the forms in which the model writes these; "auto"
        is what the chat template is written for, of tool calls where `tools` are given, and nothing
        where the params ask for `structured_output`, all of which is content.

        With `strict_tools`, names of functions in `tools`, what an answer calls is one of the
        tools, and the arguments of a call to one of these are what its parameters take; all else
        that the model writes is free. With `parallel_tool_calls=False`, which goes with them, it
        calls one at most.

        The other options and errors are those of `stream`, and `InvalidRequestError` where a form
        is unknown, or a strict tool is.
        """
        live = self._usable()
        if unknown := options.keys() - StreamOptions.__annotations__.keys():
            raise TypeError(f"chat() got an unexpected keyword argument {min(unknown)!r}")
        # What is no SamplingParams is refused where requests come in.
        wanted = None
        if params is not None and issubclass(type(params), SamplingParams):
            wanted = params.structured_output
        if wanted is not None:
            # All of the answer has the form that was asked for.
            tool_parser = "none" if tool_parser == "auto" else tool_parser
            reasoning_parser = "none" if reasoning_parser == "auto" else reasoning_parser
        held = held_calls(strict_tools, parallel_tool_calls, has_form=wanted is not None)
        form = AnswerForm.of(live.model, options.get("tools"), tool_parser, reasoning_parser, held)
        given: dict[str, Any] = {**options}
        names = given.keys() & set(ChatArguments.__struct_fields__)
        chat = ChatArguments(**{name: given.pop(name) for name in names})
        mailbox = live.intake.submit(messages, params, form=form, chat=chat, **given)
        return ChatStream(TokenStream(mailbox), form)

    # -- what it knows

    @property
    def model_name(self) -> str:
        """What was loaded: a name, a hub id or a path, as it was given."""
        return self._entered().model.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ModelError` for a model that has none."""
        model = self._entered().model
        if model.tokenizer is None:
            raise ModelError(f"{model.name} has no tokenizer: {model.why_no_tokenizer}")
        return model.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text, and answers have any. Token ids always may be given."""
        return self._entered().model.tokenizer is not None

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary, context length and KV pages of the loaded model."""
        return self._entered().model.limits

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be lists of messages."""
        return self._entered().model.chat_template is not None

    def template_reads(self, name: str) -> bool:
        """Whether the chat template has that word, the name of a role or of a variable, anywhere;
        False where there is no template."""
        template = self._entered().model.chat_template
        return template is not None and template.reads(name)

    @property
    def default_params(self) -> SamplingParams:
        """How requests without parameters are sampled."""
        return self._entered().model.defaults

    @property
    def state(self) -> EngineState:
        """Where it is in its life; "failed" where a bug or its device has ended it."""
        failed = self._live is not None and self._live.core.failure is not None
        return "failed" if failed and self._state == "open" else self._state

    def stats(self) -> EngineStats:
        """The engine's numbers at this moment; also after it was closed. Raises `WrongLoopError`
        where they may change in another thread meanwhile."""
        return stats_of(self._at_rest())

    def dump(self) -> dict[str, Any]:
        """Everything about the engine's state that helps to debug it, as plain values. Raises
        `WrongLoopError` as `stats` does."""
        live = self._at_rest()
        return {"state": self.state, **dump_of(live)}

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Tell `observer` of what happens from now on; call what is returned to end that.

        It may be given before the engine is entered. Raises `ConfigError` for what is no `Observer`
        or has an async method, and `WrongLoopError` in another thread than the engine's.
        """
        check_observer_object(observer)
        if self._live is not None:
            self._at_rest().core.notices.observers.attach(observer, type(observer).__name__)
        self._observing.append(observer)
        return partial(self._observe_no_more, observer)

    def _observe_no_more(self, observer: Observer) -> None:
        self._observing = [one for one in self._observing if one is not observer]
        if self._live is not None:
            self._at_rest().core.notices.observers.detach(observer)

    # -- checks

    def _entered(self) -> LiveEngine:
        if self._live is None:
            raise EngineClosedError(
                f"the engine is {self._state}: use it inside `async with`", state=self._state
            )
        return self._live

    def _at_rest(self) -> LiveEngine:
        """For those who read what the core loop changes."""
        live = self._entered()
        closed = self._closing is not None and self._closing.done()
        if not closed and live.loop.is_running():
            check_on(live.loop, "the engine")
        return live

    def _usable(self) -> LiveEngine:
        live = self._entered()
        if self._state != "open":
            raise EngineClosedError(
                f"the engine is {self._state} and takes no requests", state=self._state
            )
        live.check()
        return live


async def _finish(closing: Awaitable[None]) -> None:
    """Run `closing` to its end although the caller is cancelled meanwhile, by a task's `cancel`,
    by a timeout or by an anyio scope: a step thread must not outlive its engine. It takes as long
    as the steps in flight."""
    task = asyncio.ensure_future(closing)
    cancelled = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
