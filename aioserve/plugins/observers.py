"""Tells observers what happened, in batches, and keeps those that fail from doing harm.

Knows neither the engine nor a clock. Observers are told after a step was committed, never once a
token.
"""

from __future__ import annotations

import inspect
import logging
import reprlib
from collections.abc import Sequence

from aioserve.errors import PluginError
from aioserve.plugins.records import RequestInfo, RequestSummary, StepInfo

__all__ = ["MAX_FAILURES", "Observer", "Observers"]

logger = logging.getLogger(__name__)

METHODS = ("arrived", "step_finished", "finished")
MAX_FAILURES = 3
"""An observer that raises this often in a row in the same method is detached."""


class Observer:
    """Watches one engine. Override what matters; the defaults do nothing.

    Methods are plain and synchronous and run on the event loop between steps: keep them quick.
    """

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        """These requests have entered the queue."""

    def step_finished(self, step: StepInfo) -> None:
        """A step was committed."""

    def finished(self, requests: Sequence[RequestSummary]) -> None:
        """These requests have ended, for whatever reason."""


class Observers:
    """Those of one engine. False if there are none."""

    def __init__(self) -> None:
        self._attached: list[_Attached] = []

    def attach(self, observer: Observer, label: str) -> None:
        """`label` names it and its distribution in the log.

        Raises `PluginError` for an object that isn't an `Observer`, or has an async method.
        """
        if not isinstance(observer, Observer):
            raise PluginError(f"observer {label}: its factory made {observer!r}, no Observer")
        for method in METHODS:
            if inspect.iscoroutinefunction(getattr(observer, method)):
                raise PluginError(f"observer {label}: {method} must be plain, got an async one")
        self._attached.append(_Attached(observer, label))

    @property
    def labels(self) -> tuple[str, ...]:
        """Those that are attached."""
        return tuple(attached.label for attached in self._attached)

    def __bool__(self) -> bool:
        return bool(self._attached)

    def tell(
        self,
        arrived: Sequence[RequestInfo],
        step: StepInfo | None,
        finished: Sequence[RequestSummary],
    ) -> None:
        """Pass on what happened since the last call, to every observer in this order; what is
        empty is passed over."""
        for attached in list(self._attached):
            if arrived:
                attached.call("arrived", tuple(arrived))
            if step is not None:
                attached.call("step_finished", step)
            if finished:
                attached.call("finished", tuple(finished))
        self._attached = [attached for attached in self._attached if not attached.given_up]


class _Attached:
    def __init__(self, observer: Observer, label: str) -> None:
        self.observer = observer
        self.label = label
        self.given_up = False
        self._failures: dict[str, int] = {}

    def call(self, method: str, told: object) -> None:
        if self.given_up:
            return
        try:
            getattr(self.observer, method)(told)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # CancelledError too: it is some other task's
            self._failures[method] = self._failures.get(method, 0) + 1
            logger.exception("observer %s: %s raised %s", self.label, method, reprlib.repr(error))
        else:
            self._failures[method] = 0
            return
        if self._failures[method] >= MAX_FAILURES:
            self.given_up = True
            logger.error(
                "observer %s is detached: %s raised %d times in a row",
                self.label,
                method,
                MAX_FAILURES,
            )
