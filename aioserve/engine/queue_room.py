"""Room for requests that wait: their number, their tokens, and their deadlines."""

from __future__ import annotations

from aioserve.arguments import counted
from aioserve.config import EngineConfig
from aioserve.engine.core import CoreLoop
from aioserve.errors import QueueFullError

__all__ = ["QueueRoom"]


class QueueRoom:
    """Room in the queue of one engine. Changes nothing."""

    def __init__(self, config: EngineConfig, core: CoreLoop) -> None:
        self._config = config
        self._core = core

    def check(self, count: int, num_tokens: int, deadline_seconds: float | None) -> None:
        """Raise `QueueFullError` unless `count` more requests of `num_tokens` tokens each may wait.
        `Intake.submit` checks each of them again."""
        self.check_count(count)
        self.check_tokens(count * num_tokens, deadline_seconds, count)

    def check_count(self, count: int = 1) -> None:
        """Raise `QueueFullError` if `count` more requests are too many to wait."""
        num_waiting, waiting = self._core.num_waiting, self._core.table.waiting
        if num_waiting + count > self._config.max_waiting:
            more = "" if count == 1 else f" and {count} more come"
            raise QueueFullError(
                f"{counted(num_waiting, 'request waits', 'requests wait')}{more}; max_waiting is "
                f"{self._config.max_waiting}",
                value=num_waiting,
                limit=self._config.max_waiting,
                retry_after_seconds=waiting.seconds_for(waiting.tokens),
            )

    def check_tokens(self, num_tokens: int, deadline_seconds: float | None, count: int = 1) -> None:
        """Raise `QueueFullError` if `num_tokens` more tokens are too many to wait, or would wait
        past their deadline. `count` requests have them together. If no tokens wait, one request may
        have any number."""
        waiting, most = self._core.table.waiting, self._config.max_waiting_tokens
        if not waiting.tokens and count == 1:
            return
        if waiting.tokens + num_tokens > most:
            raise QueueFullError(
                f"prompts of about {counted(waiting.tokens, 'token')} wait for their answers to "
                "begin; with "
                f"{num_tokens} more there would be more than max_waiting_tokens = {most}",
                value=waiting.tokens,
                limit=most,
                unit="tokens",
                retry_after_seconds=waiting.seconds_for(waiting.tokens),
            )
        if not self._config.refuse_late or deadline_seconds is None:
            return
        seconds = waiting.seconds_for(waiting.tokens + num_tokens)
        if seconds is not None and seconds > deadline_seconds:
            raise QueueFullError(
                f"its answer would begin in about {seconds:.3g} s, after its deadline_seconds = "
                f"{deadline_seconds:g}",
                value=seconds,
                limit=deadline_seconds,
                unit="seconds",
                retry_after_seconds=seconds - deadline_seconds,
            )
