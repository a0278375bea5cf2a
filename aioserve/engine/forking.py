"""Branches of a stream: requests that go on from its prompt and the tokens it has handed out.

    stream ──► a b c │ d e (read later, or in flight)
                     ├──► branch 0, with the stream's noise: d e ...
                     ├──► branch 1, with the noise of the seed behind it
                     └──► ...

A branch is a request like any other, and finds the KV of what it begins with in the prefix cache.
Its prompt says where its completion begins (`Request.answer_from`), so that penalties, grammars
and limits see one completion. Knows the engine and mailboxes; must not know the scheduler.
"""

from __future__ import annotations

import weakref
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import check, integer, shown
from aioserve.engine.begun import BegunAnswer, Origin
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.mailbox import Mailbox
from aioserve.engine.params_intake import end_ids_of
from aioserve.engine.prompts import too_long
from aioserve.errors import (
    DeadlineExceededError,
    EngineClosedError,
    InvalidRequestError,
    InvalidSamplingError,
)
from aioserve.execution.runner import ModelLimits
from aioserve.hints import SchedulingHints
from aioserve.request import SamplingParams
from aioserve.sampling_params import MAX_SEED

__all__ = ["Forker"]

NO_HINTS = SchedulingHints()


class Forker:
    """Submits the branches of one engine's streams. It doesn't keep the engine alive."""

    def __init__(self, engine: EngineLifecycle) -> None:
        self._engine = weakref.ref(engine)

    def __call__(
        self, mailbox: Mailbox, n: object, sampling: object, sample: object
    ) -> list[Mailbox]:
        """Submit `n` branches of a sample, of all of them or none. Arguments aren't checked.
        Raises what `TokenStream.fork` says."""
        engine = self._engine()
        if engine is None:
            raise EngineClosedError("the engine was closed", state="closed")
        live = engine.usable()
        origin = mailbox.origin
        if origin is None:
            raise InvalidRequestError(
                "a stream that brings no completion can't be forked", argument=None
            )
        count = check(InvalidRequestError, "n", n, integer(1, live.config.max_num_seqs))
        last = len(mailbox.finish_reasons) - 1
        index = check(InvalidRequestError, "sample", sample, integer(0, last))
        if not len(mailbox.prompt_ids):
            raise InvalidRequestError(
                "a stream can be forked once its prompt is encoded; await `started()` before",
                argument=None,
            )
        params, seed = _params_of(origin, sampling)
        begun = _begun(mailbox, origin, index)
        _check_goes_on(begun, params, live.model.limits)
        options = _options_of(mailbox, origin.hints, len(mailbox.handed_out[index]))
        deadline_seconds = options.get("deadline_seconds")
        live.intake.room.check(count, begun.num_tokens, deadline_seconds)
        branches: list[Mailbox] = []
        try:
            for branch in range(seed + index, seed + index + count):
                own = msgspec.structs.replace(params, seed=branch % (MAX_SEED + 1))
                intake = engine.usable().intake
                branches.append(intake.submit(begun, own, None, origin.cache_salt, **options))
        except BaseException:
            for one in branches:
                one.abort()
            raise
        return branches


def _params_of(origin: Origin, sampling: object) -> tuple[SamplingParams, int]:
    """Parameters of a branch, and the seed of the first. Raises `InvalidSamplingError`."""
    if sampling is None:
        changes = {"n": 1, "best_of": None, "prompt_logprobs": None}
        return msgspec.structs.replace(origin.params, **changes), origin.seed
    if not isinstance(sampling, SamplingParams):
        raise InvalidSamplingError(
            f"sampling must be SamplingParams or None, got {shown(sampling)}",
            argument="sampling",
            value=sampling,
        )
    for name, wanted, why in (
        ("n", 1, "`fork` takes the number of branches"),
        ("best_of", None, "a stream can't take tokens back"),
        ("prompt_logprobs", None, "the stream that is forked tells those of the prompt"),
    ):
        if (given := getattr(sampling, name)) not in (wanted, 1 if name == "best_of" else wanted):
            raise InvalidSamplingError(
                f"{name} must be {wanted} in the sampling of branches, got {given}: {why}",
                argument=name,
                value=given,
            )
    return sampling, origin.seed if sampling.seed is None else sampling.seed


def _begun(mailbox: Mailbox, origin: Origin, sample: int) -> BegunAnswer:
    """The prompt, and the tokens of a sample's completion that were handed out."""
    prompt_ids = np.asarray(mailbox.prompt_ids, np.int32)
    handed_out = np.array(mailbox.handed_out[sample], np.int32)
    border = len(prompt_ids) if origin.answer_from is None else origin.answer_from
    answer_ids: npt.NDArray[np.int32] = np.concatenate([prompt_ids[border:], handed_out])
    return BegunAnswer(prompt_ids[:border], answer_ids, origin.script)


def _check_goes_on(begun: BegunAnswer, params: SamplingParams, limits: ModelLimits) -> None:
    """Raise `InvalidRequestError` or `PromptTooLongError` where a completion with these parameters
    has ended with the tokens so far."""
    num_tokens, end_ids = len(begun.answer_ids), end_ids_of(limits, params)
    for place, token_id in enumerate(begun.answer_ids.tolist(), 1):
        if token_id in end_ids:
            raise InvalidRequestError(
                f"token {token_id} ends the completion at its place {place} of {num_tokens}, so it "
                "can't be forked behind; `sampling` in which that id ends nothing goes on",
                argument="sampling",
                value=token_id,
            )
    if params.max_tokens is not None and num_tokens >= params.max_tokens:
        raise InvalidRequestError(
            f"the completion has {num_tokens} tokens, and max_tokens is {params.max_tokens}, so "
            "none is left for a branch; `sampling` with a larger max_tokens goes on",
            argument="sampling",
            value=num_tokens,
            limit=params.max_tokens - 1,
        )
    if begun.num_tokens >= limits.max_model_len:
        raise too_long(begun.num_tokens, limits.max_model_len)


def _options_of(mailbox: Mailbox, hints: SchedulingHints, handed_out: int) -> dict[str, Any]:
    """Hints of a branch. It has the time that is left to the stream, and a forecast of the tokens
    that are left. Raises `DeadlineExceededError` where no time is."""
    options = {
        name: value
        for name in SchedulingHints.__struct_fields__
        if (value := getattr(hints, name)) != getattr(NO_HINTS, name)
    }
    if (seconds := hints.deadline_seconds) is not None:
        left = mailbox.started_seconds + seconds - mailbox.clock()
        if left <= 0:
            raise DeadlineExceededError(
                f"the deadline_seconds = {seconds:g} of request {mailbox.request_id!r} have "
                "passed, which its branches share",
                deadline_seconds=seconds,
            )
        options["deadline_seconds"] = left
    if (forecast := hints.predicted_output_tokens) is not None:
        options["predicted_output_tokens"] = max(1, forecast - handed_out)
    return options
