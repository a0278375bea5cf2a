"""The fields of a body that say how to draw an answer, which several APIs share.

Names are those of the OpenAI API, and of vLLM where that API has none. What isn't given is as the
model's makers say (`Engine.default_params`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from aioserve.request import MAX_BIASED_TOKENS, SamplingParams
from aioserve.structured_output import StructuredOutput

__all__ = ["FORM_ARGUMENTS", "SamplingFields", "StructuredOutputs"]

FORM_ARGUMENTS: tuple[str, ...] = ("structured_output", *StructuredOutput.__struct_fields__)
"""What the engine calls the form of an answer, or a part of it."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, as vLLM's `structured_outputs` names it: exactly one of five."""

    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None

    @property
    def form(self) -> StructuredOutput:
        return StructuredOutput(
            json_schema=self.json,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            disable_any_whitespace=bool(self.disable_any_whitespace),
        )


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked by `SamplingParams`; None is the same as nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 keep all."""
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    """Negative ones too: taken modulo 2**64."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    session_id: str | None = None
    predicted_output_tokens: int | None = None
    ttft_target_seconds: float | None = None
    tpot_target_seconds: float | None = None

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """`defaults` where nothing is given; `more` are fields that other parts of the body gave.
        Raises `InvalidSamplingError`."""
        given = {name: getattr(self, name) for name in _AS_THEY_ARE}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if (bias := self.logit_bias) is not None:
            # Too many are refused for their number, and not looked at before.
            few = len(bias) <= MAX_BIASED_TOKENS
            ids = {_token_id(key): value for key, value in bias.items()} if few else bias
            given["logit_bias"] = ids
        if self.structured_outputs is not None:
            given["structured_output"] = self.structured_outputs.form
        given |= more
        given = {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(defaults, **given)


_AS_THEY_ARE = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "n",
)


def _token_id(key: str) -> int | str:
    """`SamplingParams` refuses what is no id."""
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else key
