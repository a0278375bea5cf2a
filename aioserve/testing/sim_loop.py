"""An event loop on a virtual clock that runs ready callbacks in an order drawn from a seed.

`run_simulated(main, seed=7)` is `asyncio.run(main())` on a loop of this kind. A sleep takes no
time. Each seed is another interleaving of the program's tasks, the same one every time.

These orders are kept, because asyncio's own code or usual idioms depend on them:

- Callbacks that became ready in one round of the loop run before those that become ready during
  that round.
- The callbacks of one future run in the order in which they were added.
- The methods of one object run in the order in which they were scheduled (two `call_soon` of
  `queue.put_nowait`). From one thread this also holds for `call_soon_threadsafe`.
- A timer never runs before an earlier one that isn't due at the same moment.

Everything else is shuffled. asyncio promises more (first in, first out, across all callbacks). A
`SimLoop` finds programs that need more than this list. In the standard library only transports do.
This loop has no I/O: sockets and subprocesses raise NotImplementedError.

The clock stands still while anything is ready and then jumps to the next timer. If callbacks keep
each other ready for `SPIN_ROUNDS` rounds the next timer fires anyway, as it would on a real clock.
The library anyio keeps the loop busy like this while a cancelled task takes its time.

Work for threads (`run_in_executor`, `asyncio.to_thread`, `anyio.to_thread`) is done in real
threads, at the start of the next round. The loop waits for it, and executors are ignored. A thread
may not return within `PATIENCE_SECONDS` of real time, perhaps because it waits for the loop. The
loop then stops waiting for it until it calls. A thread that has called the loop before is given
`SHORT_PATIENCE_SECONDS`. Threads that are started otherwise are not waited for at all.

A seed repeats its run unless the program depends on real time or on the garbage collector. It may
not depend on `id` and `hash` either, as in the order of a set of tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import inspect
import math
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from aioserve.errors import ConfigError
from aioserve.isolation import shown

__all__ = ["DeadlockError", "SimLoop", "SimulationError", "run_simulated"]

T = TypeVar("T")

SPIN_ROUNDS = 1_000
PATIENCE_SECONDS = 1.0
SHORT_PATIENCE_SECONDS = 0.02
DEADLOCK_PATIENCE_SECONDS = 10.0
KEPT_CANCELLED_TIMERS = 64
MAX_ROUNDS = 1_000_000
WORKER_OF_ANYIO = "AnyIO worker thread"


class SimulationError(Exception):
    """A simulated program didn't come to a clean end."""


class DeadlockError(SimulationError):
    """No callback is ready, no timer is set, and the program isn't done."""


def run_simulated(
    main: Callable[[], Coroutine[Any, Any, T]], *, seed: int = 0, max_rounds: int = MAX_ROUNDS
) -> T:
    """Run `main()` to its end on a new `SimLoop` and return its result.

    Raises what it raises, with a note that says how to repeat the run. Raises `DeadlockError`
    naming the place where each task waits. Raises `SimulationError` after `max_rounds` rounds of
    the loop, and for an unhandled exception (in a callback, or in a task that nobody awaited).
    Raises `ConfigError` unless `main` is a function whose result is a coroutine, and for invalid
    numbers.
    """
    if not callable(main):
        raise ConfigError(f"main must be an async function, and not called yet, got {shown(main)}")
    loop = SimLoop(seed, max_rounds=max_rounds)
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: unhandled.append(context))
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            program = main()
            if not inspect.iscoroutine(program):
                raise ConfigError(f"main must be an async function, and returned {shown(program)}")
            try:
                result = runner.run(program)
            finally:
                loop._max_rounds += MAX_ROUNDS  # rounds that tidy up don't count
        if unhandled:
            first = unhandled[0]
            raise SimulationError(
                f"{len(unhandled)} errors that nobody handled; the first: {first['message']}: "
                f"{first.get('exception')!r}"
            ) from first.get("exception")
    except BaseException as error:
        name = getattr(main, "__qualname__", None) or shown(main)
        error.add_note(f"to repeat it: run_simulated({name}, seed={shown(seed)})")
        raise
    return result


