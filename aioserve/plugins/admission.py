"""Asks plugins whether a request may enter. The first that refuses decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from aioserve.errors import RequestRejectedError
from aioserve.isolation import NotAnAnswer, PluginCalls, PluginFault
from aioserve.plugins.records import RequestInfo
from aioserve.scheduling.policy import Refusal

__all__ = ["Admission", "refusal_of"]

logger: logging.Logger = logging.getLogger(__name__)


def refusal_of(ask: Callable[[RequestInfo], object], request: RequestInfo) -> Refusal | None:
    """Return what an `aioserve_admit` answers; raises `NotAnAnswer`, and what it raises."""
    answer = ask(request)
    if answer is None:
        return None
    if isinstance(answer, Refusal):  # of any class, and its reason of any class of str
        return Refusal.plain(answer)
    raise NotAnAnswer(answer, "neither a Refusal nor None")


class Admission:
    """The checks of one engine: label and `aioserve_admit` of each plugin, in the order in which
    they are asked."""

    def __init__(self, checks: Iterable[tuple[str, Callable[[RequestInfo], object]]] = ()) -> None:
        self._checks = [
            (PluginCalls(f"plugin {label}", "the request is refused", logger), ask)
            for label, ask in checks
        ]

    def check(self, request: RequestInfo) -> None:
        """Raise `RequestRejectedError` if a check refuses, and also if it has a fault: a quota
        check that breaks must not open the door."""
        name = f"request {request.request_id!r}"
        for calls, ask in self._checks:
            try:
                refusal = calls.call("aioserve_admit", refusal_of, ask, request)
            except PluginFault as fault:
                raise RequestRejectedError(
                    f"{name} can't be admitted: {fault}",
                    refused_by=calls.label,
                    reason=None,
                    retry_after_seconds=None,
                ) from fault.__cause__
            if refusal is not None:
                raise RequestRejectedError(
                    f"{calls.label} refused {name}: {refusal.reason}",
                    refused_by=calls.label,
                    reason=refusal.reason,
                    retry_after_seconds=refusal.retry_after_seconds,
                )
