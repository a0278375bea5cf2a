"""vLLM's first scheduler: prompts before decodes, and never both in one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aioserve import PolicySpec, RequestView, SchedulerView, SchedulingPolicy, hookimpl

__all__ = ["PromptsFirst"]


class PromptsFirst(SchedulingPolicy):
    """Compute only prompts in a step while waiting requests can start; none decodes meanwhile.

    When pages run out, the latest request gives its own back. Only a try shows if a request can
    start. After a step in which none did, the running requests decode until one of them has ended.

    Kwon et al.: "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    SOSP 2023, as vLLM did it before its version 1.
    """

    def __init__(self) -> None:
        self._running_when_tried = -1

    def starvation_bound_tokens(self, request: RequestView) -> int:
        return 0

    def decode(self, running: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        if view.num_prefilling:
            return ()
        has_seat = view.num_waiting > 0 and view.num_running < view.max_num_seqs
        if not has_seat or view.num_running == self._running_when_tried:
            return running
        self._running_when_tried = view.num_running
        return ()

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        return max(running, key=lambda request: request.arrival_index)

    def finished(self, requests: Sequence[RequestView]) -> None:
        self._running_when_tried = -1


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [PolicySpec("vllm_v0", PromptsFirst, "prompts before decodes, in steps of their own")]
