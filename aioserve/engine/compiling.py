"""Compiles structured output into grammars, off the event loop.

    submit ──► known? ──► waiting ──► on a thread ──► then(grammar)
                             └── cancel ──────┘

A compile can't be interrupted. Each request therefore waits for at most `COMPILE_SECONDS`. A slower
compile keeps its thread, and a new thread takes its place, a few times. Requests with the same
structured output share one compile, and are refused at once while that is overdue. Results are kept
for reuse, grammars and errors, the least recently used dropped first. Their number and bytes are
bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from aioserve.arguments import counted
from aioserve.errors import InvalidSamplingError, QueueFullError
from aioserve.execution.handler_thread import HandlerThread
from aioserve.execution.runner import LoadedModel
from aioserve.grammars.calls import CallsOutput
from aioserve.grammars.channels import ChannelOutput
from aioserve.grammars.grammar import CompiledGrammar, argument_of, compile_grammar
from aioserve.grammars.vocabulary import Vocabulary
from aioserve.isolation import shown
from aioserve.structured_output import StructuredOutput

__all__ = ["Compiling", "GrammarCompiler"]

logger: logging.Logger = logging.getLogger(__name__)

COMPILE_SECONDS = 10.0
"""Time that a request waits for a compile. The largest schemas in use take a second or two."""
MAX_THREADS = 2
"""Threads that compile. A small schema needn't wait for a large one."""
MAX_STUCK = 2
"""Most further threads, started to replace overdue ones."""
MAX_KEPT = 256
MAX_KEPT_BYTES = 2**29
"""Most bytes that kept results may grow to. They mostly hold a tenth of that."""
EXIT_SECONDS = 0.5
"""Time that interpreter exit waits for a compile."""

Compiled = CompiledGrammar | BaseException
Worker = HandlerThread[Any]


class Compiling:
    """One request's wait for a grammar. Used on the event loop's thread only."""

    __slots__ = ("_compiler", "then")

    def __init__(self, compiler: GrammarCompiler, then: Callable[[Compiled], None]) -> None:
        self._compiler = compiler
        self.then: Callable[[Compiled], None] | None = then
        """Callback of the request. Cleared once it was called or cancelled."""

    def cancel(self) -> None:
        """Never call `then`. Safe at any moment: the garbage collector may call it."""
        if self.then is not None:
            self.then = None
            self._compiler.left()


class _Job:
    """Structured output that is or will be compiled, and the requests that want it."""

    def __init__(self, output: StructuredOutput) -> None:
        self.output = output
        self.waiters: list[Compiling] = []
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_wanted(self) -> bool:
        return any(waiter.then is not None for waiter in self.waiters)


