"""Asks plugins whether a request may enter. The first that refuses decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from aioserve.errors import RequestRejectedError
from aioserve.isolation import Guard, NotAnAnswer, PluginFault
from aioserve.plugins.records import RequestInfo
from aioserve.scheduling.policy import Refusal

__all__ = ["Admission", "AdmissionCheck", "refusal_of"]

logger = logging.getLogger(__name__)


def refusal_of(ask: Callable[[RequestInfo], object], request: RequestInfo) -> Refusal | None:
    """What an `aioserve_admit` answers; raises `NotAnAnswer`, and what it raises."""
    answer = ask(request)
    if answer is None:
        return None
    if isinstance(answer, Refusal):  # of any class, and its reason of any class of str
        return Refusal(str.__str__(answer.reason))
    raise NotAnAnswer(answer, "neither a Refusal nor None")


class AdmissionCheck(Guard):
    """One plugin's `aioserve_admit`."""

    def __init__(self, ask: Callable[[RequestInfo], object], label: str) -> None:
        """`label` names the plugin and its distribution."""
        self._ask = ask
        super().__init__(f"plugin {label}", "the request is refused", logger)

    def check(self, request: RequestInfo) -> None:
        """Raise `RequestRejectedError` if it refuses, and if it has a fault: a quota check that
        breaks must not open the door."""
        try:
            refusal = self.call("aioserve_admit", refusal_of, self._ask, request)
        except PluginFault as fault:
            raise RequestRejectedError(
                f"request {request.request_id!r} can't be admitted: {fault}"
            ) from fault.__cause__
        if refusal is not None:
            raise RequestRejectedError(
                f"{self.label} refused request {request.request_id!r}: {refusal.reason}"
            )


class Admission:
    """Every check of one engine, in the order in which they are asked."""

    def __init__(self, checks: Sequence[AdmissionCheck] = ()) -> None:
        self._checks = tuple(checks)

    def check(self, request: RequestInfo) -> None:
        """Raise `RequestRejectedError` if a check refuses."""
        for check in self._checks:
            check.check(request)
