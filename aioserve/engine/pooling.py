"""What a model makes of whole prompts: hidden states, pooled to one vector each.

A hidden state is what the head would make logits of: it has passed the last layer and the final
norm, and is a row of `last_hidden_state` in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aioserve.arguments import boolean, check, choice
from aioserve.engine.intake import Prompt
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.looks import check_options, ids_of, looked_at
from aioserve.engine.mailbox import Mailbox
from aioserve.engine.prompts import holds_prompts, listed
from aioserve.errors import InvalidRequestError, RequestFailedError
from aioserve.request import SamplingParams, Usage

__all__ = ["Pooling", "embeddings_of"]

Pooling = Literal["last", "mean", "cls"]

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class PooledPrompt:
    """What is wanted of a prompt: a sum over hidden states."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling

    def positions(self, prompt_tokens: int) -> range:
        """Of the tokens whose hidden states are added."""
        first = prompt_tokens - 1 if self._pooling == "last" else 0
        return range(first, 1 if self._pooling == "cls" else prompt_tokens)

    def fields(self, prompt_tokens: int) -> dict[str, Any]:
        """Of the `Request`, as `Look` has them."""
        return {"pooled": self.positions(prompt_tokens), "answers": False}

    def read(self, mailbox: Mailbox, *, normalize: bool) -> npt.NDArray[np.float32]:
        """The vector of a request that has come to its end, float32 `[hidden]`."""
        total = mailbox.pooled
        if total is None or not np.isfinite(total).all():
            raise RequestFailedError(
                f"request {mailbox.request_id!r}: its hidden states are not finite"
            )
        vector = total / len(self.positions(mailbox.prompt_tokens))
        if normalize:
            length = np.linalg.norm(vector)
            vector = vector / length if length > 0 else vector
        return vector.astype(np.float32)


async def embeddings_of(
    usable: Callable[[], EngineLifecycle],
    prompts: Prompt | Sequence[Prompt],
    *,
    pooling: Pooling,
    normalize: bool,
    request_id: str | None = None,
    **wishes: Any,
) -> tuple[npt.NDArray[np.float32], Usage]:
    """Float32 `[hidden]`, or `[N, hidden]` of N prompts, and the counts of all of them; `usable`
    gives the engine or raises."""
    check_options("embed", wishes)
    live = usable()
    pooled = PooledPrompt(
        check(InvalidRequestError, "pooling", pooling, choice("last", "mean", "cls"))
    )
    normalize = check(InvalidRequestError, "normalize", normalize, boolean)
    if not live.model.pools:
        raise InvalidRequestError(
            f"embeddings can't be computed on {live.model.description.get('device')}: its runner "
            "gives no hidden states",
            argument="prompts",
        )
    several = "prompts" if holds_prompts(prompts) else None
    every: list[Any] = [prompts]
    if several is not None:
        every = listed(several, prompts, live.config.max_waiting)

    def submit(prompt: Prompt, request_id: str | None) -> Mailbox:
        return usable().intake.submit(prompt, ONE_TOKEN, request_id, look=pooled, **wishes)

    request_ids = ids_of(request_id, None if several is None else len(every))
    submits = [partial(submit, *one) for one in zip(every, request_ids, strict=True)]
    async with looked_at(submits, live.turns, several) as mailboxes:
        vectors = [pooled.read(mailbox, normalize=normalize) for mailbox in mailboxes]
        counts = [mailbox.usage for mailbox in mailboxes]
    usage = Usage(
        sum([each.prompt_tokens for each in counts]),
        0,
        sum([each.cached_tokens for each in counts]),
    )
    return (vectors[0] if several is None else np.stack(vectors)), usage
