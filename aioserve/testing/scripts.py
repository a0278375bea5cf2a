"""Scripts of a `FakeModel` with answers: one for each request, from when an engine takes it.

Knows prompts as callers gave them, and ids. Must not know steps or pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aioserve.execution.runner import CheckedRequest
from aioserve.sampling.masks import Mask
from aioserve.testing.answers import Answers, FakeRequest, NoAnswerError
from aioserve.testing.embeddings import Embeddings, Vector
from aioserve.text.conversation import Conversation
from aioserve.text.tokenizer import Tokenizer

__all__ = ["Script", "Scripts", "allows"]


class Script:
    """Answer of one request: token ids with the end, or the reason that there is none.

    Or the vector of a text, made when it is asked for.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        *,
        ways: Sequence[tuple[int, ...]] = ((),),
        why: str = "",
        text: str = "",
    ) -> None:
        """Make a script. `ways` are the forms in which the answer may be written, at least one."""
        self.why: str = why
        """Reason why there is no answer; empty if there is one."""
        self.ids: tuple[int, ...] = ways[0]
        self._ways = ways
        self._text = text
        self._embeddings = embeddings
        self._vector: Vector | NoAnswerError | None = None

    def begin(self, mask: Mask) -> None:
        """Choose the first way of writing the answer whose beginning a form allows."""
        self.ids = next((ids for ids in self._ways if allows(mask, ids[0])), self.ids)

    def vector(self) -> Vector:
        """Return the vector of the text. Raises `NoAnswerError`, and the same again."""
        if self._vector is None:
            try:
                self._vector = self._embeddings.vector(self._text)
            except NoAnswerError as error:
                self._vector = error
        if isinstance(self._vector, NoAnswerError):
            raise self._vector
        return self._vector


class Scripts:
    """Makes the script of each request, in the order in which an engine takes them.

    Requests for an answer are appended to `requests`.
    """

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

    def script(self, asked: CheckedRequest) -> Script:
        """Make the script of a request: a `LoadedModel.script`."""
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


def allows(mask: Mask, token_id: int) -> bool:
    """True if a mask allows the token."""
    return bool(mask[token_id // 32] >> token_id % 32 & 1)
