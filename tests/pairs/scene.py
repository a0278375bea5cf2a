"""A pair of features in one engine: its options, its requests, and the observations of the run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from aioserve import Engine, EngineStats, Observer, RequestInfo, SamplingParams, StepInfo
from aioserve.grammars.matcher import GrammarMatcher
from aioserve.models.files import model_files
from aioserve.paging.format import KV_FORMATS
from aioserve.paging.layout import kv_layout
from aioserve.paging.pages import pages_of_sequence
from aioserve.sampling import masks
from aioserve.scheduling import scheduler as scheduling
from aioserve.scheduling.parts.base import LateRow
from aioserve.scheduling.state import SchedulerState
from aioserve.testing import check_invariants, count_leaked_pages
from tests.pairs.asks import Ask, Brought, Moments, give
from tests.pairs.drafters import DrafterPlugin
from tests.pairs.features import FEATURES, PLUGIN, Feature, why_not_one_request
from tests.parity.tiny_models import VOCAB_SIZE

__all__ = [
    "PLAIN",
    "Alone",
    "Scene",
    "Seen",
    "features_of",
    "head_of",
    "place_of",
    "played",
    "scene_of",
]

PLAIN: dict[str, Any] = {
    "device": "cpu",
    "backend": "native",
    "dtype": "float32",
    "num_pages": 1000,
    "prefix_caching": False,
    "overlap": False,
    "reasoning_parser": "deepseek_r1",
    "plugins": [PLUGIN],
}
"""Options of every scene, unless its features set others."""
ALONE: dict[str, Any] = {**PLAIN, "jump_forward": False, "step_program": False}
"""Options without anything that could come between a request and its tokens."""
MAX_TOKENS = 24
LONGEST_TAIL = 9
NEIGHBOURS = ("first", "second", "third", "fourth")
"""Names of plain requests, two each."""
LIMITS: dict[str, dict[str, Any]] = {"second": {"min_p": 0.2}, "third": {"top_k": 3}}
"""Limits of some of them, which must not count for the next owners of their slots."""
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
DRAWN = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_tokens": MAX_TOKENS, "ignore_eos": True}
STEPS_BETWEEN_CHECKS = 5
CHECKS_BETWEEN_RESETS = 3
WAIT_SECONDS = 0.05
"""Seconds to wait for a step that may never come. No token depends on it."""
SLOW_MASK_SECONDS = 0.002
"""Seconds that a slow mask takes, which no step waits for. No token depends on it."""


# -- requests


def tokens(name: str, count: int, seed: int) -> tuple[int, ...]:
    """Ids that depend on all of these arguments, and end no completion."""
    source = random.Random(f"{name} {seed}")
    return tuple([source.randrange(4, VOCAB_SIZE) for _ in range(count)])


def _asks(name: str, changes: Sequence[Feature], seed: int, draw: random.Random) -> list[Ask]:
    """Two requests that have all of `changes`: a greedy one, which begins as many others do, and a
    sampled one."""
    beginning = tokens("beginning", 20, seed)
    asks = []
    for index, base in enumerate((GREEDY, DRAWN)):
        fields: dict[str, Any] = {**base, **LIMITS.get(name, {})}
        way, late, leave_after, fork_after = "tokens", False, None, None
        for feature in changes:
            fields |= {} if feature.params is None else feature.params[index]
            way = way if feature.ways is None else feature.ways[index]
            late = late or feature.late
            leave_after = draw.randrange(12) if feature.leaves else leave_after
            fork_after = draw.randrange(1, 8) if feature.forks else fork_after
        own = tokens(f"{name} {index}", LONGEST_TAIL + 16 * index, seed)
        prompt = (*(() if index else beginning), *own[own[0] % 5 :])
        params = SamplingParams(**fields)
        asks.append(Ask(f"{name}-{index}", prompt, params, way, late, fork_after, leave_after))
    return asks


@dataclass(frozen=True)
class Scene:
    """A scene: `waves` one after the other, with the requests of each at once or nearly so."""

    features: tuple[str, ...]
    options: dict[str, Any]
    waves: tuple[tuple[Ask, ...], ...]
    gaps: tuple[int, ...]
    """Steps that pass before each request of a wave."""

    @property
    def decides(self) -> dict[str, Any]:
        """Options that may change tokens."""
        return {key: v for name in self.features for key, v in FEATURES[name].decides.items()}

    @property
    def tight(self) -> bool:
        return any(FEATURES[name].tight for name in self.features)

    @property
    def resets(self) -> bool:
        return any(FEATURES[name].resets for name in self.features)

    @property
    def caches(self) -> bool:
        return self.options["prefix_caching"]


def scene_of(names: Sequence[str], page_size: int, seed: int, number: int = 0) -> Scene:
    """Make scene `number` of these features. `seed` decides the prompts, and all arguments together
    the rest."""
    draw = random.Random(f"{names} {page_size} {seed} {number}")
    features = {name: FEATURES[name] for name in names}
    asks = [ask for name in NEIGHBOURS for ask in _asks(name, [], seed, draw)]
    for name, feature in features.items():
        if feature.changes_requests:
            asks += _asks(name, [feature], seed, draw)
    if why_not_one_request(*map(FEATURES.__getitem__, (names[0], names[-1]))) is None:
        asks += _asks("+".join(names), list(features.values()), seed, draw)
    options: dict[str, Any] = {**PLAIN, "page_size": page_size}
    for feature in features.values():
        options |= feature.decides
        for option, value in feature.options(draw).items():
            both = option in options and option not in PLAIN and not isinstance(value, str | bool)
            options[option] = min(options[option], value) if both else value
    if any(feature.tight for feature in features.values()):
        largest = max([ask.most_tokens for ask in asks])
        # With small steps some are preempted in the middle of their prompts. With overlap, a step
        # in flight then has the next part of a prompt.
        prompts_count = any(any(feature.prompt_counts) for feature in features.values())
        chunks, spare = ([3], [2, 2, 36]) if prompts_count else ([2048, 5, 5], [2, 12, 36])
        options.setdefault("max_num_batched_tokens", draw.choice(chunks))
        options["overlap"] |= prompts_count
        options["num_pages"] = -(-(largest + draw.choice(spare)) // page_size)
    asks = [
        Ask(**{**vars(ask), "hints": _hints(place)}) for place, ask in enumerate(_mixed(asks, draw))
    ]
    again = any(feature.again for feature in features.values())
    gaps = tuple([draw.choice([0, 0, 0, 1, 3]) for _ in asks])
    return Scene(tuple(features), options, (tuple(asks),) * (2 if again else 1), gaps)


def _mixed(asks: list[Ask], draw: random.Random) -> list[Ask]:
    return draw.sample(asks, len(asks))


def _hints(place: int) -> dict[str, Any]:
    return {
        "priority": place % 3 - 1,
        "tenant": f"tenant-{place % 2}",
        "ttft_target_seconds": 1000.0 + place,
        "tpot_target_seconds": 1000.0,
        "predicted_output_tokens": 1 + 5 * place % 13,
    }


# -- runs


@dataclass
class Seen:
    """Observations of a run."""

    scene: Scene
    alone: dict[Ask, Brought]
    plain: dict[Ask, Brought]
    """Results of each request alone, and of the same without the changes of its features."""
    decided: int = 0
    """Number of requests whose tokens alone depend on the options that may change them."""
    results: list[list[tuple[Ask, Brought]]] = field(default_factory=list)
    """Results of each wave."""
    stats: EngineStats = None  # pyright: ignore[reportAssignmentType]
    policy: str = ""
    chunked: set[str] = field(default_factory=set)
    """Requests whose prompt was computed in parts."""
    most_waiting: int = 0
    most_ahead: int = 0
    """Most steps in flight when another one had been committed."""
    swapped: set[str] = field(default_factory=set)
    """Requests that waited on the host."""
    cached_on_host: int = 0
    paused: int = 0
    """Requests that were paused for their readers."""
    forgotten: int = 0
    """Pages of the prefix cache that were forgotten."""
    late_masks: int = 0
    """Rows that weren't drawn from, as their masks came too late."""
    preempted: set[str] = field(default_factory=set)
    """Requests that gave their pages back."""
    lost_in_flight: set[str] = field(default_factory=set)
    """Requests that gave them back while a step in flight computed the second or a later part of
    their prompt. The results of that step are dropped, and those before it are kept."""
    leaked_pages: int = 0
    free: tuple[int, int] = (0, 0)
    """Pages of all pools that are free in the end, and all pages."""

    @property
    def found_cached(self) -> set[str]:
        """Requests that found something in the prefix cache."""
        return {ask.name for wave in self.results for ask, brought in wave if brought.cached_tokens}

    @property
    def drafted(self) -> set[str]:
        """Requests that had draft tokens."""
        return {
            ask.name for wave in self.results for ask, brought in wave if brought.drafted_tokens
        }

    @property
    def num_right(self) -> int:
        """Draft tokens that were right."""
        return sum(self.stats.tokens_accepted_total)

    @property
    def num_wrong(self) -> int:
        return sum(self.stats.tokens_drafted_total) - self.num_right

    def brought(self, feature: str) -> list[Brought]:
        """Results of the requests with this feature."""
        every = [one for wave in self.results for one in wave]
        return [brought for ask, brought in every if feature in features_of(ask.name)]

    def changed(self, feature: str) -> bool:
        """True if a request has other tokens than without this feature."""
        return any(
            self.alone[ask].ids != self.plain[ask].ids
            for ask in self.plain
            if features_of(ask.name) == [feature]
        )


