"""Model of the account of one request, computed only from plans and updates."""

from __future__ import annotations

import math

from aioserve.scheduling.account import RequestAccount
from aioserve.steps.plan import WorkItem


class RequestModel:
    def __init__(
        self, sequence_ids: tuple[int, ...], prompt_tokens: int, account: RequestAccount
    ) -> None:
        self.first = sequence_ids[0]
        self.prompt_tokens = prompt_tokens
        self.account = account
        self.started_seconds: float | None = None
        self.device_seconds = 0.0
        self.epoch = -1
        self.computed = 0
        """Prompt tokens that the first sample has computed since it last began."""
        self.cached_tokens: int | None = None
        """Prompt tokens that it didn't compute; None before the first token."""

    def plan(self, item: WorkItem, epoch: int, now: float) -> None:
        if self.started_seconds is None:
            self.started_seconds = now
        if item.sequence_id != self.first:
            return
        if epoch != self.epoch:
            self.epoch, self.computed = epoch, 0
        end = min(item.start + item.count, self.prompt_tokens)
        self.computed += max(0, end - item.start)

    def charge(self, seconds: float) -> None:
        """Add a share of the seconds of a step that is done."""
        self.device_seconds += seconds

    def take(self, sequence_id: int) -> None:
        """Take a token. After a preemption the tokens found before it are unknown here."""
        is_known = self.cached_tokens is not None or self.account.preemptions > 0
        if sequence_id == self.first and not is_known:
            self.cached_tokens = self.prompt_tokens - self.computed

    def check(self) -> None:
        account = self.account
        assert account.started_seconds == self.started_seconds
        assert math.isclose(account.device_seconds, self.device_seconds, rel_tol=1e-6)
        assert (account.cached_tokens or 0) < self.prompt_tokens
        if self.cached_tokens is not None:
            assert account.cached_tokens == self.cached_tokens
