"""Body of `/v1/completions`, checked: its fields, prompts and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from aioserve.engine.interface import ModelFacts
from aioserve.request import SamplingParams
from aioserve.server.app_state import Call
from aioserve.server.chat_parts.plan import ResponseFormat, form_field, planned
from aioserve.server.chat_parts.sampling import FORM_ARGUMENTS, check_at_most
from aioserve.server.errors import refuse
from aioserve.server.hint_fields import let_through
from aioserve.server.hint_tables import OF_COMPLETIONS, Hints
from aioserve.server.openai.fields import ChunkFields
from aioserve.server.settings import ServerSettings

__all__ = ["CompletionRequest", "gap_of", "prompts_of"]


class CompletionRequest(ChunkFields, frozen=True, kw_only=True):
    hints: ClassVar[Hints] = OF_COMPLETIONS
    limits: ClassVar[Mapping[str, str]] = {
        **ChunkFields.limits,
        "best_of": "max_n",
        "logprobs": "max_top_logprobs",
    }

    prompt: str | list[str | int | list[int]]
    """One prompt or several, as text or as token ids."""
    max_tokens: int | None = 16
    """Most tokens of an answer. None allows as many as the context holds. 0 goes with `echo`."""
    best_of: int | None = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: int | None = None
    """Number of most likely tokens listed at each place, besides the token that is there."""
    suffix: str | None = None
    """Text after the answer, for models that fill in a gap."""

    def check(self, call: Call) -> None:
        super().check(call)
        if self.suffix == "":
            let_through(call.call_log, "suffix")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise refuse("best_of", "must be at most n where the answer is streamed")
        if self.max_tokens == 0 and self.min_tokens:
            raise refuse("min_tokens", f"must be at most max_tokens = 0, got {self.min_tokens}")
        if self.echo and call.facts.tokenizer is None:
            raise refuse("echo", "must be false: the model has no tokenizer")

    def filled_in(self, facts: ModelFacts, prompts: list[str | list[int]]) -> list[str | list[int]]:
        """Return the prompts, each with the gap before `suffix` if that is given. Raises
        `ApiError`."""
        if not self.suffix:
            return prompts
        if self.echo:
            raise refuse("suffix", "can't be used with echo")
        if self.truncate_prompt_tokens is not None:
            why = "can't be used with truncate_prompt_tokens: marks of the gap would be cut off"
            raise refuse("suffix", why)
        return [gap_of(facts, each, self.suffix) for each in prompts]

    @property
    def names(self) -> dict[str, str]:
        """Names that the API has for arguments of the engine."""
        form = form_field(self.response_format, self.asked_form, "response_format")
        return {
            "prompt_logprobs": "logprobs" if self.prompt_logprobs is None else "prompt_logprobs",
            "tenant": "user",
            **dict.fromkeys(FORM_ARGUMENTS, form),
        }

    @property
    def is_of_prompt(self) -> bool:
        """True if only the prompt is wanted, as by evaluations that ask for its
        log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def logprobs_of_prompt(self) -> int | None:
        """Number of alternatives that the engine lists at each place of the prompt."""
        echoed = self.logprobs if self.echo else None
        return max([one for one in (echoed, self.prompt_logprobs) if one is not None], default=None)

    def params_of(self, defaults: SamplingParams, settings: ServerSettings) -> SamplingParams:
        """Sampling parameters of the answer. Raises `ApiError` and `InvalidSamplingError`."""
        plan = planned(
            settings,
            tools=(),
            choice="none",
            one_call=False,
            form=self.response_format,
            asked_form=self.asked_form,
        )
        return self.params(
            defaults,
            structured_output=plan.form,
            max_tokens=1 if self.is_of_prompt else self.max_tokens,
            best_of=self.best_of,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs_of_prompt,
        )


def gap_of(facts: ModelFacts, prefix: str | list[int], suffix: str) -> str:
    """Return the prompt for the text between `prefix` and `suffix`. Raises `ApiError` if `prefix`
    isn't text, or if the model can't fill in a gap."""
    if not isinstance(prefix, str):
        raise refuse("suffix", "goes with a prompt of text alone")
    prompt = facts.filled_in(prefix, suffix)
    if prompt is None:
        why = "isn't supported by this model: its tokenizer has no marks of a gap to fill in"
        raise refuse("suffix", why, "unsupported_parameter")
    return prompt


def prompts_of(prompt: str | list[Any], most: int, field: str = "prompt") -> list[str | list[int]]:
    """Return one prompt or a list of them as a list. Raises `ApiError` for more than `most`."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not kinds:
        raise refuse(field, "must not be empty")
    if kinds == {int}:
        return [prompt]
    check_at_most(field, "have at most {} entries", len(prompt), most)
    if len(kinds) > 1:
        raise refuse(
            field,
            "must be a text, token ids, a list of texts or a list of lists of token ids; these are "
            "mixed",
        )
    return prompt
