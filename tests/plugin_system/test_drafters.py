"""Drafters by name: found, made with options, given to the runner of a model that verifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tokenizers.processors import TemplateProcessing

from aioserve import (
    ConfigError,
    Drafter,
    DrafterSpec,
    Engine,
    EngineConfig,
    InvalidSamplingError,
    LoadedModel,
    PluginError,
    PromptTooLongError,
    SamplingParams,
    SchedulingPolicy,
    Speculation,
    Tokenizer,
    hookimpl,
)
from aioserve.drafting.guarded import GuardedDrafter
from aioserve.engine import intake
from aioserve.plugins import PluginRegistry
from aioserve.testing import FakeModel, byte_tokenizer, run_simulated
from tests.plugin_system.planted import entry_point


class Repeating(Drafter):
    """Drafts that the last token comes again."""

    def __init__(self, *, times: int = 2) -> None:
        self.times = times
        self.last: dict[int, int] = {}

    def start(self, slot, sequence):
        self.last[slot] = int(sequence.known_ids[-1])

    def extend(self, slot, token_ids):
        self.last[slot] = token_ids[-1]

    def draft(self, slot, limit):
        return [self.last[slot]] * min(limit, self.times)

    def end(self, slot):
        del self.last[slot]


class Asynchronous(Repeating):
    async def draft(self, slot, limit):
        return []


class Misspelt(Repeating):
    def draft_al(self, slots, limits):
        return []


class DrafterPlugin:
    def __init__(self, factory: Callable[..., Any] = Repeating, name: str = "repeating") -> None:
        self.spec = DrafterSpec(name, factory, "the last token again")

    @hookimpl
    def aioserve_drafters(self):
        return [self.spec]


def framing_tokenizer() -> Tokenizer:
    """A `byte_tokenizer` that puts a token before a prompt, and knows one that the model has no
    logits for."""
    backend = byte_tokenizer()._backend
    backend.add_tokens(["~~"])
    backend.post_processor = TemplateProcessing(
        single="! $A", special_tokens=[("!", backend.token_to_id("!"))]
    )
    return Tokenizer(backend, source="framing tokenizer")


class Verifying(FakeModel):
    """A model whose runner shows the drafter that it takes."""

    taken: Drafter | None = None

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        loaded = await super().load(config, num_slots=num_slots)

        def take(drafter: Drafter) -> None:
            self.taken = drafter
            assert loaded.take_drafter is not None
            loaded.take_drafter(drafter)

        return msgspec.structs.replace(loaded, take_drafter=take, tokenizer=framing_tokenizer())


class NotVerifying(FakeModel):
    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        loaded = await super().load(config, num_slots=num_slots)
        return msgspec.structs.replace(loaded, take_drafter=None)


def engine_of(drafter: str, model: FakeModel, *plugins: Any, **options: Any) -> Engine:
    speculation = Speculation(drafter=drafter, **options)
    given: Any = {"policy": SchedulingPolicy(), "plugins": plugins}
    return Engine(model, speculation=speculation, **given)


@pytest.mark.parametrize(("drafter", "times"), [("repeating", 2), ("repeating:times=5", 5)])
def test_an_engine_gives_its_runner_a_drafter_behind_a_guard(drafter, times):
    async def main() -> None:
        model, made = Verifying(), []

        def factory(*, times: int = 2) -> Repeating:
            made.append(Repeating(times=times))
            return made[-1]

        async with engine_of(drafter, model, DrafterPlugin(factory)) as engine:
            assert engine.stats().drafter_faults_total == 0
            assert isinstance(model.taken, GuardedDrafter)
            assert [each.times for each in made] == [times]
            model.taken.end(3)  # which never started: it isn't passed on
            expected = {
                "drafter": drafter,
                "max_tokens": 8,
                "acceptance": "match",
                "max_branches": 0,
            }
            assert engine.dump()["config"]["speculation"] == expected

    run_simulated(main)


@pytest.mark.parametrize(
    ("drafter", "plugins", "error", "message"),
    [
        ("repaeting", [DrafterPlugin()], ConfigError, r"speculation: no drafter 'repaeting'; did"),
        ("repeating:often=1", [DrafterPlugin()], ConfigError, r"no option 'often'; there are: tim"),
        ("repeating:times=x", [DrafterPlugin()], ConfigError, "must be a whole number, got 'x'"),
        ("repeating", [DrafterPlugin(lambda: 1 // 0)], PluginError, "can't be made: ZeroDivision"),
        ("repeating", [DrafterPlugin(dict)], PluginError, "its factory made {}, no Drafter"),
        ("repeating", [DrafterPlugin(Asynchronous)], PluginError, "draft must be a plain function"),
        ("repeating", [DrafterPlugin(Misspelt)], PluginError, "did you mean draft_all"),
        ("repeating", [DrafterPlugin(), DrafterPlugin()], PluginError, "is offered by plugin"),
        ("repeating", [DrafterPlugin(name="a b")], PluginError, "name must be letters, digits"),
    ],
)
@pytest.mark.asyncio
async def test_a_drafter_that_there_is_not_is_refused(drafter, plugins, error, message):
    with pytest.raises(error, match=message):
        async with engine_of(drafter, Verifying(), *plugins):
            pass


def test_a_broken_plugin_of_that_name_says_why(installed):
    installed.append(entry_point("mine", lambda: 1 // 0))
    with pytest.raises(
        PluginError, match=r"drafter 'mine' can't be loaded: mine \(some-dist 1.2\)"
    ):
        PluginRegistry().drafter("mine")


@pytest.mark.asyncio
async def test_speculation_where_nothing_verifies_is_refused():
    with pytest.raises(ConfigError, match="speculation isn't supported") as refused:
        async with engine_of("repeating", NotVerifying(), DrafterPlugin()):
            pass
    assert refused.value.argument == "speculation"


def test_a_speculation_that_is_none_is_refused():
    wrong: Any
    for wrong, shown in ((5, "5"), (["suffix"], r"\['suffix'\]"), (b"suffix", "b'suffix'")):
        told = f"speculation must be a Speculation or the name of a drafter, got {shown}"
        with pytest.raises(ConfigError, match=told):
            Engine(FakeModel(), speculation=wrong)
    for count in (0, 65, True):
        with pytest.raises(ConfigError, match=r"max_tokens must be an int in \[1, 64\]"):
            Speculation(drafter="suffix", max_tokens=count)
    with pytest.raises(ConfigError, match="drafter must be a str"):
        Speculation(drafter="")


# -- what requests ask of it


@pytest.mark.parametrize(
    ("params", "speculates", "message"),
    [
        ({"max_draft_tokens": 9}, True, r"at most 8, got 9: the engine's speculation allows 8"),
        ({"max_draft_tokens": 1}, False, r"at most 0, got 1: the engine has no speculation"),
        ({"prediction": "x"}, False, r"^prediction must be None, got 'x': the engine has no spec"),
    ],
)
def test_a_request_that_asks_for_what_there_is_not_is_refused(params, speculates, message):
    async def main() -> None:
        options: Any = {}
        if speculates:
            options = {"speculation": Speculation(drafter="repeating")}
        plugins = [DrafterPlugin()]
        async with Engine(
            Verifying(), policy=SchedulingPolicy(), plugins=plugins, **options
        ) as engine:
            with pytest.raises(InvalidSamplingError, match=message) as refused:
                engine.stream([1], SamplingParams(**params))
            assert refused.value.argument in params
            await engine.generate([1], SamplingParams(max_tokens=2, max_draft_tokens=0))

    run_simulated(main)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_draft_tokens": -1}, r"max_draft_tokens must be an int in \[0, 64\], got -1"),
        ({"max_draft_tokens": 65}, r"max_draft_tokens must be an int in \[0, 64\], got 65"),
        ({"prediction": ""}, "prediction must be a str"),
        ({"prediction": 7}, "prediction must be a str"),
        ({"prediction": "x", "max_draft_tokens": 0}, "prediction has no effect with"),
        ({"prediction": "x", "logits_processors": ["p"]}, "prediction has no effect with logits_"),
        (
            {"max_draft_tokens": 2, "logits_processors": "p"},
            "max_draft_tokens has no effect with logits_processors",
        ),
    ],
)
def test_parameters_outside_their_range_are_refused(params, message):
    with pytest.raises(InvalidSamplingError, match=message):
        SamplingParams(**params)


PROMPTS: list[Any] = [[5, 6, 7], "a text", "a long text, " * 50]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("length", [1, 1500])
@pytest.mark.parametrize("truncated", [None, 2])
@pytest.mark.asyncio
async def test_a_request_has_its_drafts_and_the_ids_of_its_prediction(
    prompt, length, truncated, monkeypatch
):
    model, plugins = Verifying(max_model_len=4096, num_pages=1024), [DrafterPlugin()]
    prediction = "é" * length
    async with Engine(
        model,
        policy=SchedulingPolicy(),
        plugins=plugins,
        speculation=Speculation(drafter="repeating", max_tokens=6),
    ) as engine:
        seen: list[Any] = []
        core = engine._lifecycle.core
        submit = core.submit
        monkeypatch.setattr(core, "submit", lambda live: seen.append(live.request) or submit(live))
        options: Any = {} if truncated is None else {"truncate_prompt_tokens": truncated}
        asked = [
            SamplingParams(max_tokens=1, prediction=prediction + "~~"),
            SamplingParams(max_tokens=1, max_draft_tokens=3),
            SamplingParams(max_tokens=1),
        ]
        for params in asked:
            await engine.generate(prompt, params, **options)
        ids = byte_tokenizer().encode(prediction, add_special_tokens=False)
        assert [each.predicted_ids.tolist() for each in seen] == [ids, [], []]
        assert [each.max_draft_tokens for each in seen] == [6, 3, 6]
        assert len({each.prompt_ids.tobytes() for each in seen}) == 1
        await engine.score_each([1, 2], [[3]])
        assert seen[-1].max_draft_tokens == 0


@pytest.mark.parametrize("length", [300, 100_000])
def test_a_prediction_longer_than_the_model_is_refused(length):
    async def main() -> None:
        speculation = Speculation(drafter="repeating")
        options: Any = {"policy": SchedulingPolicy(), "plugins": [DrafterPlugin()]}
        async with Engine(Verifying(), speculation=speculation, **options) as engine:
            with pytest.raises(PromptTooLongError, match=r"^prediction has ") as refused:
                await engine.generate([1], SamplingParams(prediction="x" * length))
            assert refused.value.argument == "prediction"

    run_simulated(main)


def test_predictions_of_many_answers_are_limited_together(monkeypatch):
    monkeypatch.setattr(intake, "MAX_PREDICTED_TOKENS", 20)

    async def main() -> None:
        speculation = Speculation(drafter="repeating")
        options: Any = {"policy": SchedulingPolicy(), "plugins": [DrafterPlugin()]}
        async with Engine(Verifying(), speculation=speculation, **options) as engine:
            for n, length in ((1, 20), (2, 10)):
                await engine.generate([1], SamplingParams(prediction="x" * length, n=n))
            with pytest.raises(InvalidSamplingError, match="at most 20 tokens for n=3") as refused:
                await engine.generate([1], SamplingParams(prediction="x" * 7, n=3))
            assert (refused.value.argument, refused.value.limit) == ("prediction", 6)

    run_simulated(main)
