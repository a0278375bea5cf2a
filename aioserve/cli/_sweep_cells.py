"""Which runs a sweep has: every policy with all options that are varied, at every rate, with every
seed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Parameter

from aioserve.arguments import shown
from aioserve.cli._sweep_runs import Cell
from aioserve.cli._trial_flags import TrialFlags, source_of, trial_options
from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from aioserve.simulation.cost import CostTable
    from aioserve.simulation.trial_options import TrialOptions
    from aioserve.testing.trial import Trial

__all__ = ["Grid", "SweepOptions", "grid_of"]

MAX_CELLS = 100_000
DEFAULT_SEEDS = 3
NOT_VARIED = ("num_requests", "arrivals", "closed_loop", "priority", "predictor")
"""What makes another workload: of which one can't say that it comes at another rate."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(TrialFlags):
    """What to run."""

    rates: str | None = None
    """Rates with commas between them, as 2,4,8. Not given: as recorded, or 4."""
    seeds: int | None = None
    """So many seeds, from 0 on. Not given: 3 where something is drawn, and else 1."""
    vary: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """NAME=VALUE,VALUE: an option of the engine or the machine that is tried with each value, as
    max_num_seqs=64,256. May be given several times."""
    slo: str | None = None
    """What is promised, as ttft_p99=2,tpot_p99=0.1 in seconds, or attainment=0.9 for the share of
    requests that meet their targets: adds the largest rate up to which all seeds keep it."""
    refine: int = 0
    """So many times, try the rate halfway between the largest that keeps --slo and the next one,
    for each policy and each set of options."""
    jobs: int | None = None
    """Processes that run at once. Not given: as many as there are processors."""
    csv: Path | None = None
    """Write a line for each run to this file."""
    report: Path | None = None
    """Write a page with charts to this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What there is to choose a run from."""

    source: str | Path
    base: TrialOptions
    policies: tuple[str, ...]
    variants: dict[str, dict[str, Any]]
    """By what tells them, as `max_num_seqs=64`; empty without."""
    rates: list[float | None]
    seeds: int
    draws: bool
    """Whether a seed changes anything."""
    requests: Path | None

    def cells(self) -> list[Cell]:
        return [
            cell
            for policy in self.policies
            for varied in self.variants
            for rate in self.rates
            for cell in self.at(policy, varied, rate)
        ]

    def at(self, policy: str, varied: str, rate: float | None) -> list[Cell]:
        """A run for each seed."""
        chosen = self.variants[varied]
        return [
            Cell(
                self.source,
                policy,
                rate,
                seed,
                varied,
                replace(self.base, rate=rate, seed=seed if self.draws else None, **chosen),
                self.requests,
            )
            for seed in range(self.seeds)
        ]

    def tables(self) -> list[tuple[CostTable, TrialOptions]]:
        """Each cost table that is tried, with the longest context that it is tried with."""
        from aioserve.simulation.latency_profile import read_cost

        longest: dict[str, TrialOptions] = {}
        for chosen in self.variants.values():
            tried = replace(self.base, **chosen)
            table, context = tried.cost_table, tried.max_model_len
            if table is None or context is None:
                continue
            if table not in longest or context > (longest[table].max_model_len or 0):
                longest[table] = tried
        return [(read_cost(table), tried) for table, tried in longest.items()]


def grid_of(trace: Path | None, options: SweepOptions) -> tuple[Grid, Trial]:
    """All runs, and the first one's workload, made here: what is wrong with it is said at once."""
    from aioserve.plugins import PluginRegistry
    from aioserve.plugins.files import named_policy
    from aioserve.testing.trial import Trial
    from aioserve.traces.workload import seed_draws

    source, base = source_of(trace, options), trial_options(options)
    registry = PluginRegistry()
    registry.check_selected()
    for name in options.policy:
        named_policy(registry, name)
    registry.eviction(options.eviction)
    rates, variants = _rates(options.rates), _variants(options.vary, base)
    draws = seed_draws(source, arrivals=options.arrivals, predictor=options.predictor)
    first = replace(base, rate=rates[0], **next(iter(variants.values())))
    trial = Trial(source, first, registry)
    draws = draws or trial.machine.scatter_seed is not None
    if options.seeds is not None and options.seeds > 1 and not draws:
        raise ConfigError(
            f"seeds: nothing of a trace is drawn, and no step scatters, got {options.seeds}: all "
            "runs would be the same"
        )
    seeds = options.seeds or (DEFAULT_SEEDS if draws else 1)
    count = len(options.policy) * len(variants) * (len(rates) + options.refine) * seeds
    if count > MAX_CELLS:
        raise ConfigError(f"a sweep may have at most {MAX_CELLS:,} runs, and these are {count:,}")
    grid = Grid(
        source=source,
        base=base,
        policies=options.policy,
        variants=variants,
        rates=rates,
        seeds=seeds,
        draws=draws,
        requests=options.requests,
    )
    return grid, trial


def _rates(text: str | None) -> list[float | None]:
    from aioserve.traces.checks import check_number
    from aioserve.traces.request import MAX_RATE

    if text is None:
        return [None]
    rates: list[float | None] = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            raise ConfigError(
                f"rates must be numbers with commas between them, got {shown(text)}"
            ) from None
        check_number(f"rates: {part.strip()!r}", rate, MAX_RATE)
        if rate in rates:
            raise ConfigError(f"rates: {part.strip()} is given twice")
        rates.append(rate)
    return rates


def _variants(vary: Sequence[str], base: TrialOptions) -> dict[str, dict[str, Any]]:
    """Every combination of the values, by what tells it. Raises `ConfigError`."""
    hints = get_type_hints(TrialFlags)
    known = [
        field.name for field in fields(base) if field.name in hints and field.name not in NOT_VARIED
    ]
    values: dict[str, list[Any]] = {}
    for one in vary:
        name, equals, texts = one.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in known or name in values:
            raise ConfigError(
                f"vary must be NAME=VALUE,VALUE, once for each of {', '.join(known)}, got {one!r}"
            )
        values[name] = [_value(name, text.strip(), hints[name]) for text in texts.split(",")]
        if len(set(values[name])) < len(values[name]):
            raise ConfigError(f"vary: a value of {name} is given twice, got {texts!r}")
    variants = [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]
    return {",".join(f"{n}={value}" for n, value in one.items()): one for one in variants}


def _value(name: str, text: str, hint: Any) -> Any:
    kinds = [kind for kind in (bool, int, float, str) if kind is hint or kind in _parts(hint)]
    kind = kinds[0]
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        what = {bool: "true or false", int: "an int"}.get(kind, f"a {kind.__name__}")
        raise ConfigError(f"vary: {name} must be {what}, got {text!r}") from None


def _parts(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", ())
