"""Features whose pairs are tried. A new one joins by one entry in `FEATURES`.

An entry has the engine options that it needs, its changes to requests, and a check that it took
place. A pair in which one of the two never happened proves nothing, and fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

from aioserve import (
    LogitsProcessor,
    LogitsProcessorSpec,
    Speculation,
    StructuredOutput,
    hookimpl,
)
from aioserve.sampling_params import BEAM_DEFAULTS

if TYPE_CHECKING:
    from tests.pairs.scene import Seen

__all__ = [
    "FEATURES",
    "PLUGIN",
    "Feature",
    "pairs",
    "why_no_pair",
    "why_not_of_model",
    "why_not_of_size",
    "why_not_one_request",
]

Draw = random.Random
Changes = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature, and how a run shows that it took place.

    That is the names of the requests that met it, or if these aren't known, `happened`.
    """

    met: Callable[[Seen], set[str]] | None = None
    met_early: Callable[[Seen], set[str]] | None = None
    """Requests that met it in the middle of their prompt, if that is a stronger condition."""
    prompt_counts: tuple[bool, bool] = (False, False)
    """True for each of its two requests that has results for each token of its prompt: `met_early`
    is about these."""
    happened: Callable[[Seen], bool] = field(default=lambda seen: True)
    options: Callable[[Draw], dict[str, Any]] = field(default=lambda draw: {})
    """Options of the engine. If both features of a pair give one, the smaller value counts."""
    decides: Changes = field(default_factory=dict[str, Any])
    """Options of the engine that may change tokens. A request alone has them as well."""
    on_integers: bool = False
    """True if it is about models with layers of integers."""
    tight: bool = False
    """True if there are fewer pages than the requests of the scene need at once."""
    again: bool = False
    """True if all requests come a second time after their completions."""
    params: tuple[Changes, Changes] | None = None
    """Changes of the `SamplingParams` of a greedy request and of a sampled one."""
    ways: tuple[str, str] | None = None
    """`Ask.way` of two requests."""
    late: bool = False
    """`Ask.late` of its requests."""
    forks: bool = False
    """Callers fork the streams of its requests, and read branches in place of the rest."""
    leaves: bool = False
    """True if callers leave its requests before their end."""
    resets: bool = False
    """True if the prefix cache is forgotten again and again meanwhile."""
    slow_masks: bool = False
    """True if masks of structured output come later than the draws that they are for."""
    never_met_by: frozenset[str] = frozenset()
    """Features whose requests never meet it. It is then seen beside them."""
    group: str = ""
    """Group of the feature. An engine has at most one feature of each group."""

    @property
    def changes_requests(self) -> bool:
        return bool(self.params or self.ways or self.late or self.leaves or self.forks)


# -- what requests ask for


class ByHistory(LogitsProcessor):
    """Processor in which every token of prompt and completion decides the next."""

    def process(self, prompt_ids, answer_ids, logits):
        logits[answer_ids] -= 2.0
        logits[int(prompt_ids.sum() + 7 * answer_ids.sum()) % len(logits)] += 5.0


class Plugin:
    @hookimpl
    def aioserve_logits_processors(self):
        return [LogitsProcessorSpec("by_history", ByHistory)]


PLUGIN = Plugin()
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4}
STOPS = ("aa", "bb", "cc", "dd", "ab", "cd", "da", 'nd":')
LETTERS = {ord(letter): 8.0 for letter in "abcd"}
"""Likely enough to bring a stop string soon."""
SCHEMA = {
    "type": "object",
    "properties": {
        "aab": {"type": "string", "pattern": "^[a-d]{4,8}$"},
        "kind": {"enum": ["page", "slot"]},
        "size": {"type": "integer", "maximum": 99},
    },
    "required": ["aab", "kind", "size"],
    "additionalProperties": False,
}
"""Its forced tokens count for penalties, and so decide which letters come next."""


def _structured(**form: Any) -> Changes:
    return {"structured_output": StructuredOutput(**form), "max_tokens": 56, "ignore_eos": False}


def _policy(name: str, options: str = "") -> Feature:
    return Feature(
        options=lambda draw: {"policy": name + options, "max_num_seqs": 4},
        happened=lambda seen: name in seen.policy and seen.most_waiting > 0,
        group="policy",
    )