class SimLoop(asyncio.BaseEventLoop):
    """The loop itself, for `asyncio.Runner(loop_factory=...)`; most tests want `run_simulated`."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, seed: int = 0, *, max_rounds: int = MAX_ROUNDS) -> None:
        """Make a loop. Raises `ConfigError` for a seed that is no int and for `max_rounds`
        below 1.
        """
        super().__init__()
        try:
            seed = _checked_int("seed", seed)
            max_rounds = _checked_int("max_rounds", max_rounds, " of at least 1", least=1)
        except ConfigError:
            self.close()
            raise
        self.seed = seed
        self.rounds: int = 0
        """Rounds of the loop so far."""
        self._max_rounds = max_rounds
        self._draw = random.Random(seed).random
        self._now_seconds = 0.0
        self._busy_rounds = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._num_cancelled_timers = 0
        self._called_in = threading.Condition()
        self._calls: deque[tuple[threading.Thread, asyncio.Handle]] = deque()
        self._work: deque[threading.Thread] = deque()
        self._at_work: set[threading.Thread] = set()
        self._given_up: set[threading.Thread] = set()
        self._have_called: set[threading.Thread] = set()

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now_seconds

    def block(self, seconds: float) -> None:
        """Advance the clock as if the calling callback had blocked the loop for `seconds`.

        Raises `ConfigError` for less than 0 and for infinity or NaN.
        """
        passed = -1.0
        if _is_a(seconds, int, float):
            with contextlib.suppress(Exception):  # from a class of its own, or an int beyond floats
                passed = float(seconds)
        if not 0 <= passed < math.inf:
            raise ConfigError(f"seconds must be at least 0 and finite, got {shown(seconds)}")
        self._now_seconds += passed

    # -- one round

    def _run_once(self) -> None:
        self.rounds += 1
        if self.rounds > self._max_rounds:
            # Tidying up after the error may take as many rounds again.
            self._max_rounds += self.rounds
            raise SimulationError(
                f"not done after {self.rounds - 1} rounds, at {self._now_seconds:g} s of virtual "
                f"time; {self._where_tasks_wait()}"
            )
        self._wait_for_threads()
        self._take_timers()
        batch = deque(self._shuffled())
        handle: asyncio.Handle | None = None
        try:
            while batch:
                handle = batch.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            # The traceback of a task's error has this frame, and would keep the task alive.
            handle = None
            # Some are left after a KeyboardInterrupt, say.
            self._ready.extendleft(reversed(batch))

    def _take_timers(self) -> None:
        """Make due timers ready, after advancing the clock if nothing else is."""
        timers = self._timers
        self._busy_rounds = self._busy_rounds + 1 if self._ready else 0
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._num_cancelled_timers -= 1
        if (not self._ready and not self._stopping) or self._busy_rounds > SPIN_ROUNDS:
            self._busy_rounds = 0
            if timers:
                self._now_seconds = max(self._now_seconds, timers[0][0])
            elif not self._ready:
                self._wait_for_a_blocked_thread()
        # Only timers of one moment: if several are overdue, each has a round of its own.
        due = min(timers[0][0], self._now_seconds) if timers else self._now_seconds
        while timers and timers[0][0] <= due:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            if timer.cancelled():
                self._num_cancelled_timers -= 1
            else:
                self._ready.append(timer)

    def _shuffled(self) -> list[asyncio.Handle]:
        """Take all ready handles, in a new order that keeps the order of each owner's handles."""
        batch = list(self._ready)
        self._ready.clear()
        if len(batch) < 2:
            return batch
        owners = _owners(batch)
        draw = self._draw
        order = sorted(range(len(batch)), key=lambda _: draw())
        if len(set(owners)) == len(batch):
            return [batch[index] for index in order]
        queues: defaultdict[int, deque[asyncio.Handle]] = defaultdict(deque)
        for handle, owner in zip(batch, owners, strict=True):
            queues[owner].append(handle)
        return [queues[owners[index]].popleft() for index in order]

    # -- timers

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a timer, as asyncio does."""
        self._check_closed()  # pyright: ignore[reportAttributeAccessIssue]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        timer._scheduled = True
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Count a cancelled timer. A timer calls this before it is cancelled."""
        if not handle._scheduled:
            return
        self._num_cancelled_timers += 1
        if self._num_cancelled_timers > KEPT_CANCELLED_TIMERS + len(self._timers) // 2:
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._num_cancelled_timers = 1

    # -- threads

    def call_soon_threadsafe(
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Schedule a callback from any thread, as asyncio does."""
        if threading.get_ident() == self._thread_id:  # pyright: ignore[reportAttributeAccessIssue]
            return self.call_soon(callback, *args, context=context)
        self._check_closed()  # pyright: ignore[reportAttributeAccessIssue]
        handle = asyncio.Handle(callback, args, self, context)
        with self._called_in:
            self._calls.append((threading.current_thread(), handle))
            self._called_in.notify()
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:
        """Run a function as asyncio does, in a thread of its own whatever the executor."""
        self._check_closed()  # pyright: ignore[reportAttributeAccessIssue]
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result: T | BaseException = func(*args)
            except BaseException as error:
                resolve, result = future.set_exception, error
            else:
                resolve = future.set_result
            if not self.is_closed():
                thread = threading.current_thread()
                self.call_soon_threadsafe(self._end_work, future, thread, resolve, result)

        name = f"simulated work {len(self._work)}"
        self._work.append(threading.Thread(target=work, name=name, daemon=True))
        return future

    async def shutdown_default_executor(self, *args: Any, **options: Any) -> None:
        """Do nothing: there is no default executor."""

    def _end_work(
        self,
        future: asyncio.Future[T],
        thread: threading.Thread,
        resolve: Callable[[Any], None],
        result: T | BaseException,
    ) -> None:
        self._at_work.discard(thread)
        self._have_called.discard(thread)
        if not future.cancelled():
            resolve(result)

    def _wait_for_threads(self) -> None:
        """Start threads one by one, and wait until each has done its work or called the loop."""
        if threading.active_count() < 2 and not self._work and not self._calls:
            return
        while self._work:
            thread = self._work.popleft()
            self._at_work.add(thread)
            thread.start()
            self._wait_until_called_by({thread}, PATIENCE_SECONDS)
        at_work = set(self._threads_at_work()) - self._given_up
        self._wait_until_called_by(at_work - self._have_called, PATIENCE_SECONDS)
        self._wait_until_called_by(at_work & self._have_called, SHORT_PATIENCE_SECONDS)
        if self._calls:
            self._take_calls()

    def _wait_until_called_by(self, threads: set[threading.Thread], seconds: float) -> None:
        def all_called() -> bool:
            return threads <= {thread for thread, _ in self._calls}

        if threads:
            with self._called_in:
                if not self._called_in.wait_for(all_called, seconds):
                    self._given_up |= threads

    def _take_calls(self) -> None:
        with self._called_in:
            calls = list(self._calls)
            self._calls.clear()
        # Keep each thread's calls in their order, threads in the order in which they were started.
        started = {thread: rank for rank, thread in enumerate(threading.enumerate())}
        calls.sort(key=lambda call: started.get(call[0], -1))
        self._ready.extend(handle for _, handle in calls)
        callers = {thread for thread, _ in calls}
        self._given_up -= callers
        self._have_called |= callers

    def _threads_at_work(self) -> Iterator[threading.Thread]:
        yield from self._at_work
        if threading.active_count() > 1:
            for thread in threading.enumerate():
                if thread.name == WORKER_OF_ANYIO and getattr(thread, "loop", None) is self:
                    idle = thread in thread.idle_workers  # pyright: ignore[reportAttributeAccessIssue]
                    if not idle and not thread.stopping:  # pyright: ignore[reportAttributeAccessIssue]
                        yield thread

    def _wait_for_a_blocked_thread(self) -> None:
        """Wait for a thread, as the last hope of a loop without anything to do."""
        threads = list(self._threads_at_work())
        with self._called_in:
            if threads:
                self._called_in.wait_for(lambda: self._calls, DEADLOCK_PATIENCE_SECONDS)
        if self._calls:
            self._take_calls()
            return
        waits = "".join(f"\n  thread {thread.name!r} doesn't return" for thread in threads)
        raise DeadlockError(
            f"nothing is ready and no timer is set, at {self._now_seconds:g} s of virtual time; "
            f"{self._where_tasks_wait()}{waits}"
        )

    def _where_tasks_wait(self) -> str:
        lines = []
        for task in asyncio.all_tasks(self):
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "its end"
            lines.append(f"\n  task {task.get_name()!r} is at {where}")
        return f"{len(lines)} tasks aren't done:" + "".join(sorted(lines))


def _is_a(value: object, *kinds: type) -> bool:
    return issubclass(type(value), kinds) and type(value) is not bool


def _checked_int(name: str, value: int, limit: str = "", least: float = -math.inf) -> int:
    """Return a plain int, whatever the class of `value`."""
    if _is_a(value, int) and (plain := int.__int__(value)) >= least:
        return plain
    raise ConfigError(f"{name} must be an int{limit}, got {shown(value)}")


def _owners(handles: list[asyncio.Handle]) -> list[int]:
    """Return a number for each handle; handles with equal numbers keep their order.

    These are methods of one object, or callbacks of one future. A handle whose first argument is a
    future counts as its callback.
    """
    joined: dict[int, int] = {}

    def find(key: int) -> int:
        while (above := joined.setdefault(key, key)) != key:
            key = above
        return key

    keys = [id(getattr(handle._callback, "__self__", handle)) for handle in handles]
    for key, handle in zip(keys, handles, strict=True):
        args = handle._args
        if args and isinstance(args[0], asyncio.Future):
            joined[find(id(args[0]))] = find(key)
    return [find(key) for key in keys]
