"""What a server tells of itself: metrics, a log line for each call, and spans.

Nothing here reads a prompt or an answer.
"""

from __future__ import annotations

from aioserve.server.telemetry.logs import AccessLog
from aioserve.server.telemetry.metrics import Metrics
from aioserve.server.telemetry.spans import Spans

__all__ = ["AccessLog", "Metrics", "Spans"]
