"""A device whose sequences deliver the answers that were written for them.

The written token is the only one that the model would draw. Temperature, penalties and biases don't
change that, and a parameter that forbids it ends the request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioserve.isolation import shown
from aioserve.request import Logprobs, TopLogprob
from aioserve.sampling.masks import Mask
from aioserve.steps.plan import SampleRow, SlotStart, WorkItem
from aioserve.testing.answers import NoAnswerError
from aioserve.testing.fake_device import FakeDevice, RowFailedError
from aioserve.testing.scripts import Script, allows

__all__ = ["ScriptedDevice"]

OTHER_LOGPROB = -100.0
"""Log-probability of the tokens that weren't written."""
MAX_ALLOWED_SHOWN = 12
MAX_BEFORE_SHOWN = 40
NO_VECTOR = np.zeros(1, np.float32)


class ScriptedDevice(FakeDevice):
    """Draws the tokens of scripts, and returns their vectors as hidden states."""

    def _sample(self, item: WorkItem, row: SampleRow, masks: Sequence[Mask | None]) -> list[int]:
        start, drawn = self._start_of(row.slot), list[int]()
        script = _script_of(start)
        try:
            if item.pooled is not None:
                script.vector()
        except NoAnswerError as error:
            raise RowFailedError(str(error)) from error
        for offset, mask in enumerate(masks, row.offset):
            place = item.start + offset + 1 - start.prompt_tokens
            drawn.append(_token(script, place, start, mask))
            if offset + 1 < item.count and item.token_ids[offset + 1] != drawn[-1]:
                break
        if drawn:
            self._last_tokens[row.slot] = drawn[-1]
        return drawn

    def _logprobs(self, total: int, token_id: int, count: int) -> Logprobs:
        others = [other for other in range(count) if other != token_id]
        top = [TopLogprob(token_id, 0.0), *[TopLogprob(other, OTHER_LOGPROB) for other in others]]
        return Logprobs(0.0, tuple(top[:count]))

    def _pooled(self, item: WorkItem) -> npt.NDArray[np.float32]:
        if item.pooled is None:
            return NO_VECTOR
        try:
            vector = _script_of(self._start_of(item.slot)).vector()
        except NoAnswerError:  # its last row reports it
            return NO_VECTOR
        return vector * np.float32(item.pooled.count)


def _script_of(start: SlotStart) -> Script:
    if not isinstance(start.script, Script):
        raise ValueError(f"slot {start.slot} has the script {shown(start.script)}")
    return start.script


def _token(script: Script, place: int, start: SlotStart, mask: Mask | None) -> int:
    """Return the token at a place of the answer.

    Raises `RowFailedError` if there is none, or if the request forbids it.
    """
    if script.why:
        raise RowFailedError(script.why)
    if start.edits_logprobs:
        raise RowFailedError("FakeModel: answers has none for beams, which take all likely tokens")
    if not script.ids:  # the token is dropped: something of the prompt is asked for
        return 0
    if mask is not None and place == 0:
        script.begin(mask)
    token_id = script.ids[min(place, len(script.ids) - 1)]
    if mask is not None and not allows(mask, token_id):
        raise RowFailedError(_misfit(script, place, mask))
    if start.params.logits_processors:
        raise RowFailedError("FakeModel: logits_processors aren't called for written answers")
    if (named := _forbidden_by(script, place, token_id, start)) is not None:
        raise RowFailedError(f"FakeModel: {named} forbids the answer: {_place(script, place)}")
    return token_id


def _misfit(script: Script, place: int, mask: Mask) -> str:
    allowed = [one for one in range(script.ids[-1] + 1) if allows(mask, one)]
    allowed.sort(key=lambda one: not 0x20 < one < 0x7F)  # printable ones first
    shown_ones = [_named(one, script) for one in allowed[:MAX_ALLOWED_SHOWN]]
    more = ", ..." if len(allowed) > MAX_ALLOWED_SHOWN else ""
    return (
        f"FakeModel: the answer doesn't fit the form that the request asks for "
        f"(structured output, a required call, a budget of reasoning): "
        f"{_place(script, place)}, and the form allows {', '.join(shown_ones)}{more}"
    )


def _place(script: Script, place: int) -> str:
    place = min(place, len(script.ids) - 1)
    before = bytes(script.ids[:place]).decode("utf-8", "replace")
    behind = f", behind {before[-MAX_BEFORE_SHOWN:]!r}," if before else ""
    return f"at character {len(before)}{behind} comes {_named(script.ids[place], script)}"


def _named(token_id: int, script: Script) -> str:
    if token_id == script.ids[-1]:
        return "the end"
    return repr(chr(token_id)) if token_id < 0x80 else f"byte {token_id:#x}"


def _forbidden_by(script: Script, place: int, token_id: int, start: SlotStart) -> str | None:
    """Return the parameter that forbids the token, if one does."""
    params = start.params
    if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
        return "allowed_token_ids"
    if place < params.min_tokens and token_id in start.end_ids:
        return f"min_tokens = {params.min_tokens}"
    if start.bad_word_ids and start.known_ids is not None:
        prompt = start.known_ids[: start.prompt_tokens].tolist()
        ids = (*prompt, *script.ids[:place], token_id)
        if any(ids[-len(word) :] == word for word in start.bad_word_ids):
            return "bad_words"
    return None
