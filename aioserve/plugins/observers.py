"""Tells observers what happened, in batches, and detaches those that keep failing.

Knows neither the engine nor a clock. Observers are told after a step was committed, never once a
token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aioserve.isolation import PluginCalls, PluginFault
from aioserve.plugins.records import RequestInfo, RequestSummary, StepInfo

__all__ = ["MAX_FAILURES", "Observer", "Observers"]

logger: logging.Logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Failures in a row in the same method after which an observer is detached."""


class Observer:
    """Watches one engine. Override what matters; the defaults do nothing.

    Methods are plain and synchronous and run on the event loop between steps: keep them quick.
    """

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        """Called when these requests have entered the queue."""

    def step_finished(self, step: StepInfo) -> None:
        """Called when a step was committed."""

    def finished(self, requests: Sequence[RequestSummary]) -> None:
        """Called when these requests have ended, for whatever reason."""


class Observers:
    """Observers of one engine. False if there are none."""

    def __init__(self) -> None:
        self._attached: list[ObserverCalls] = []
        self.watch_steps: bool = False
        """Whether any of them does something where a step has ended."""

    def attach(self, observer: Observer, label: str) -> None:
        """Attach an observer. `label` names it and its distribution in the log."""
        self._become([*self._attached, ObserverCalls(observer, label)])

    def detach(self, observer: Observer) -> None:
        """Tell it nothing more. Nothing happens if it isn't attached."""
        self._become([one for one in self._attached if one.observer is not observer])

    def _become(self, attached: list[ObserverCalls]) -> None:
        self._attached = attached
        self.watch_steps = any(one.watches_steps for one in attached)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the attached observers."""
        return tuple(attached.name for attached in self._attached)

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
        told = {"arrived": tuple(arrived), "step_finished": step, "finished": tuple(finished)}
        for attached in self._attached:
            for method, what in told.items():
                if what:
                    attached.tell(method, what)
        self._become([attached for attached in self._attached if not attached.given_up])


class ObserverCalls(PluginCalls):
    """Tells one observer, until one of its methods has failed too often in a row."""

    def __init__(self, observer: Observer, name: str) -> None:
        super().__init__(f"observer {name}", f"{MAX_FAILURES} in a row detach it", logger)
        self.name = name
        self.given_up: bool = False
        self.observer = observer
        own = getattr(observer.step_finished, "__func__", None)
        self.watches_steps: bool = own is not Observer.step_finished
        self._failures: dict[str, int] = {}

    def tell(self, method: str, told: object) -> None:
        if self.given_up:
            return
        try:
            self.call(method, lambda: getattr(self.observer, method)(told))
            self._failures[method] = 0
        except PluginFault:
            self._failures[method] = self._failures.get(method, 0) + 1
            if self._failures[method] == MAX_FAILURES:
                self.given_up = True
                logger.error(
                    "%s is detached: %s raised %d times in a row", self.label, method, MAX_FAILURES
                )