def _speculation(
    drafter: str,
    happened: Callable[[Seen], bool],
    *,
    again: bool = False,
    branches: bool = False,
    never_met_by: Sequence[str] = (),
) -> Feature:
    """Feature of steps that verify draft tokens. Some requests have none, or may have none.

    With `branches`, the drafter makes some now and then, and they are verified. The drafter's
    options may contain `{head}`, which stands for the directory of the model's head.
    """

    def options(draw: Draw) -> dict[str, Any]:
        max_tokens = draw.choice([1, 2, 4, 9])
        max_branches = min(2, max_tokens // 2) if branches and draw.random() < 0.6 else 0
        speculation = Speculation(drafter=drafter, max_tokens=max_tokens, max_branches=max_branches)
        overlap = {"overlap": True} if draw.random() < 0.5 else {}
        return {"speculation": speculation, **overlap}

    return Feature(
        options=options,
        again=again,
        met=lambda seen: seen.drafted,
        never_met_by=frozenset(["pooling", "logits_processors", *never_met_by]),
        happened=happened,
        group="drafter",
    )


def _right_wrong_and_faulty(seen: Seen) -> bool:
    return seen.num_right > 0 and seen.num_wrong > 0 and seen.stats.drafter_faults_total > 0


FEATURES: dict[str, Feature] = {
    "prefix_cache": Feature(
        options=lambda draw: {
            "prefix_caching": True,
            "partial_page_reuse": draw.random() < 0.7,
        },
        again=True,
        met=lambda seen: seen.found_cached,
    ),
    "cache_reset": Feature(
        options=lambda draw: {"prefix_caching": True},
        again=True,
        resets=True,
        happened=lambda seen: seen.forgotten > 0,
    ),
    "chunks": Feature(
        options=lambda draw: {"max_num_batched_tokens": draw.choice([1, 2, 5, 11])},
        met=lambda seen: seen.chunked,
    ),
    "preemption": Feature(
        options=lambda draw: {"output_reserve_tokens": 0},
        tight=True,
        met=lambda seen: seen.preempted,
        met_early=lambda seen: seen.lost_in_flight,
    ),
    "swap": Feature(
        options=lambda draw: {
            "output_reserve_tokens": 0,
            "preemption": "swap",
            "num_host_pages": 1000,
        },
        tight=True,
        met=lambda seen: seen.swapped,
        met_early=lambda seen: seen.swapped & seen.lost_in_flight,
        happened=lambda seen: seen.stats.pages_swapped_in_total > 0,
    ),
    "host_pool": Feature(
        options=lambda draw: {
            "output_reserve_tokens": 0,
            "prefix_caching": True,
            "num_host_pages": 1000,
        },
        tight=True,
        again=True,
        happened=lambda seen: seen.cached_on_host > 0 and seen.stats.pages_swapped_in_total > 0,
    ),
    "overlap": Feature(
        options=lambda draw: {"overlap": True},
        happened=lambda seen: seen.most_ahead > 0,
    ),
    "samples": Feature(
        params=({"n": 2, "temperature": 0.8, "seed": 3}, {"n": 3}),
        happened=lambda seen: any(len(set(each.ids)) > 1 for each in seen.brought("samples")),
    ),
    "beams": Feature(
        ways=("beams", "beams"),
        params=({"max_tokens": 12}, {"max_tokens": 12}),
        happened=lambda seen: any(len(each.beams) > 1 for each in seen.brought("beams")),
    ),
    "structured_output": Feature(
        params=(
            _structured(json_schema=SCHEMA, disable_any_whitespace=True),
            _structured(regex="[a-d]{4,9}"),
        ),
        happened=lambda seen: seen.changed("structured_output"),
    ),
    "thinking_budget": Feature(
        params=({"thinking_token_budget": 5}, {"thinking_token_budget": 0}),
        happened=lambda seen: seen.changed("thinking_budget"),
    ),
    "late_masks": Feature(
        slow_masks=True,
        params=(
            _structured(json_schema=SCHEMA, disable_any_whitespace=True),
            _structured(regex="[a-d]{4,9}"),
        ),
        happened=lambda seen: seen.late_masks > 0,
    ),
    "logprobs": Feature(
        prompt_counts=(True, False),
        params=({"logprobs": 3, "prompt_logprobs": 2}, {"logprobs": 0}),
        happened=lambda seen: any(
            sample and sample[0] is not None
            for each in seen.brought("logprobs")
            for sample in each.logprobs
        ),
    ),
    "penalties": Feature(
        params=(PENALTIES, {**PENALTIES, "min_tokens": 3}),
        happened=lambda seen: seen.changed("penalties"),
    ),
    "stop_strings": Feature(
        params=(
            {"stop": STOPS, "logit_bias": LETTERS, "min_tokens": 10},
            {"stop": STOPS, "logit_bias": LETTERS, "include_stop_str_in_output": True},
        ),
        happened=lambda seen: any(
            reason in STOPS for each in seen.brought("stop_strings") for reason in each.stop_reasons
        ),
    ),
    "logits_processors": Feature(
        params=({"logits_processors": ["by_history"]}, {"logits_processors": ["by_history"]}),
        happened=lambda seen: seen.changed("logits_processors"),
    ),
    "pooling": Feature(
        prompt_counts=(False, True),
        ways=("last", "mean"),
        happened=lambda seen: any(each.vector for each in seen.brought("pooling")),
    ),
    "abort": Feature(
        leaves=True,
        happened=lambda seen: any(each.left for each in seen.brought("abort")),
    ),
    "forks": Feature(
        forks=True,
        happened=lambda seen: any(each.forked for each in seen.brought("forks")),
    ),
    "slow_reader": Feature(
        options=lambda draw: {"max_buffered_tokens": draw.choice([1, 2, 3])},
        late=True,
        happened=lambda seen: seen.paused > 0,
    ),
    "activations_in_floats": Feature(
        decides={"activation_quantization": "none"},
        on_integers=True,
        happened=lambda seen: seen.decided > 0,
    ),
    "speculation": _speculation("moody", _right_wrong_and_faulty, branches=True),
    "ngram": _speculation(
        "ngram:min_ngram=1", lambda seen: seen.num_wrong > 0, never_met_by=["penalties"]
    ),
    "suffix": _speculation(
        "suffix", lambda seen: seen.num_right > 0 and seen.num_wrong > 0, again=True
    ),
    "eagle3": _speculation("eagle3:path={head}", lambda seen: seen.num_wrong > 0),
    "cache_aware": _policy("cache_aware"),
    "deadline": _policy("deadline"),
    "fair_share": _policy("fair_share"),
    "fcfs": _policy("fcfs"),
    "priority": _policy("priority"),
    "round_robin": _policy("round_robin", ":chunk_size=5"),
    "shortest_first": _policy("shortest_first"),
}


def why_no_pair(one: str, other: str) -> str | None:
    """Reason why these two are never together; None for a pair that is tried."""
    group = FEATURES[one].group
    if one != other and group and group == FEATURES[other].group:
        return f"an engine has one {group}"
    return None


def why_not_of_size(one: str, other: str, page_size: int) -> str | None:
    """Reason why these two can't both take place with pages of `page_size` tokens."""
    if {one, other} in ({"swap", "prefix_cache"}, {"swap", "host_pool"}) and page_size == 1:
        return "the prefix cache has every page of a request, and nothing is left to swap"
    return None


def why_not_of_model(one: str, other: str, *, has_integers: bool) -> str | None:
    """Reason why these two can't both take place with a model."""
    if not has_integers and (FEATURES[one].on_integers or FEATURES[other].on_integers):
        return "all layers are floats"
    return None


def why_not_one_request(one: Feature, other: Feature) -> str | None:
    """Reason why no single request can have both; None if one can. Requests with either still run
    side by side in an engine."""
    if not (one.changes_requests and other.changes_requests) or one is other:
        return "only one of them changes requests"
    for each, beside in ((one, other), (other, one)):
        if each.ways and not _takes(each, beside):
            return "a beam search and an embedding don't take these sampling parameters"
        if each.ways and (beside.late or beside.forks):
            return "a beam search and an embedding are given in one piece"
    return None


def _takes(one: Feature, beside: Feature) -> bool:
    """True if a request with another way than `stream` has the parameters that `beside` changes."""
    known = BEAM_DEFAULTS.keys() if one.ways == ("beams", "beams") else set()
    return not beside.ways and all(known >= changes.keys() for changes in beside.params or ())


def pairs() -> list[tuple[str, str]]:
    """Every two features that can be together, and each by itself."""
    return [
        pair for pair in combinations_with_replacement(FEATURES, 2) if why_no_pair(*pair) is None
    ]
