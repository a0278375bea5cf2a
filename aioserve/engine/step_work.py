"""Work of an engine's steps by phase: tokens, seconds, operations and bytes.

Steps are noted as they end and counted later, many at once: between two steps the caches are cold.
Knows a model by its sizes alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aioserve.capacity.models import ModelShape
from aioserve.capacity.work import attended_pairs, kv_tokens_moved
from aioserve.steps.plan import ItemKind, StepPlan

__all__ = ["MAX_NOTED", "PhaseStats", "StepWork"]

MAX_NOTED = 32
"""Most steps that wait to be counted."""


class PhaseStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Work of one phase, prefill or decode, in all steps that brought an outcome. `*_total` only
    grow.

    A step with tokens of both phases gives each its share of the seconds, and of the bytes of
    weights, by the tokens.
    """

    tokens_total: int
    """Tokens computed, draft tokens included."""
    seconds_total: float
    """Shares of the steps' seconds. The two phases together have `step_seconds_total`, less the
    seconds of failed steps."""
    flops_total: float | None
    """Operations that the model's sizes ask for: two for each weight and token, and those of
    attention. None for a model of unknown sizes."""
    bytes_total: float | None
    """Bytes that the model's sizes make steps read and write: weights once a step, and KV. None
    for a model of unknown sizes."""
    compute_use: float | None
    """`flops_total` a second over `peak_flops_per_second` of the engine's options. None if either
    is unknown, and before the phase has taken any time."""
    bandwidth_use: float | None
    """`bytes_total` a second over `peak_bytes_per_second`, likewise."""


NotedStep = tuple[StepPlan, Mapping[int, int], Mapping[int, int], float]
"""A step with an outcome, before it is counted: its plan, `drafted` and `branched` of its outcome,
and its seconds."""


class _Sums:
    """Sums of one phase."""

    __slots__ = ("flops", "moved", "seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self.flops = 0
        self.moved = 0.0


class StepWork:
    """Counts the work of steps on one model. None as its sizes: tokens and seconds alone."""

    def __init__(self, shape: ModelShape | None) -> None:
        self.noted: list[NotedStep] = []
        """Steps to be counted. The core loop appends them, and calls `count` once there are
        `MAX_NOTED`."""
        self._shape = shape
        self._prefill = _Sums()
        self._decode = _Sums()
        self._layers: tuple[tuple[int, int], ...] = ()
        self._pair_flops = self._entry_bytes = 0
        self._weight_bytes: dict[int, int] = {}
        """Bytes of weights that a step of decodes reads, by their number."""
        if shape is not None:
            self._layers = tuple(shape.layers_by_window.items())
            self._pair_flops = shape.pair_flops // shape.num_layers
            self._entry_bytes = shape.kv_bytes_per_token // shape.num_layers

    def count(self) -> None:
        """Count the noted steps, and forget them."""
        noted, self.noted = self.noted, []
        decode, shape = self._decode, self._shape
        for step in noted:
            plan, _, _, seconds = step
            items, num_tokens = plan.items, plan.num_decodes
            if num_tokens != len(items):
                self._count_mixed(step)
                continue
            # Decodes alone, as most steps are: no call for a step or an item.
            decode.tokens += num_tokens
            decode.seconds += seconds
            if shape is None:
                continue
            seen = 0
            for window, num_layers in self._layers:
                ends = [item.index + 1 for item in items]
                if window:
                    ends = [window if end > window else end for end in ends]
                seen += num_layers * sum(ends)
            entries = seen + shape.num_layers * num_tokens
            if num_tokens not in self._weight_bytes:
                self._weight_bytes[num_tokens] = shape.weight_bytes(num_tokens)
            weights = (shape.layer_params + shape.head_params) * num_tokens
            decode.flops += 2 * weights + self._pair_flops * seen
            decode.moved += self._weight_bytes[num_tokens] + self._entry_bytes * entries

    def _count_mixed(self, step: NotedStep) -> None:
        plan, drafted, branched, seconds = step
        tokens, row = {False: 0, True: 0}, 0
        for item in plan.items:
            decodes, count, logits = item.kind is not ItemKind.PREFILL, item.count, len(item.rows)
            if item.kind is ItemKind.VERIFY:
                logits = count = 1 + drafted.get(row, 0) + branched.get(row, 0)
            elif item.scored is not None:
                logits += len(item.scored)
            row += len(item.rows)
            tokens[decodes] += count
            self._count_chunk(self._decode if decodes else self._prefill, item.index, count, logits)
        computed = tokens[False] + tokens[True]
        read = 0 if self._shape is None else self._shape.weight_bytes(computed)
        for decodes, sums in ((False, self._prefill), (True, self._decode)):
            share = tokens[decodes] / computed
            sums.tokens += tokens[decodes]
            sums.seconds += share * seconds
            sums.moved += share * read

    def _count_chunk(self, sums: _Sums, start: int, count: int, logits: int) -> None:
        shape = self._shape
        if shape is None:
            return
        pairs = entries = 0
        for window, num_layers in self._layers:
            pairs += num_layers * attended_pairs(start, count, window)
            entries += num_layers * kv_tokens_moved(start, count, window)
        weights = shape.layer_params * count + shape.head_params * logits
        sums.flops += 2 * weights + self._pair_flops * pairs
        sums.moved += self._entry_bytes * entries

    def phases(
        self, flops_per_second: float | None, bytes_per_second: float | None
    ) -> tuple[PhaseStats, PhaseStats]:
        """Return the work of prefill and of decode, beside a device's limits where they are
        known."""
        self.count()
        known = self._shape is not None
        return tuple(  # pyright: ignore[reportReturnType]
            [
                PhaseStats(
                    tokens_total=sums.tokens,
                    seconds_total=sums.seconds,
                    flops_total=float(sums.flops) if known else None,
                    bytes_total=sums.moved if known else None,
                    compute_use=_use(sums.flops, sums.seconds, flops_per_second, known),
                    bandwidth_use=_use(sums.moved, sums.seconds, bytes_per_second, known),
                )
                for sums in (self._prefill, self._decode)
            ]
        )


def _use(done: float, seconds: float, most: float | None, known: bool) -> float | None:
    if most is None or not seconds or not known:
        return None
    return done / seconds / most
