"""Orca's iteration-level scheduling: first come, first served, and prompts in one piece."""

from __future__ import annotations

from aioserve import PolicySpec, RequestView, SchedulerView, SchedulingPolicy, hookimpl

__all__ = ["Orca"]


class Orca(SchedulingPolicy):
    """Let requests join and leave the batch at every step, in order of arrival.

    A prompt is computed in the step in which its request joins, beside the requests that decode. A
    prompt that is longer than a whole step is computed in as few pieces as possible. If the next
    prompt doesn't fit the rest of a step, later ones wait too.

    Yu, Jeong, Kim, Kim, Chun: "Orca: A Distributed Serving System for Transformer-Based Generative
    Models", OSDI 2022.
    """

    def __init__(self) -> None:
        self._full_step = -1

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return 0

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        whole_step = view.max_num_batched_tokens - view.num_decoding
        in_one_piece = request.uncached_tokens <= budget_tokens or budget_tokens >= whole_step
        if not in_one_piece or view.step == self._full_step:
            self._full_step = view.step
            return 0
        return budget_tokens


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("orca", Orca, "whole prompts beside decodes, first come, first served")]
