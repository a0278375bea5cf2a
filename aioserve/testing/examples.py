"""Random examples for checks of plugins, with hypothesis, which is imported on use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.traces.checks import check_int

if TYPE_CHECKING:
    from hypothesis import settings
    from hypothesis.strategies import SearchStrategy

__all__ = ["check_arguments", "quiet_settings", "smallest_failure"]

Example = TypeVar("Example")

MAX_EXAMPLES = 1_000_000


class _EnoughTried(BaseException):
    """Ends a search of hypothesis, which only catches exceptions."""


def check_arguments(name: str, make: object, max_examples: int) -> None:
    """Raise `ConfigError` unless `make` is callable and `max_examples` is in range.

    Raises `ModuleNotFoundError` without hypothesis, naming the extra that brings it.
    """
    if not callable(make):
        raise ConfigError(f"{name} must be callable, got {shown(make)}")
    check_int("max_examples", max_examples, 1, MAX_EXAMPLES)
    if importlib.util.find_spec("hypothesis") is None:
        raise ModuleNotFoundError(
            "checks of plugins need hypothesis: pip install 'aioserve[testing]'", name="hypothesis"
        )


def quiet_settings(max_examples: int, **others: Any) -> settings:
    """Return settings of hypothesis for examples that are neither kept nor timed."""
    from hypothesis import Phase, settings

    phases = [Phase.generate, Phase.shrink]
    return settings(
        max_examples=max_examples, deadline=None, database=None, phases=phases, **others
    )


def smallest_failure(
    examples: SearchStrategy[Example],
    attempt: Callable[[Example], None],
    max_examples: int,
    *,
    max_smaller: int,
    size_of: Callable[[Example], int],
) -> tuple[Example, Exception] | None:
    """Return the smallest example for which `attempt` raises, with its exception; None without any.

    After a failure `max_smaller` others are tried, for one that is easier to read.
    """
    from hypothesis import HealthCheck, Verbosity, given

    failures: list[tuple[Example, Exception]] = []
    num_tried_since = 0

    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]

    @quiet_settings(max_examples, suppress_health_check=slow, verbosity=Verbosity.quiet)
    @given(examples)
    def check(example: Example) -> None:
        nonlocal num_tried_since
        if failures:
            num_tried_since += 1
            if num_tried_since > max_smaller:
                raise _EnoughTried
        try:
            attempt(example)
        except Exception as error:
            failures.append((example, error))
            raise

    try:
        check()
    except (Exception, _EnoughTried):
        # If an attempt fails only sometimes, hypothesis reports only that.
        if not failures:
            raise
        return min(reversed(failures), key=lambda failure: size_of(failure[0]))
    return None
