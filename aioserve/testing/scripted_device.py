"""A device whose sequences say what was written for them, and how that comes to each request.

The token that was written is the only one that the model would draw: temperature, penalties and
biases leave it, and what forbids it ends its request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioserve.execution.runner import Asked
from aioserve.isolation import shown
from aioserve.request import Logprobs, TopLogprob
from aioserve.sampling.masks import Mask
from aioserve.steps.plan import SampleRow, SlotStart, StepPlan, WorkItem
from aioserve.testing.answers import Answers, FakeRequest, NoAnswerError
from aioserve.testing.embeddings import Embeddings, Vector
from aioserve.testing.fake_device import FakeDevice, RowFailedError
from aioserve.text.conversation import Conversation
from aioserve.text.tokenizer import Tokenizer

__all__ = ["Script", "ScriptedDevice", "Scripts"]

OTHER_LOGPROB = -100.0
"""Log-probability of the tokens that weren't written."""
MAX_ALLOWED_SHOWN = 12
MAX_BEFORE_SHOWN = 40
NO_VECTOR = np.zeros(1, np.float32)


class Script:
    """What one request gets: token ids with the end of the answer, or why there are none; or the
    vector of a text, made when it is asked for."""

    def __init__(
        self,
        embeddings: Embeddings,
        *,
        ways: Sequence[tuple[int, ...]] = ((),),
        why: str = "",
        text: str = "",
    ) -> None:
        """`ways` are those in which the answer may be written, at least one."""
        self.why: str = why
        """Why there is no answer; empty where there is one."""
        self.ids: tuple[int, ...] = ways[0]
        self._ways = ways
        self._text = text
        self._embeddings = embeddings
        self._vector: Vector | NoAnswerError | None = None

    def begin(self, mask: Mask) -> None:
        """Write the answer in the first way that a form allows to begin."""
        self.ids = next((ids for ids in self._ways if _allows(mask, ids[0])), self.ids)

    def vector(self) -> Vector:
        """The vector of the text. Raises `NoAnswerError`, and the same again."""
        if self._vector is None:
            try:
                self._vector = self._embeddings.vector(self._text)
            except NoAnswerError as error:
                self._vector = error
        if isinstance(self._vector, NoAnswerError):
            raise self._vector
        return self._vector


class Scripts:
    """Makes the script of each request, in the order in which an engine takes them. `requests` gets
    each that asks for an answer."""

    def __init__(
        self,
        answers: Answers | None,
        embeddings: Embeddings,
        tokenizer: Tokenizer,
        end_id: int,
        requests: list[FakeRequest],
    ) -> None:
        self._answers = answers
        self._embeddings = embeddings
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._requests = requests

    def script(self, asked: Asked) -> Script:
        """As `LoadedModel.script`."""
        prompt = asked.prompt
        if not asked.answers:
            return Script(self._embeddings, text=self._text_of(prompt))
        is_chat = isinstance(prompt, Conversation)
        request = FakeRequest(
            messages=prompt.messages if is_chat else None,
            prompt=None if is_chat else self._text_of(prompt),
            tools=prompt.tools or [] if is_chat else [],
            chat_template_kwargs=prompt.template_kwargs if is_chat else {},
            params=asked.params,
        )
        self._requests.append(request)
        try:
            if self._answers is None:
                raise NoAnswerError("FakeModel: answers was left out, and this asks for one")
            texts = self._answers.take(request, asked.tool_parser)
        except NoAnswerError as error:
            return Script(self._embeddings, why=str(error))
        ways = [(*text.encode(), self._end_id) for text in texts]
        return Script(self._embeddings, ways=ways)

    def _text_of(self, prompt: object) -> str:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, Conversation):
            return "\n".join([str(message.get("content") or "") for message in prompt.messages])
        if isinstance(prompt, np.ndarray):
            return self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        return ""


class ScriptedDevice(FakeDevice):
    """Draws the tokens of scripts, and gives their vectors for hidden states."""

    def _sample(
        self, plan: StepPlan, item: WorkItem, row: SampleRow, masks: Sequence[Mask | None]
    ) -> list[int]:
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

    def _pooled(self, plan: StepPlan, item: WorkItem) -> npt.NDArray[np.float32]:
        if item.pooled is None:
            return NO_VECTOR
        try:
            vector = _script_of(self._start_of(item.slot)).vector()
        except NoAnswerError:  # which its last row says
            return NO_VECTOR
        return vector * np.float32(item.pooled.count)


def _script_of(start: SlotStart) -> Script:
    if not isinstance(start.script, Script):
        raise ValueError(f"slot {start.slot} has the script {shown(start.script)}")
    return start.script


def _token(script: Script, place: int, start: SlotStart, mask: Mask | None) -> int:
    """The token at a place of the answer. Raises `RowFailedError` where there is none, and where
    the request forbids it."""
    if script.why:
        raise RowFailedError(script.why)
    if start.edits_logprobs:
        raise RowFailedError("FakeModel: answers has none for beams, which take all likely tokens")
    if not script.ids:  # it is dropped: something of the prompt is asked for
        return 0
    if mask is not None and place == 0:
        script.begin(mask)
    token_id = script.ids[min(place, len(script.ids) - 1)]
    if mask is not None and not _allows(mask, token_id):
        raise RowFailedError(_misfit(script, place, mask))
    if start.params.logits_processors:
        raise RowFailedError("FakeModel: logits_processors aren't called for written answers")
    if (named := _forbidden_by(script, place, token_id, start)) is not None:
        raise RowFailedError(f"FakeModel: {named} forbids the answer: {_place(script, place)}")
    return token_id


def _allows(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> token_id % 32 & 1)


def _misfit(script: Script, place: int, mask: Mask) -> str:
    allowed = [one for one in range(script.ids[-1] + 1) if _allows(mask, one)]
    allowed.sort(key=lambda one: not 0x20 < one < 0x7F)  # those first that can be seen
    shown_ones = [_named(one, script) for one in allowed[:MAX_ALLOWED_SHOWN]]
    more = ", ..." if len(allowed) > MAX_ALLOWED_SHOWN else ""
    return (
        f"FakeModel: the answer doesn't fit the form that the request asks for "
        f"(structured output, or a call that must come): "
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
    """The parameter that forbids the token, if one does."""
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
