"""Completions that another request began, and that go on in a request of their own.

    prompt │ tokens that the stream has handed out │ tokens of the branch
    ├───────────── prompt of the branch ───────────┤
           ├─────────── completion, to all that counts its tokens ───────────►

Knows token ids and text. Must not know the scheduler, nor who asks for branches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import InvalidRequestError, InvariantError
from aioserve.hints import SchedulingHints
from aioserve.request import SamplingParams
from aioserve.text.assembler import TextAssembler

__all__ = ["BegunAnswer", "Origin"]


class Origin(msgspec.Struct, frozen=True):
    """Facts of a request from which its branches are made."""

    params: SamplingParams
    """Parameters as they were checked, or the model's own."""
    seed: int
    """Key of the first sample's noise."""
    cache_salt: str | None
    hints: SchedulingHints
    script: Any
    """A value that the model's own `LoadedModel.script` made of the request."""
    answer_from: int | None
    """Position in the prompt where the completion begins; None: behind the prompt."""


class BegunAnswer:
    """A prompt and the tokens that its completion begins with, each int32, for one branch or more.

    `script` is the one of the request that began it. Thread-safe.
    """

    def __init__(
        self,
        prompt_ids: npt.NDArray[np.int32],
        answer_ids: npt.NDArray[np.int32],
        script: Any,
    ) -> None:
        self.prompt_ids: npt.NDArray[np.int32] = prompt_ids
        self.answer_ids: npt.NDArray[np.int32] = answer_ids
        self.script: Any = script
        self._ids: npt.NDArray[np.int32] | None = None
        self._assembler: TextAssembler | None = None
        self._stopped_at: int | None = None
        self._lock = threading.Lock()
        """Branches of a long completion are encoded on several threads."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the completion so far."""
        return len(self.prompt_ids) + len(self.answer_ids)

    def assembled_by(self, make: Callable[[], TextAssembler]) -> None:
        """Let an assembler take the tokens so far, once they are encoded. The first branch makes it
        for all."""
        self._assembler = self._assembler or make()

    def assembler(self) -> TextAssembler:
        """Return a new assembler that has taken the tokens so far. Raises `InvariantError` before
        they are encoded."""
        if self._assembler is None or self._ids is None:
            raise InvariantError("the completion of a branch isn't encoded")
        return self._assembler.fork()

    def encode(self) -> npt.NDArray[np.int32]:
        """Ids of both, int32, on any thread. Raises `InvalidRequestError` where the text so far
        ends with a stop string."""
        with self._lock:
            if self._ids is None:
                self._take()
                self._ids = np.concatenate([self.prompt_ids, self.answer_ids])
        if self._stopped_at is not None and self._assembler is not None:
            stop = self._assembler.matched_stop
            raise InvalidRequestError(
                f"the stop string {stop!r} ends the completion at its token {self._stopped_at} of "
                f"{len(self.answer_ids)}, so it can't be forked behind; `sampling` without that "
                "stop string goes on",
                argument="sampling",
                value=stop,
            )
        return self._ids

    def _take(self) -> None:
        if self._assembler is None:
            return
        for place, token_id in enumerate(self.answer_ids.tolist(), 1):
            _, stopped = self._assembler.push(token_id)
            if stopped:
                self._stopped_at = place
                return
