"""One line for each call that has ended, on the logger `aioserve.access`.

A line is ASCII without control characters, whatever a client sends: text of others is JSON.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any, Literal

from aioserve.server.call_log import CallLog
from aioserve.server.request_checks import Arrival

__all__ = ["AccessLog"]

logger: logging.Logger = logging.getLogger("aioserve.access")

PLAIN = re.compile(r"[A-Za-z0-9_.:/{}+-]+")


class AccessLog:
    """Calls, and all that were refused or failed, are of level INFO; the rest, such as what load
    balancers ask all the time, of DEBUG."""

    def __init__(self, form: Literal["json", "key_value"]) -> None:
        self._write = _json if form == "json" else _key_value

    def began(self, arrival: Arrival) -> None:
        pass

    def ended(self, call_log: CallLog) -> None:
        failed = call_log.status is None or call_log.status >= 400
        level = logging.INFO if failed or call_log.method == "POST" else logging.DEBUG
        if logger.isEnabledFor(level):
            logger.log(level, "%s", self._write(_fields(call_log)))


def _fields(call_log: CallLog) -> dict[str, Any]:
    usage, first = call_log.usage, call_log.first_token_seconds
    reasons = call_log.finish_reasons
    return {
        "request_id": call_log.request_id,
        "call_id": call_log.call_id,
        "method": call_log.method,
        "route": call_log.route,
        "status": call_log.status,
        "whole": call_log.is_whole,
        "tenant": call_log.tenant,
        "model": call_log.model,
        "stream": call_log.stream,
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
        "first_token_seconds": None if first is None else round(first, 6),
        "total_seconds": round(call_log.total_seconds, 6),
        "finish_reason": ",".join(sorted(set(reasons))) if reasons else None,
        "error": call_log.error,
    }


def _quoted(value: object) -> str:
    return json.dumps(value).replace("\x7f", "\\u007f")  # ASCII, and json leaves that one alone


def _json(fields: dict[str, Any]) -> str:
    return _quoted(fields)


def _key_value(fields: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value if isinstance(value, str) and PLAIN.fullmatch(value) else _quoted(value)}"
        for name, value in fields.items()
        if value is not None
    )
