"""`aioserve plugins`: lists and checks installed plugins, and writes projects of new ones."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from aioserve.arguments import counted
from aioserve.cli._plugin_project import write_project
from aioserve.cli._printable import printable
from aioserve.drafting.loaded import loaded_by_engine
from aioserve.errors import ConfigError, PluginError
from aioserve.isolation import shown
from aioserve.kv.eviction import StrategyCalls
from aioserve.kv.prefix_tree import EVICTION_STRATEGIES
from aioserve.models.families.family import ModelFamily
from aioserve.models.quantization.declared import WeightFormat
from aioserve.plugins import PluginRegistry
from aioserve.plugins.files import DRAFTER, POLICY, class_of_file
from aioserve.plugins.installed import Origin
from aioserve.testing import (
    DraftTimes,
    check_admission,
    check_drafter,
    check_eviction,
    check_logits_processor,
    check_model_family,
    check_observer,
    check_policy,
    check_reasoning_parser,
    check_tool_parser,
    check_weight_format,
)
from aioserve.testing.drafter_check import TIMED_TOKENS

__all__ = ["app"]

MAX_EXAMPLES = 1_000_000

Kind = Literal["policy", "drafter", "tool-parser", "model-family", "weight-format"]
Row = dict[str, Any]
Check = tuple[str, Callable[[int], object]]
"""Name of a check, and a function that raises if it fails on this many examples. The function's
result is printed with it.
"""

NATIVE = {
    "lru": "least recently used first",
    "lfu": "least frequently used first",
    "fifo": "oldest first",
    "slru": "used once before used again",
}

app: App = App(name="plugins", help="List, check and begin plugins.")


@app.default
def list_plugins(
    *,
    all: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """List what plugins offer.

    Args:

        all: Also list broken plugins, with the cause, and plugins that AIOSERVE_PLUGINS leaves out.
        json: Print JSON instead of a table.
    """
    registry = PluginRegistry()
    usable, others = list(_usable(registry)), list(_others(registry))
    rows = [*usable, *others] if all else usable
    if json:
        print(json_module.dumps(rows, indent=2))
        return
    _print_table(rows)
    if others and not all:
        can_not = "more can't be used; --all shows"
        print("\n" + counted(len(others), f"{can_not} it", f"{can_not} them"))


@app.command
def check(name: str, /, *, examples: int = 100) -> None:
    """Try what a plugin offers on random input; exit code 1 if it breaks its contract.

    Args:
        name: Name of a policy, an eviction strategy, a drafter, an observer, a parser or a plugin.
            A policy, a strategy, a processor or a drafter may have options: NAME:OPTION=VALUE. A
            policy or drafter of yours may be FILE.py:CLASS.
        examples: How many are tried.
    """
    if not 1 <= examples <= MAX_EXAMPLES:
        raise ConfigError(f"examples must be in [1, {MAX_EXAMPLES}], got {examples}")
    with redirect_stdout(sys.stderr):  # output of plugins is no finding
        registry = PluginRegistry()
        checks = list(_checks(registry, name))
    wanted = name.partition(":")[0]
    broken = [one for one in registry.broken if one.name == wanted]
    if not checks and not broken:
        broken = [one for one in registry.broken if wanted in {name for _, name in one.offered}]
    if not checks and not broken:
        raise ConfigError(_why_not(registry, name))
    failed = len(broken)
    for one in broken:
        print(printable(f"{one.name} ({one.origin}) is broken: {one.reason}"))
    for what, run in checks:
        try:
            with redirect_stdout(sys.stderr):
                measured = run(examples)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "hypothesis":
                raise PluginError(str(error)) from error
            failed += 1
            text = str(error) if isinstance(error, AssertionError) else shown(error)
            print(printable(f"{what} fails: {text}"))
        else:
            times = f"; {_times_text(measured)}" if isinstance(measured, DraftTimes) else ""
            print(f"{what} keeps its contract: {counted(examples, 'random example')}{times}")
    if failed:
        sys.stdout.flush()
        raise PluginError(f"{failed} of {counted(len(checks) + len(broken), 'check')} failed")


@app.command
def new(name: str, /, *, kind: Kind = "policy", dir: Path = Path()) -> None:
    """Write a complete project of a plugin, ready to be installed.

    Args:

        name: Name of the project and of its plugin: lower-case letters, digits, '_' and '-'.
        kind: Kind of the plugin.
        dir: Directory in which the project's directory is made.
    """
    registry = PluginRegistry()
    taken = {row["name"] for row in (*_usable(registry), *_others(registry))}
    project, steps = write_project(name, dir, taken, kind)
    print("\n  ".join([f"{project} is ready. Next:", *steps]))


def _usable(registry: PluginRegistry) -> Iterator[Row]:
    for kind, offers, state in (
        ("policy", registry.policies, "ready"),
        ("eviction", registry.evictions, "ready"),
        ("observer", registry.observers, "active"),
        ("logits processor", registry.logits_processors, "ready"),
        ("drafter", registry.drafters, "ready"),
        ("tool parser", registry.tool_parsers, "ready"),
        ("reasoning parser", registry.reasoning_parsers, "ready"),
        ("model family", registry.model_families, "ready"),
        ("weight format", registry.weight_formats, "ready"),
    ):
        for name, offer in sorted(offers.items()):
            spec = offer.spec
            about = {"description": spec.description, "api": spec.api}
            yield _row(kind, name, offer.origin, state, **about)
        if kind == "eviction":
            native = Origin("", "aioserve", version("aioserve"), selected=False)
            for name in EVICTION_STRATEGIES:
                yield _row(kind, name, native, "ready", description=NATIVE[name])
    for offer in registry.admissions:
        yield _row("admission", offer.origin.plugin, offer.origin, "active")


def _others(registry: PluginRegistry) -> Iterator[Row]:
    for broken in registry.broken:
        yield _row("plugin", broken.name, broken.origin, "broken", cause=broken.reason)
    for plugin in registry.off:
        cause = "AIOSERVE_PLUGINS leaves it out"
        yield _row("plugin", plugin.name, plugin.origin, "off", cause=cause)


def _row(
    kind: str,
    name: str,
    origin: Origin,
    state: str,
    *,
    description: str = "",
    api: int | None = None,
    cause: str | None = None,
) -> Row:
    return {
        "kind": kind,
        "name": name,
        "description": description,
        "distribution": origin.distribution,
        "version": origin.version,
        "api": api,
        "state": state,
        "cause": cause,
    }


def _print_table(rows: list[Row]) -> None:
    from rich.table import Table

    from aioserve.cli._console import plain_console

    table = Table(box=None, pad_edge=False)
    for column in ("kind", "name", "description", "distribution", "version", "api", "state"):
        table.add_column(column, overflow="fold", no_wrap=column not in ("description", "state"))
    for row in rows:
        shown = [row[key] for key in ("kind", "name", "description", "distribution", "version")]
        state = row["state"] if row["cause"] is None else f"{row['state']}: {row['cause']}"
        table.add_row(*shown, "" if row["api"] is None else str(row["api"]), state)
    plain_console(highlight=False).print(table)


def _why_not(registry: PluginRegistry, text: str) -> str:
    """Return why there is nothing to check."""
    name, colon, _ = text.partition(":")
    if name in EVICTION_STRATEGIES:
        return f"eviction strategy {name!r} is built in: there is no plugin to check"
    for plugin in registry.off:
        if name == plugin.name:
            return f"AIOSERVE_PLUGINS leaves out plugin {name!r} ({plugin.origin})"
    known = {row["name"] for row in (*_usable(registry), *_others(registry))}
    if colon and name in known:
        return (
            "only policies, eviction strategies, logits processors and drafters have options, "
            f"got {shown(text)}"
        )
    known.difference_update(EVICTION_STRATEGIES)
    return f"no plugin offers {shown(name)}; there are: {', '.join(sorted(known))}"


def _checks(registry: PluginRegistry, text: str) -> Iterator[Check]:
    """Yield checks of everything that has the name, or comes from the plugin of that name.

    For a file, yield the check of its policy or drafter.
    """
    if (of_file := class_of_file(text, POLICY, DRAFTER)) is not None:
        kind, make = of_file
        check = check_policy if kind is POLICY else check_drafter
        _without_model(make(), text)
        yield f"{kind.word} {text}", partial(_checked, check, make)
        return
    name, colon, options = text.partition(":")

    def meant(offer: Any) -> bool:  # options belong to a name, not to a plugin
        return name == offer.spec.name or (not colon and name == offer.origin.plugin)

    def strategy(text: str) -> Any:
        made = registry.eviction(text)
        return made.strategy if isinstance(made, StrategyCalls) else made

    def processor(text: str) -> Any:
        return registry.processor_makers[registry.logits_processor(text)].make(text)

    def drafter(text: str) -> Any:
        return _without_model(registry.drafter(text), text)

    for kind, offers, make, check in (
        ("policy", registry.policies, registry.policy, check_policy),
        ("eviction strategy", registry.evictions, strategy, check_eviction),
        (
            "logits processor",
            registry.logits_processors,
            processor,
            check_logits_processor,
        ),
        ("drafter", registry.drafters, drafter, check_drafter),
    ):
        for offer in filter(meant, offers.values()):
            full = offer.spec.name + colon + options
            make(full)  # a wrong option is an error of the command line
            yield f"{kind} {full} ({offer.origin})", partial(_checked, check, partial(make, full))
    if colon:
        return
    for kind, offers, check in (
        ("tool parser", registry.tool_parsers, check_tool_parser),
        ("reasoning parser", registry.reasoning_parsers, check_reasoning_parser),
    ):
        for offer in filter(meant, offers.values()):
            yield f"{kind} {offer.label}", partial(_checked, check, offer.spec.value)
    for offer in filter(meant, registry.model_families.values()):
        family: ModelFamily = offer.spec.value
        yield f"model family {offer.label}", lambda _, family=family: check_model_family(family)
    for offer in filter(meant, registry.weight_formats.values()):
        written: WeightFormat = offer.spec.value
        yield (
            f"weight format {offer.label}",
            lambda _, written=written: check_weight_format(written),
        )
    for offer in filter(meant, registry.observers.values()):
        yield f"observer {offer.label}", partial(_checked, check_observer, offer.spec.factory)
    for offer in registry.admissions:
        if name == offer.origin.plugin:
            yield f"admission {offer.label}", partial(_checked, check_admission, offer.ask)


def _without_model(made: Any, text: str) -> Any:
    """Return the drafter or policy, if it needs no engine. Raises `ConfigError` otherwise."""
    if loaded_by_engine(made) is not None:
        raise ConfigError(
            f"drafter {shown(text)} drafts by a model that an engine loads, so nothing can be "
            "checked here"
        )
    return made


def _checked(check: Callable[..., object], what: object, examples: int) -> object:
    return check(what, max_examples=examples)


def _times_text(times: DraftTimes) -> str:
    return (
        f"behind a prompt of {TIMED_TOKENS:,} tokens a step takes "
        f"{times.step_seconds * 1e6:.1f} µs, and the start {times.start_seconds * 1e3:.1f} ms"
    )
