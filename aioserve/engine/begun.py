"""Completions that another request began, and that go on in a request of their own.

    prompt │ tokens that the stream has handed out │ tokens of the branch
    ├───────────── prompt of the branch ───────────┤
           ├─────────── completion, to all that counts its tokens ───────────►

Knows token ids and text. Must not know the scheduler, nor who asks for branches.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import InvalidRequestError
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
    """A prompt and the tokens that its completion begins with, each int32.

    `script` is the one of the request that began it.
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
        self.assembler: TextAssembler | None = None
        """Assembler of the completion's text; `encode` lets it take the tokens so far."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the completion so far."""
        return len(self.prompt_ids) + len(self.answer_ids)

    def encode(self) -> npt.NDArray[np.int32]:
        """Ids of both, int32, on any thread, once. Raises `InvalidRequestError` where the text so
        far ends with a stop string."""
        if self.assembler is not None:
            for place, token_id in enumerate(self.answer_ids.tolist(), 1):
                _, stopped = self.assembler.push(token_id)
                if stopped:
                    raise InvalidRequestError(
                        f"the stop string {self.assembler.matched_stop!r} ends the completion "
                        f"at its token {place} of {len(self.answer_ids)}, so it can't be forked "
                        "behind; `sampling` without that stop string goes on",
                        argument="sampling",
                        value=self.assembler.matched_stop,
                    )
        return np.concatenate([self.prompt_ids, self.answer_ids])