def features_of(name: str) -> list[str]:
    """Features of a request, by its name."""
    return name.rpartition("-")[0].split("+")


def place_of(name: str) -> int:
    """Index of a request among the two of its features, by its name."""
    return int(name.rpartition("-")[2])


class Alone:
    """Results of requests that a plain engine answers one by one, each computed once."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._known: dict[str, dict[Any, Brought]] = {}

    async def results(
        self, asks: Sequence[Ask], decides: Mapping[str, Any] | None = None
    ) -> dict[Ask, Brought]:
        """Results with these options of the engine, which may change tokens."""
        options = {**ALONE, **(decides or {})}
        known = self._known.setdefault(repr(decides or {}), {})
        missing = {ask.key: ask for ask in asks if ask.key not in known}
        if missing:
            async with Engine(self._model, **options) as engine:
                for key, ask in missing.items():
                    known[key] = await give(engine, ask)
        return {ask: known[ask.key] for ask in asks}


def head_of(model: str) -> str:
    """Directory of the head of a model."""
    return f"{model}-head"


def _pages_of_groups(model: str, scene: Scene) -> dict[str, Any]:
    """Numbers of pages that hold as much as the scene's, each of which has all layers. If these are
    few, they hold the longest request, and at most another one like it."""
    config, options = model_files(Path(model)).config(), scene.options
    layout = kv_layout(config.kv_layers(KV_FORMATS["float32"]), config.max_position_embeddings)
    num_pages, page_size = options["num_pages"], options["page_size"]
    if scene.tight and layout.num_window_groups:
        largest = max([ask.most_tokens for ask in scene.waves[0]])
        least = pages_of_sequence(largest, page_size, layout.num_window_groups, layout.window)
        num_pages = least + random.Random(f"{scene.gaps}").randint(0, least)
    else:
        num_pages *= layout.num_groups
    host = {"num_host_pages": layout.num_groups * options.get("num_host_pages", 0)}
    return {"num_pages": num_pages, **(host if host["num_host_pages"] else {})}


async def played(model: str, scene: Scene, alone: Alone) -> Seen:
    """Play a scene. Raises what a request raises, and `InvariantError` if counts are off."""
    asks = scene.waves[0]
    without = {ask: _without_changes(ask) for ask in asks}
    results = await alone.results([*asks, *without.values()], scene.decides)
    plain = {ask: results[without[ask]] for ask in asks}
    seen = Seen(scene, {ask: results[ask] for ask in asks}, plain)
    if scene.decides:
        others = await alone.results([*without.values()])
        seen.decided = sum(others[ask].ids != results[ask].ids for ask in others)
    slow_masks = any(FEATURES[name].slow_masks for name in scene.features)
    answers = {ask.prompt: brought.ids for ask, brought in seen.alone.items()}
    options = {**scene.options, "plugins": [*PLAIN["plugins"], DrafterPlugin(answers)]}
    if (speculation := options.get("speculation")) is not None:
        drafter = speculation.drafter.format(head=head_of(model))
        options["speculation"] = msgspec.structs.replace(speculation, drafter=drafter)
    engine = Engine(model, **options | _pages_of_groups(model, scene))
    with _slow_masks(seen) if slow_masks else nullcontext():
        await _played_on(engine, seen)
    return seen


@contextmanager
def _slow_masks(seen: Seen) -> Iterator[None]:
    allowed, go_back = GrammarMatcher.allowed, scheduling.after_late_rows

    def slowly(matcher: GrammarMatcher) -> Any:
        time.sleep(SLOW_MASK_SECONDS)  # on the thread of the grammars
        return allowed(matcher)

    def counted(state: SchedulerState, late: list[LateRow]) -> None:
        seen.late_masks += sum(row.run.goes_on for row in late)
        go_back(state, late)

    with (
        patch.object(masks, "WAIT_SECONDS", 0.0),
        patch.object(GrammarMatcher, "allowed", slowly),
        patch.object(scheduling, "after_late_rows", counted),
    ):
        yield


async def _played_on(engine: Engine, seen: Seen) -> None:
    scene = seen.scene
    async with engine:
        watching = _Watching(engine, seen)
        engine.observe(watching)
        checking = asyncio.ensure_future(watching.check())
        for wave in scene.waves:
            seen.results.append(await _play(engine, wave, scene.gaps, watching))
        await engine.drain()
        checking.cancel()
        with suppress(asyncio.CancelledError):
            await checking
        check_invariants(engine)
        seen.stats, seen.policy = engine.stats(), engine.dump()["policy"]
    seen.leaked_pages = count_leaked_pages(engine)
    pools = watching.pools
    seen.free = (sum(pool.num_free for pool in pools), sum(pool.num_pages for pool in pools))


def _without_changes(ask: Ask) -> Ask:
    base = DRAWN if ask.name.endswith("1") else GREEDY
    return Ask(ask.name, ask.prompt, SamplingParams(**base))


async def _play(
    engine: Engine, wave: Sequence[Ask], gaps: Sequence[int], watching: _Watching
) -> list[tuple[Ask, Brought]]:
    prompt_readers: list[asyncio.Future[Brought]] = []
    all_sent = asyncio.Event()

    async def others_done() -> None:
        await all_sent.wait()
        if prompt_readers:
            await asyncio.wait(prompt_readers)
        await watching.steps(2)
        watching.look_for_paused()

    moments = Moments(others_done, watching.steps, watching.asked_by)
    tasks: list[asyncio.Future[Brought]] = []
    for ask, gap in zip(wave, gaps, strict=True):
        await watching.steps(gap)
        task = asyncio.ensure_future(give(engine, ask, moments))
        tasks.append(task)
        if not ask.late:
            prompt_readers.append(task)
    all_sent.set()
    return list(zip(wave, await asyncio.gather(*tasks), strict=True))


class _Watching(Observer):
    """Counts events, and checks the state every few steps."""

    def __init__(self, engine: Engine, seen: Seen) -> None:
        live = engine._lifecycle
        self._engine = engine
        self._seen = seen
        self._core, self._scheduler = live.core, live.scheduler
        memory = live.scheduler.memory
        self.pools = [tier.pool for tier in memory.tiers]
        self.asked_by: dict[str, str] = {}
        """Names of requests, by the ids of their branches."""
        self._steps = 0
        self._stepped = asyncio.Event()
        self._in_prompt: list[set[tuple[str, int]]] = [set(), set()]
        """Samples whose prompt was computed in each of the last two steps, for the first token."""
        self._answering: set[tuple[str, int]] = set()
        """Samples that have drawn a token."""

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        self._count()

    def step_finished(self, step: StepInfo) -> None:
        seen = self._seen
        parts = [part for part in step.parts if not (part.is_decode or part.num_sampled)]
        seen.chunked.update([self._named(part.request_id) for part in parts])
        seen.most_waiting = max(seen.most_waiting, step.num_waiting)
        seen.preempted.update([self._named(request_id) for request_id, _ in step.preempted])
        lost = set.intersection(set(step.preempted), *self._in_prompt)
        if seen.scene.options["overlap"]:
            seen.lost_in_flight.update([self._named(request_id) for request_id, _ in lost])
        in_prompt = {(part.request_id, part.sample) for part in step.parts if not part.is_decode}
        self._in_prompt = [self._in_prompt[1], in_prompt - self._answering]
        self._answering.update([(p.request_id, p.sample) for p in step.parts if p.num_sampled])
        seen.most_ahead = max(seen.most_ahead, len(self._core.pipeline.in_flight))
        self._count()
        self._steps += 1
        self._stepped.set()
        self._stepped = asyncio.Event()

    def _named(self, request_id: str) -> str:
        """Name of a request, also of one of whose branches the id is."""
        return self.asked_by.get(request_id, request_id)

    def _count(self) -> None:
        seen, scheduler = self._seen, self._scheduler
        sequences = scheduler.state.sequences.values()
        swapped = [one for one in sequences if one.lease.swapped is not None]
        seen.swapped.update([self._named(one.request.request_id) for one in swapped])
        tree = scheduler.memory.tree
        if tree is not None and len(tree.pools) > 1:
            seen.cached_on_host = max(seen.cached_on_host, tree.num_pages_in(1))

    def look_for_paused(self) -> None:
        self._seen.paused += sum(one.paused for one in self._scheduler.state.sequences.values())

    async def steps(self, count: int) -> None:
        """Implement `Moments.steps`."""
        until = self._steps + count
        while self._steps < until:
            stepped = self._stepped
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    await stepped.wait()
            except TimeoutError:
                return

    async def check(self) -> None:
        for number in count(1):
            await self.steps(STEPS_BETWEEN_CHECKS)
            is_due = self._seen.scene.resets and number % CHECKS_BETWEEN_RESETS == 0
            if is_due and self._engine.state == "open":
                self._seen.forgotten += self._engine.reset_prefix_cache()
            check_invariants(self._engine)
