"""What is said on stderr of a simulated machine, of which a cost table doesn't tell all."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aioserve.arguments import counted

if TYPE_CHECKING:
    from aioserve.simulation.cost import CostModel
    from aioserve.simulation.machine import Machine
    from aioserve.simulation.metrics import Metrics

__all__ = ["say_what_is_unknown", "warn", "warn_of_long_contexts", "warn_of_steps_outside"]


def say_what_is_unknown(machine: Machine, options: Any) -> None:
    """A line on stderr about what a cost table doesn't tell, and what is done about it."""
    from aioserve.simulation.cost import CostTable

    table = machine.cost
    if not isinstance(table, CostTable):
        return
    unknown: list[tuple[str, str]] = []
    if table.scatter is None:
        unknown.append(("how steps scatter", "each takes its mean"))
    if machine.device is not None:
        unknown.append(("the KV memory", f"pages are those of {machine.device}"))
    if table.kv is None and options.max_model_len is None:
        unknown.append(("the model's longest context", "none is too long for it"))
    if unknown:
        missing, instead = zip(*unknown, strict=True)
        print(
            f"aioserve: {_name_of(options)} doesn't tell {', '.join(missing)}: "
            f"{', '.join(instead)}",
            file=sys.stderr,
            flush=True,
        )


def warn_of_long_contexts(cost: CostModel, options: Any) -> None:
    """A line on stderr where requests may be longer than those that a cost table was measured
    with."""
    from aioserve.simulation.cost import CostTable

    given = options.max_model_len
    if given is None or not isinstance(cost, CostTable):
        return
    limits = {
        "kv.max_model_len": None if cost.kv is None else cost.kv.max_model_len,
        "max_context_tokens": cost.max_context_tokens,
    }
    known = [(limit, name) for name, limit in limits.items() if limit is not None]
    if known and given > min(known)[0]:
        limit, name = min(known)
        warn(
            f"max_model_len: {given:,} tokens are more than {_name_of(options)} was measured with "
            f"({name} is {limit:,}), and what steps with such contexts take is a guess"
        )


def warn_of_steps_outside(options: Any, found: Iterable[tuple[str, Metrics]]) -> None:
    """A line on stderr, where there are any, about the run with the largest share of steps that the
    table wasn't measured for. Each comes with its name."""
    outsides = [
        (metrics.steps_outside, metrics.steps, name)
        for name, metrics in found
        if metrics.steps_outside is not None and metrics.steps_outside.steps
    ]
    if not outsides:
        return
    outside, steps, name = max(outsides, key=lambda one: one[0].share)
    warn(
        f"{_name_of(options)} was not measured for {outside.share:.1%} of the "
        f"{counted(steps, 'step', form=',')} of {name}, and what they take is a guess; the first: "
        f"{outside.first}"
    )


def warn(text: str) -> None:
    print(f"aioserve: warning: {text}", file=sys.stderr, flush=True)


def _name_of(options: Any) -> str:
    return options.cost_table or "a cost table"  # of several where a sweep varies it
