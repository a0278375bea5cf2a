"""A drafter that computes, on the thread that launches steps and on the stream of these.

    loop          results 7, ask ─┐           ┌─ resolve 8 ─┐
    step thread                   └─ draft 8 ─┘             └─ pack, enqueue 8
    device        [ step 7 ]         [ ][ ][ ]                 [ step 8 ]

The loop goes on meanwhile: what it has for the drafter waits its turn on that thread, behind the
launches of the steps before and before those of the steps that come next.
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
    """Passes calls on to `drafter`, on the thread to which `put` has them made. For the loop.

    A call returns before it is made. What one raises, `ask` tells when it comes next.
    """

    def __init__(
        self,
        drafter: Drafter,
        follower: StepFollower,
        put: Callable[[Call], None],
        callbacks: LoopCallbacks,
        meaning_of: Callable[[Exception], Exception],
    ) -> None:
        """`follower` is what `drafter` drafts by; it must hear of all plans that `ask` isn't
        called for, in their order, on the same thread. `meaning_of` is the device's."""
        self._drafter = drafter
        self._follower = follower
        self._put = put
        self._callbacks = callbacks
        self._meaning_of = meaning_of
        self._error: Exception | None = None
        """What a call raised that nobody awaited. For that thread."""
        self._made: dict[int, Sequence[int]] = {}
        """Draft tokens that were made last, by slot."""

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        self._pass_on(functools.partial(self._drafter.start, slot, sequence))

    def end(self, slot: int) -> None:
        self._pass_on(functools.partial(self._drafter.end, slot))

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._pass_on(functools.partial(self._drafter.extend_all, slots, token_ids))

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Draft tokens made when `ask` was called for these."""
        return [self._made[slot] for slot in slots]

    def ask(self, request: DraftRequest, told: Callable[[Exception | None], None]) -> None:
        """Let the follower hear of a plan, and draft tokens be made for it. `told` is called on the
        loop when they are known, or with what was raised."""
        self._put(functools.partial(self._draft, request, told))

    # -- on the other thread

    def _pass_on(self, call: Call) -> None:
        def passed_on() -> None:
            try:
                call()
            except Exception as error:
                self._error = self._error or self._meaning_of(error)

        self._put(passed_on)

    def _draft(self, request: DraftRequest, told: Callable[[Exception | None], None]) -> None:
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
        self._callbacks.put(functools.partial(self._tell, made, error, told))
        self._callbacks.wake()

    def _tell(
        self,
        made: dict[int, Sequence[int]],
        error: Exception | None,
        told: Callable[[Exception | None], None],
    ) -> None:
        self._made = made
        told(error)


class DrafterInMemory(AtOnce):
    """Passes calls on to `drafter`, whose draft tokens take memory of `device`. Where there is none
    for those of a step, what allocators keep is given back, and they are made once more. If that
    fails too, the step has no draft tokens, and the next one is asked for as before.

    Draft tokens that weren't made leave `drafter` as it was. For the thread that launches steps.
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
                del reason  # its traceback has the memory of what was computed
            logger.warning(
                "no memory for draft tokens: %s; what was kept for later is given back, and %s",
                message,
                what_follows,
            )
            self._device.free_cached_memory()
        return [()] * len(slots)
