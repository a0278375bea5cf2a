"""A drafter that computes, on the thread that launches steps and on their stream.

    loop          results 7, ask ─┐           ┌─ resolve 8 ─┐
    step thread                   └─ draft 8 ─┘             └─ pack, enqueue 8
    device        [ step 7 ]         [ ][ ][ ]                 [ step 8 ]

The loop goes on meanwhile. Calls of the drafter queue on that thread, between the launches of
earlier and later steps.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from aioserve.drafting.at_once import AtOnce
from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.execution.gpu.device import Device
from aioserve.execution.gpu.failures import OutOfDeviceMemoryError
from aioserve.execution.loop_callbacks import LoopCallbacks
from aioserve.execution.speculation.resolver import DraftRequest, StepFollower

__all__ = ["DrafterApart", "DrafterInMemory"]

logger: logging.Logger = logging.getLogger(__name__)

Call = Callable[[], None]


class DrafterApart(AtOnce):
    """Passes calls on to `drafter`, on the thread that `put` queues them for. Used on the loop.

    Calls return before they are made. The next `ask` reports an exception of theirs.
    """

    def __init__(
        self,
        drafter: Drafter,
        follower: StepFollower,
        put: Callable[[Call], None],
        callbacks: LoopCallbacks,
        meaning_of: Callable[[Exception], Exception],
    ) -> None:
        """`follower` tracks the steps for `drafter`. On the same thread, it must be told of
        every other plan, in order, that `ask` isn't called for. `meaning_of` is the device's."""
        self._drafter = drafter
        self._follower = follower
        self._put = put
        self._callbacks = callbacks
        self._meaning_of = meaning_of
        self._error: Exception | None = None
        """First exception of a call that nothing awaited. Used on the step thread."""
        self._made: dict[int, Sequence[int]] = {}
        """Latest draft tokens, by slot."""

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._pass_on(functools.partial(self._drafter.start, slot, sequence))

    def end(self, slot: int) -> None:
        self._pass_on(functools.partial(self._drafter.end, slot))

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._pass_on(functools.partial(self._drafter.extend_all, slots, token_ids))

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the draft tokens that `ask` had made."""
        return [self._made[slot] for slot in slots]

    def ask(self, request: DraftRequest, on_done: Callable[[Exception | None], None]) -> None:
        """Tell the follower of a plan, and make its draft tokens.

        `on_done` is called on the loop when they are known, with None or the exception.
        """
        self._put(functools.partial(self._draft, request, on_done))

    # -- on the step thread

    def _pass_on(self, call: Call) -> None:
        def passed_on() -> None:
            try:
                call()
            except Exception as error:
                self._error = self._error or self._meaning_of(error)

        self._put(passed_on)

    def _draft(self, request: DraftRequest, on_done: Callable[[Exception | None], None]) -> None:
        made: dict[int, Sequence[int]] = {}
        error, self._error = self._error, None
        try:
            self._follower.take(request.plan)
            self._follower.follow(request.plan)
            if error is None:
                draft_tokens = self._drafter.draft_all(request.slots, request.limits)
                made = dict(zip(request.slots, draft_tokens, strict=True))
        except Exception as raised:
            error = self._meaning_of(raised)
        self._callbacks.put(functools.partial(self._tell, made, error, on_done))
        self._callbacks.wake()

    def _tell(
        self,
        made: dict[int, Sequence[int]],
        error: Exception | None,
        on_done: Callable[[Exception | None], None],
    ) -> None:
        self._made = made
        on_done(error)


class DrafterInMemory(AtOnce):
    """Passes calls on to `drafter`, whose draft tokens take memory of `device`.

    If memory runs out, cached memory is freed and the draft tokens are made once more. If that
    fails too, this step has no draft tokens. A failed attempt leaves `drafter` as it was. Used on
    the thread that launches steps.
    """

    def __init__(self, drafter: Drafter, device: Device) -> None:
        self._drafter = drafter
        self._device = device

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._drafter.start(slot, sequence)

    def end(self, slot: int) -> None:
        self._drafter.end(slot)

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._drafter.extend_all(slots, token_ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        for what_follows in ("they are made once more", "this step has none"):
            try:
                return self._drafter.draft_all(slots, limits)
            except Exception as error:
                reason = self._device.meaning_of(error)
                if not isinstance(reason, OutOfDeviceMemoryError):
                    raise
                message = str(reason)
                del reason  # its traceback holds the memory of the computation
            logger.warning(
                "no memory for draft tokens: %s; what was kept for later is given back, and %s",
                message,
                what_follows,
            )
            self._device.free_cached_memory()
        return [()] * len(slots)
