"""`PromptLooks`: the methods of `Engine` that look at prompts and generate nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from aioserve.engine.continuations import Continuation
from aioserve.engine.intake import ChatArguments, Prompt
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.looks import LookOptions
from aioserve.engine.pooling import Pooling, embeddings_of
from aioserve.engine.prompts import listed
from aioserve.engine.scoring import Score, scores_of
from aioserve.engine.token_ids import ids_of_prompt
from aioserve.request import Usage

__all__ = ["PromptLooks"]


class PromptLooks:
    """How likely a continuation is, what vector a prompt becomes, which tokens it has."""

    def __init__(self, lifecycle: EngineLifecycle) -> None:
        self._lifecycle = lifecycle

    async def score(
        self,
        prompt: Prompt,
        continuation: Continuation,
        *,
        top_logprobs: int = 0,
        **options: Unpack[LookOptions],
    ) -> Score:
        """How likely the model finds `continuation`, text or token ids, behind the prompt; nothing
        is generated. `top_logprobs` of the most likely tokens are told at each place, in [0, 64].
        Other options and errors are those of `generate`; `ttft_target_seconds` says how soon the
        score is wanted."""
        scores = await scores_of(
            self._lifecycle.usable,
            prompt,
            [continuation],
            several=None,
            top_logprobs=top_logprobs,
            **options,
        )
        return scores[0]

    async def score_each(
        self,
        prompt: Prompt,
        continuations: Sequence[Continuation],
        *,
        top_logprobs: int = 0,
        **options: Unpack[LookOptions],
    ) -> list[Score]:
        """The same for several continuations, each by itself behind the prompt, which is computed
        once. They are as many requests: number `i` has the id `request_id`-`i`."""
        live = self._lifecycle.usable()
        return await scores_of(
            self._lifecycle.usable,
            prompt,
            listed("continuations", continuations, live.config.max_waiting),
            several="continuations",
            top_logprobs=top_logprobs,
            **options,
        )

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        **options: Unpack[LookOptions],
    ) -> npt.NDArray[np.float32]:
        """The model's hidden states behind the final norm, pooled to one vector: float32
        `[hidden]` of a prompt, `[N, hidden]` of a sequence of N, which are as many requests.

        `pooling` takes the state of the "last" token, that of the first ("cls"), or the "mean" of
        all; `normalize` divides by the Euclidean length. Other options, ids and errors are those
        of `score_each`.
        """
        vectors, _ = await self.embed_counted(
            prompts, pooling=pooling, normalize=normalize, **options
        )
        return vectors

    async def embed_counted(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        **options: Unpack[LookOptions],
    ) -> tuple[npt.NDArray[np.float32], Usage]:
        """The same, and the token counts of all prompts together."""
        return await embeddings_of(
            self._lifecycle.usable, prompts, pooling=pooling, normalize=normalize, **options
        )

    async def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids that a request with this prompt would have, encoded as its is: within the
        same limits, and off the event loop where it takes long. Of text alone, `add_special_tokens`
        says whether it is framed as the model expects. Raises what `stream` does for a prompt."""
        chat = ChatArguments(
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        intake = self._lifecycle.usable().intake
        return await ids_of_prompt(intake, prompt, chat, add_special_tokens=add_special_tokens)
