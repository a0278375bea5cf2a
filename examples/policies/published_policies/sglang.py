"""SGLang's two orders for the prefix cache: longest prefix match, and depth first by weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from aioserve import (
    ConfigError,
    PolicySpec,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    hookimpl,
)

__all__ = ["DepthFirstByWeight", "LongestPrefixMatch"]


class LongestPrefixMatch(SchedulingPolicy):
    """Start the request with most cached tokens first. There is no ageing: one without any may
    starve.

    Zheng et al.: "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024.
    """

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        return sorted(waiting, key=lambda request: -request.cached_tokens)


class DepthFirstByWeight(SchedulingPolicy):
    """Walk the tree of prefixes that waiting prompts share, into the branch with most requests
    first.

    So all requests of a branch use its shared prefix while that is cached. Prompts are compared at
    lengths of `block_tokens`, twice that, four times that, and so on. Raises `ConfigError` for a
    `block_tokens` below 1.

    Zheng et al.: "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024.
    """

    def __init__(self, *, block_tokens: int = 64) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens must be at least 1, got {block_tokens!r}")
        self.block_tokens = block_tokens

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        return self._depth_first(waiting, self.block_tokens)

    def _depth_first(
        self, requests: Sequence[RequestView], num_tokens: int
    ) -> Iterator[RequestView]:
        if len(requests) == 1:
            yield from requests
            return
        branches: defaultdict[bytes, list[RequestView]] = defaultdict(list)
        for request in requests:
            if request.prompt_tokens < num_tokens:
                yield request
            else:
                branches[request.prefix_key(num_tokens)].append(request)
        for branch in sorted(branches.values(), key=len, reverse=True):
            yield from self._depth_first(branch, 2 * num_tokens)


@hookimpl
def aioserve_scheduling_policies() -> list[PolicySpec]:
    return [
        PolicySpec("lpm", LongestPrefixMatch, "longest prefix match first"),
        PolicySpec("dfs_weight", DepthFirstByWeight, "depth first, the heaviest branch first"),
    ]
