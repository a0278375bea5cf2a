"""Checks of eviction strategies, observers, admission checks and logits processors on random
input.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING

from aioserve.hints import MAX_PRIORITY, MIN_PRIORITY
from aioserve.isolation import NotAnAnswer, shown
from aioserve.kv.eviction import EvictionStrategy, PageUse, key_of
from aioserve.plugins import Observer, RequestInfo, RequestSummary, StepInfo, StepPart
from aioserve.plugins.observers import refusal_of
from aioserve.request import FinishReason
from aioserve.sampling.processors import LogitsProcessor, changed_by
from aioserve.timings import InterTokenLatency

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy
from aioserve.testing.examples import check_arguments, quiet_settings

__all__ = ["check_admission", "check_eviction", "check_logits_processor", "check_observer"]


def check_eviction(
    make_strategy: Callable[[], EvictionStrategy], *, max_examples: int = 100
) -> None:
    """Raise `AssertionError` unless the strategy returns a number for every use of pages.

    The number may depend only on the use. The error shows the smallest example. `make_strategy`
    makes a new object with each call. Needs hypothesis.
    """
    check_arguments("make_strategy", make_strategy, max_examples)
    from hypothesis import given

    @quiet_settings(max_examples, report_multiple_bugs=False)
    @given(_uses(), _uses())
    def check(use: PageUse, other: PageUse) -> None:
        strategy = make_strategy()
        with _answers(f"key({use})"):
            first = key_of(strategy, use)
        strategy.key(other)
        for again in (strategy.key(use), make_strategy().key(use)):
            if again != first:
                raise AssertionError(
                    f"key({use}) is {first!r} and then {again!r}: it must depend on the use alone"
                )

    check()


def check_observer(make_observer: Callable[[], Observer], *, max_examples: int = 100) -> None:
    """Raise unless the observer accepts whatever an engine may tell it, in any order.

    `make_observer` makes a new object with each call. Needs hypothesis.
    """
    check_arguments("make_observer", make_observer, max_examples)
    from hypothesis import given
    from hypothesis import strategies as st

    if not isinstance(make_observer(), Observer):
        raise AssertionError(f"make_observer must give an Observer, got {make_observer()!r}")
    told = st.one_of(
        st.tuples(st.just("arrived"), st.lists(_requests(), min_size=1).map(tuple)),
        st.tuples(st.just("step_finished"), _steps()),
        st.tuples(st.just("finished"), st.lists(_summaries(), min_size=1).map(tuple)),
    )

    @quiet_settings(max_examples, report_multiple_bugs=False)
    @given(st.lists(told))
    def check(calls: list[tuple[str, object]]) -> None:
        observer = make_observer()
        for method, value in calls:
            answer = getattr(observer, method)(value)
            if inspect.iscoroutine(answer):
                answer.close()
                raise AssertionError(f"{method} is async: nobody awaits it")

    check()


def check_admission(ask: Callable[[RequestInfo], object], *, max_examples: int = 100) -> None:
    """Raise unless `ask`, an `aioserve_admit`, answers every request with None or a `Refusal`.

    Needs hypothesis.
    """
    check_arguments("ask", ask, max_examples)
    from hypothesis import given

    @quiet_settings(max_examples, report_multiple_bugs=False)
    @given(_requests())
    def check(request: RequestInfo) -> None:
        with _answers(f"aioserve_admit({request})"):
            refusal_of(ask, request)

    check()


def check_logits_processor(
    make_processor: Callable[[], LogitsProcessor], *, max_examples: int = 100
) -> None:
    """Raise unless the processor's changes to a row follow from the ids alone.

    A processor that has seen the answer grow and a new one, as after a preemption, must do the
    same. Each call of `make_processor` makes a new object. Needs hypothesis.
    """
    check_arguments("make_processor", make_processor, max_examples)
    import torch
    from hypothesis import given
    from hypothesis import strategies as st

    ids = st.lists(st.integers(0, 31), max_size=8)

    @quiet_settings(max_examples, report_multiple_bugs=False)
    @given(ids.filter(bool), ids, st.integers(0, 2**32 - 1))
    def check(prompt: list[int], answer: list[int], seed: int) -> None:
        logits = torch.randn(32, generator=torch.Generator().manual_seed(seed))
        prompt_ids, answer_ids = torch.tensor(prompt), torch.tensor(answer, dtype=torch.int64)
        grown = make_processor()
        with _answers(f"process({prompt}, {answer}, logits)"):
            for end in range(len(answer) + 1):
                old = changed_by(grown, prompt_ids, answer_ids[:end], logits)
            new = changed_by(make_processor(), prompt_ids, answer_ids, logits)
        if not torch.equal(old.nan_to_num(7e7), new.nan_to_num(7e7)):
            raise AssertionError(
                f"process({prompt}, {answer}, logits) of a processor that saw the answer grow "
                "isn't that of a new one: it must follow from the ids alone"
            )

    check()


@contextlib.contextmanager
def _answers(question: str) -> Iterator[None]:
    try:
        yield
    except NotAnAnswer as error:
        answer, why = error.args
        raise AssertionError(f"{question} is {shown(answer)}, {why}") from None


def _uses() -> SearchStrategy[PageUse]:
    from hypothesis import strategies as st

    ticks = st.integers(0, 2**40)
    return st.builds(
        lambda created, since, hits: PageUse(created, created + since, hits), ticks, ticks, ticks
    )


def _requests() -> SearchStrategy[RequestInfo]:
    from hypothesis import strategies as st

    target = st.none() | st.floats(0.001, 1000)
    return st.builds(
        RequestInfo,
        request_id=st.text(min_size=1, max_size=8),
        tenant=st.none() | st.text(min_size=1, max_size=8),
        prompt_tokens=st.integers(1, 10**6),
        max_tokens=st.integers(1, 10**6),
        num_samples=st.integers(1, 8),
        priority=st.integers(MIN_PRIORITY, MAX_PRIORITY),
        ttft_target_seconds=target,
        tpot_target_seconds=target,
        deadline_seconds=target,
        arrival_seconds=st.floats(0, 1e9),
        metadata=_metadata(),
        session_id=st.none() | st.text(min_size=1, max_size=8),
        predicted_output_tokens=st.none() | st.integers(1, 10**6),
    )


def _metadata() -> SearchStrategy[MappingProxyType[str, str]]:
    from hypothesis import strategies as st

    texts = st.text(max_size=8)
    return st.dictionaries(texts, texts, max_size=3).map(MappingProxyType)


def _steps() -> SearchStrategy[StepInfo]:
    from hypothesis import strategies as st

    count = st.integers(0, 10**6)
    return st.builds(
        StepInfo,
        step=count,
        end_seconds=st.floats(0, 1e9),
        num_sequences=st.integers(1, 10**6),
        computed_tokens=count,
        num_preempted=count,
        failed=st.booleans(),
        num_running=count,
        num_waiting=count,
        pages_free=count,
        pages_cached=count,
        pages_fenced=count,
        pages_held_by_requests=count,
        begin_seconds=st.floats(0, 1e9),
        parts=st.lists(_parts(), max_size=4).map(tuple),
        preempted=st.lists(st.tuples(st.text(min_size=1, max_size=8), count), max_size=2).map(
            tuple
        ),
    )


def _parts() -> SearchStrategy[StepPart]:
    from hypothesis import strategies as st

    count = st.integers(0, 10**6)
    return st.builds(
        StepPart,
        request_id=st.text(min_size=1, max_size=8),
        sample=st.integers(0, 7),
        start_tokens=count,
        num_tokens=st.integers(1, 10**6),
        num_sampled=st.integers(0, 8),
        is_decode=st.booleans(),
    )


def _summaries() -> SearchStrategy[RequestSummary]:
    from hypothesis import strategies as st

    return st.builds(
        RequestSummary,
        request_id=st.text(min_size=1, max_size=8),
        tenant=st.none() | st.text(min_size=1, max_size=8),
        finish_reason=st.sampled_from(FinishReason),
        error=st.none() | st.text(),
        prompt_tokens=st.integers(0, 10**6),
        completion_tokens=st.integers(0, 10**6),
        first_token_seconds=st.none() | st.floats(0, 1e6),
        total_seconds=st.floats(0, 1e6),
        cached_tokens=st.integers(0, 10**6),
        encoding_seconds=st.none() | st.floats(0, 1e6),
        queued_seconds=st.none() | st.floats(0, 1e6),
        inter_token_latency=st.none() | _inter_token_latencies(),
        preemptions=st.integers(0, 10**6),
        device_seconds=st.floats(0, 1e6),
    )


def _inter_token_latencies() -> SearchStrategy[InterTokenLatency]:
    from hypothesis import strategies as st

    seconds = st.floats(0, 1e6)
    return st.builds(
        InterTokenLatency,
        count=st.integers(1, 10**6),
        mean_seconds=seconds,
        p50_seconds=seconds,
        p99_seconds=seconds,
        max_seconds=seconds,
    )
