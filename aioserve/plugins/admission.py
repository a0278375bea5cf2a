"""Asks plugins whether a request may enter. The first that refuses decides."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Sequence

import msgspec

from aioserve.errors import RequestRejectedError
from aioserve.plugins.records import RequestInfo
from aioserve.scheduling.policy import Refusal

__all__ = ["Admission", "AdmissionCheck"]

logger = logging.getLogger(__name__)

_shown = reprlib.Repr()
_shown.maxother = 1000  # room for the message of an exception


class AdmissionCheck(msgspec.Struct, frozen=True):
    """One plugin's `aioserve_admit`."""

    ask: Callable[[RequestInfo], object]
    label: str
    """Names the plugin and its distribution."""


class Admission:
    """Every check of one engine, in the order in which they are asked."""

    def __init__(self, checks: Sequence[AdmissionCheck] = ()) -> None:
        self._checks = tuple(checks)

    def check(self, request: RequestInfo) -> None:
        """Raise `RequestRejectedError` if a plugin refuses, and also if one raises or answers
        nonsense: a quota check that breaks must not open the door."""
        for check in self._checks:
            try:
                answer = check.ask(request)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # CancelledError too: it is some other task's
                logger.exception("plugin %s: aioserve_admit raised", check.label)
                what = f"raised {_shown.repr(error)}"
                raise self._broken(check, request, what) from error
            if isinstance(answer, Refusal):
                raise RequestRejectedError(
                    f"plugin {check.label} refused request {request.request_id!r}: {answer.reason}"
                )
            if answer is not None:
                what = f"answered {reprlib.repr(answer)}, neither a Refusal nor None"
                logger.error("plugin %s: aioserve_admit %s", check.label, what)
                raise self._broken(check, request, what)

    @staticmethod
    def _broken(check: AdmissionCheck, request: RequestInfo, what: str) -> RequestRejectedError:
        return RequestRejectedError(
            f"request {request.request_id!r} can't be admitted: aioserve_admit of plugin "
            f"{check.label} {what}"
        )
