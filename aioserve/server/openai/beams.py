"""Beam search in place of samples: `use_beam_search`, as vLLM's clients ask for it.

The number of beams is `n`. All of them are returned, the best first. A search draws nothing, and
its beams are known only at its end. Fields that need samples or a stream are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from aioserve.request import Beam, Usage
from aioserve.sampling_params import BEAM_DEFAULTS, PARAMETERS
from aioserve.server.answer_sizes import AnswerSize
from aioserve.server.app_state import Call
from aioserve.server.call_log import sum_of
from aioserve.server.chat_parts.plan import ResponseFormat
from aioserve.server.errors import as_named, refuse
from aioserve.server.openai.fields import ChunkFields, refuse_unsupported
from aioserve.server.openai.multi_request import all_of

__all__ = ["Found", "beams_of"]

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    **{name: row.beams for name, row in PARAMETERS.items() if isinstance(row.beams, tuple)},
    "ttft_target_seconds": (),
    "tpot_target_seconds": (),
    "predicted_output_tokens": (),
    "response_format": (ResponseFormat(type="text"),),
}
"""Values, besides None, by which a field asks for nothing that a search doesn't do."""


class Found(msgspec.Struct, frozen=True):
    """Result of a search after one prompt."""

    prompt_ids: list[int]
    beams: tuple[Beam, ...]

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_ids), sum([len(beam.token_ids) for beam in self.beams]))


async def beams_of(
    call: Call,
    body: ChunkFields,
    prompts: Sequence[Any],
    max_tokens: int | None,
    *,
    harmless: Mapping[str, tuple[Any, ...]],
    names: Mapping[str, str],
    **message_options: Any,
) -> tuple[list[Found], Usage]:
    """Search after each of `prompts`, and count all tokens. Raises `ApiError`.

    Values of further fields that ask for nothing are in `harmless`. The API's names for arguments
    of the engine are in `names`. Prompts that are messages are encoded with `message_options`.
    """
    refuse_unsupported(body, {**_HARMLESS, **harmless}, " with use_beam_search")
    if (asked := body.asked_form) is not None:
        raise refuse(asked.field, "isn't supported with use_beam_search", "unsupported_parameter")
    with as_named(names):
        params = body.params(call.default_params, max_tokens=max_tokens)
    cut = _truncation(call, body, params.max_tokens)
    options = {name: value for name, value in body.options(call).items() if name not in cut}
    most = call.facts.limits.max_model_len
    call.kept.begin(
        AnswerSize(
            prompts=len(prompts),
            n=body.n or 1,
            tokens=min(params.max_tokens or most, most),
            says_tokens=params.max_tokens is not None,
        )
    )
    options |= {name: getattr(params, name) for name in BEAM_DEFAULTS}
    search = partial(
        call.engine.beam_search,
        beam_width=1 if body.n is None else body.n,
        max_tokens=params.max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        **options,
    )

    async def found(prompt: Any) -> Found:
        ids = await call.engine.encode(prompt, **message_options, **cut)
        return Found(ids, await search(ids))

    with as_named({**names, "beam_width": "n"}):
        every = await all_of([partial(found, prompt) for prompt in prompts])
    usage = sum_of([one.usage for one in every])
    call.call_log.counts.append(usage)
    return every, usage


def _truncation(call: Call, body: ChunkFields, max_tokens: int | None) -> dict[str, Any]:
    """Options of `Engine.encode`, where -1 would leave room for one token only."""
    cut = body.truncation_options
    if body.truncate_prompt_tokens == -1:
        most = call.facts.limits.max_model_len
        if (max_tokens or 1) >= most:
            raise refuse("max_tokens", f"must be below {most} where -1 leaves room for it")
        cut["truncate_prompt_tokens"] = most - (max_tokens or 1)
    return cut
