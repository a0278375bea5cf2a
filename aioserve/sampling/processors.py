"""Logits processors: code of a plugin that changes a row of logits before the draw.

A request names them, and each of its completions has objects of its own. A processor that raises
ends its request. Imports torch only for types.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aioserve.isolation import NotAnAnswer, PluginCalls, PluginFault

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GuardedProcessor", "LogitsProcessor", "ProcessorMaker", "changed_by"]

logger: logging.Logger = logging.getLogger(__name__)


class LogitsProcessor:
    """Changes the logits of one completion, a row at a time. Override `process`."""

    def process(self, prompt_ids: Tensor, answer_ids: Tensor, logits: Tensor) -> Tensor | None:
        """Change `logits`, float32 `[V]`, in place and return None, or return others of that shape.

        `prompt_ids` and `answer_ids`, int64 `[prompt tokens]` and `[tokens so far]`, are read-only.
        All are on the device that computes the model. Called once per token on the thread of the
        steps, which waits for it, and so does every completion in the batch.

        After a preemption the completion goes on with a new object, so the result must follow from
        the ids. A beam passes log-probabilities in place of logits, and a new object each time.
        """
        raise NotImplementedError


class ProcessorMaker:
    """Makes guarded objects of one offer, where the runner is. The offer and its distribution
    appear in `label`; `make` gets the name and options from a request."""

    def __init__(self, label: str, make: Callable[[str], LogitsProcessor]) -> None:
        self._label = label
        self.make = make

    def __call__(self, text: str) -> GuardedProcessor:
        return GuardedProcessor(self._label, partial(self.make, text))


class GuardedProcessor:
    """One processor of one completion. It is made when it is first called."""

    def __init__(self, label: str, make: Callable[[], LogitsProcessor]) -> None:
        self._make = make
        self._processor: LogitsProcessor | None = None
        self._calls = PluginCalls(f"logits processor {label}", "its request ends", logger)

    def apply(self, prompt_ids: Tensor, answer_ids: Tensor, row: Tensor) -> str | None:
        """Change `row`, float32 `[V]`. Return a message if the processor failed."""
        try:
            self._calls.call("process", self._process, prompt_ids, answer_ids, row)
        except PluginFault as fault:
            return str(fault)
        return None

    def _process(self, prompt_ids: Tensor, answer_ids: Tensor, row: Tensor) -> None:
        if self._processor is None:
            self._processor = self._make()
        changed = changed_by(self._processor, prompt_ids, answer_ids, row)
        if row.device.type == "cpu" and changed.isnan().any() and not row.isnan().any():
            raise NotAnAnswer(changed, "which has a NaN")  # other devices would have to wait
        row.copy_(changed)


def changed_by(
    processor: LogitsProcessor, prompt_ids: Tensor, answer_ids: Tensor, row: Tensor
) -> Tensor:
    """Return what a processor makes of `row`, which stays unchanged. Raises `NotAnAnswer`, and
    anything that the processor raises."""
    given = row.clone()
    answer = processor.process(prompt_ids, answer_ids, given)
    changed = given if answer is None else answer
    if getattr(changed, "shape", None) != row.shape or changed.dtype != row.dtype:
        raise NotAnAnswer(answer, f"not None or {row.dtype} of shape {list(row.shape)}")
    return changed