class GrammarCompiler:
    """Compiles for one engine, on its own threads. Used only on the event loop that it is made
    on."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._kept: OrderedDict[tuple[Any, ...], CompiledGrammar | InvalidSamplingError] = (
            OrderedDict()
        )
        self._kept_bytes = 0
        self._jobs: dict[tuple[Any, ...], _Job] = {}
        self._late: set[tuple[Any, ...]] = set()
        """Keys of overdue compiles."""
        self._waiting: deque[_Job] = deque()
        self._free: list[Worker] = []
        self._workers: list[Worker] = []
        self._stuck: set[Worker] = set()
        self._vocabulary = _OneVocabulary(model)
        self._num_wanted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def submit(
        self, output: StructuredOutput, then: Callable[[Compiled], None]
    ) -> Compiling | None:
        """Call `then` with the grammar or the error.

        A known result is passed at once, and None returned. Errors change nothing: `RuntimeError`
        if the system can't start a thread, `InvalidSamplingError` for an overdue compile,
        `QueueFullError` if all threads are overdue.
        """
        key = _key(output)
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            then(known.copy() if isinstance(known, InvalidSamplingError) else known)
            return None
        if key in self._late:
            raise _too_slow(output)
        if len(self._stuck) >= MAX_THREADS + MAX_STUCK:
            raise self._all_stuck()
        if (job := self._jobs.get(key)) is None:
            job = _Job(output)
            self._waiting.append(job)
            try:
                self._start()
            except RuntimeError:
                self._waiting.remove(job)
                raise
            self._jobs[key] = job
        waiter = Compiling(self, then)
        job.waiters.append(waiter)
        self._num_wanted += 1
        self._idle.clear()
        return waiter

    def left(self) -> None:
        """Note that a request waits no more."""
        self._num_wanted -= 1
        if self._num_wanted == 0:
            self._idle.set()

    def _all_stuck(self) -> QueueFullError:
        stuck = len(self._stuck)
        return QueueFullError(
            f"{counted(stuck, 'thread compiles', 'threads compile')} what takes too long, and no "
            "other can",
            value=stuck,
            limit=MAX_THREADS + MAX_STUCK,
            unit="grammars",
            retry_after_seconds=COMPILE_SECONDS,  # they took that long, and may take as long again
        )

    async def prepare(self) -> None:
        """Make the model's vocabulary, on a thread.

        Large ones take seconds, and the library holds the interpreter's lock meanwhile. So this
        happens before any request. A failure is logged, and fails the requests that need the
        vocabulary.
        """
        if not self._model.generates or self._model.tokenizer is None:
            return
        error = await asyncio.to_thread(self._vocabulary.why_not)
        if error is not None:
            logger.warning(
                "%s: structured output can't be made with this tokenizer: %s",
                self._model.name,
                shown(error),
            )

    async def wait_idle(self) -> None:
        """Wait until no request waits for a grammar."""
        await self._idle.wait()

    async def aclose(self) -> None:
        """End the threads. A running compile is left alone: it touches nothing of the engine,
        and its thread ends when the library returns."""
        self._closed = True
        for job in self._jobs.values():
            if job.timer is not None:
                job.timer.cancel()
        for worker in self._workers:
            worker.end()
            if worker in self._free:
                await worker.aclose()

    def _start(self) -> None:
        """Give waiting jobs to free threads."""
        while self._waiting:
            if self._waiting[0].waiters and not self._waiting[0].is_wanted:
                self._forget(self._waiting.popleft())
                continue
            if not self._free:
                working = len(self._workers) - len(self._stuck)
                if working >= MAX_THREADS or len(self._workers) >= MAX_THREADS + MAX_STUCK:
                    return
                name = f"aioserve-compile-{self._model.name}"
                worker: Worker = HandlerThread(name, _compile, exit_seconds=EXIT_SECONDS)
                self._workers.append(worker)
                self._free.append(worker)
            worker, job = self._free.pop(), self._waiting.popleft()
            worker.put((self._vocabulary, job.output, partial(self._post, worker, job)))
            job.timer = self._loop.call_later(COMPILE_SECONDS, self._time_out, worker, job)

    def _post(self, worker: Worker, job: _Job, compiled: Compiled) -> None:
        """Pass a result to the event loop. Runs on a compile thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended, worker, job, compiled)

    def _ended(self, worker: Worker, job: _Job, compiled: Compiled) -> None:
        if self._closed:
            return
        self._free.append(worker)
        if worker in self._stuck:
            self._stuck.remove(worker)
            self._late.remove(_key(job.output))
        if job.timer is not None:
            job.timer.cancel()
        if isinstance(compiled, InvalidSamplingError):
            self._keep(job.output, compiled.copy())
        elif isinstance(compiled, CompiledGrammar):
            self._keep(job.output, compiled)
        self._tell(job, compiled)
        self._go_on()

    def _time_out(self, worker: Worker, job: _Job) -> None:
        self._stuck.add(worker)
        self._late.add(_key(job.output))
        self._tell(job, _too_slow(job.output))
        self._go_on()

    def _go_on(self) -> None:
        """Start waiting jobs, or fail them if no thread can ever take them."""
        error: Exception | None = None
        try:
            self._start()
        except RuntimeError as no_thread:
            if len(self._stuck) == len(self._workers):
                error = no_thread
        if len(self._stuck) >= MAX_THREADS + MAX_STUCK:
            error = self._all_stuck()
        if error is not None:
            told, self._waiting = self._waiting, deque()
            for job in told:
                self._tell(job, error)

    def _forget(self, job: _Job) -> None:
        """Forget a job that no request waits for."""
        self._jobs.pop(_key(job.output), None)

    def _tell(self, job: _Job, compiled: Compiled) -> None:
        self._forget(job)
        waiters, job.waiters = job.waiters, []
        for waiter in waiters:
            if (then := waiter.then) is not None:
                waiter.cancel()
                then(compiled)

    def _keep(
        self, output: StructuredOutput, compiled: CompiledGrammar | InvalidSamplingError
    ) -> None:
        key = _key(output)
        if (before := self._kept.pop(key, None)) is not None:
            self._kept_bytes -= _num_bytes(key, before)
        self._kept_bytes += _num_bytes(key, compiled)
        self._kept[key] = compiled
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= _num_bytes(*self._kept.popitem(last=False))


class _OneVocabulary:
    """Vocabulary of a model, made on first use."""

    def __init__(self, model: LoadedModel) -> None:
        self._tokenizer = model.tokenizer
        self._num_logits = model.limits.vocab_size
        self._lock = threading.Lock()
        self._made: Vocabulary | None = None

    def get(self) -> Vocabulary:
        with self._lock:
            if self._made is None:
                if self._tokenizer is None:
                    raise InvalidSamplingError(
                        "structured_output must be None without a tokenizer",
                        argument="structured_output",
                    )
                self._made = Vocabulary(self._tokenizer, self._num_logits)
            return self._made

    def why_not(self) -> BaseException | None:
        """Make it; return the exception if that fails."""
        try:
            self.get()
        except BaseException as error:  # a panic in Rust code is a BaseException
            return error
        return None


def _compile(
    entry: tuple[_OneVocabulary, StructuredOutput, Callable[[Compiled], None]],
) -> None:
    """Compile and pass on the result. Runs on a compile thread."""
    vocabulary, output, then = entry
    try:
        compiled: Compiled = compile_grammar(vocabulary.get(), output)
    except BaseException as error:  # a panic in Rust code is a BaseException
        compiled = error
    then(compiled)


def _too_slow(output: StructuredOutput) -> InvalidSamplingError:
    argument = argument_of(output)
    return InvalidSamplingError(
        f"{argument} must be one that is compiled within {COMPILE_SECONDS:g} s",
        argument=argument,
        limit=COMPILE_SECONDS,
    )


def _key(output: StructuredOutput) -> tuple[Any, ...]:
    schemas = output.schemas if isinstance(output, CallsOutput) else None
    form = output.form if isinstance(output, CallsOutput | ChannelOutput) else None
    given = getattr(output, output.kind)
    inner = None if form is None else _key(form)
    return (output.kind, given, output.whitespace, schemas, inner)


def _num_bytes(key: tuple[Any, ...], compiled: Compiled) -> int:
    """Upper bound of the memory of a kept result, in bytes."""
    return _key_bytes(key) + (compiled.num_bytes if isinstance(compiled, CompiledGrammar) else 0)


def _key_bytes(key: tuple[Any, ...]) -> int:
    _, value, _, schemas, inner = key
    texts = value if isinstance(value, tuple) else (str(value),)
    num_bytes = sum(len(text.encode()) for text in (*texts, *(schemas or ())))
    return num_bytes + (0 if inner is None else _key_bytes(inner))
