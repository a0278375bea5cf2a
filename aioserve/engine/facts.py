"""Facts that an engine reports about its model and itself. Read-only."""

from __future__ import annotations

from typing import Any, get_args

from aioserve.arguments import check, text
from aioserve.config import EngineConfig
from aioserve.engine.interface import ModelFacts, TemplateName
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.report import described, dump_of, stats_of
from aioserve.engine.stats import EngineStats
from aioserve.errors import EngineState, InvalidRequestError, ModelError
from aioserve.execution.runner import LoadedModel, ModelLimits
from aioserve.models.retrieval import Retrieval
from aioserve.request import SamplingParams
from aioserve.text.output_parsers.harmony import HarmonyParser
from aioserve.text.output_parsers.registry import (
    reasoning_format_named,
    tells_tool_parser,
    tool_parser_named,
)
from aioserve.text.tokenizer import Tokenizer

__all__ = ["EngineFacts"]

DIALS = ("enable_thinking", "reasoning_effort")
"""Variables of chat templates that say how much a model reasons."""


class EngineFacts:
    """The part of `Engine` whose members answer at once."""

    def __init__(self, config: EngineConfig, lifecycle: EngineLifecycle) -> None:
        self.config: EngineConfig = config
        self._lifecycle = lifecycle
        self._facts: ModelFacts | None = None

    @property
    def facts(self) -> ModelFacts:
        """All fixed facts about the loaded model, as one value."""
        if self._facts is None:
            self._facts = self._facts_of(self._lifecycle.started().model)
        return self._facts

    def _facts_of(self, model: LoadedModel) -> ModelFacts:
        names = get_args(TemplateName)
        return ModelFacts(
            name=self.model_name,
            limits=self.limits,
            description=described(model),
            tokenizer=model.tokenizer,
            has_chat_template=self.has_chat_template,
            template_reads=frozenset(filter(self.template_reads, names)),
            reads_tool_calls=self.reads_tool_calls,
            calls_in_channels=self.calls_in_channels,
            reasons=self.reasons,
            generates=self.generates,
            retrieval=self.retrieval,
            tells_relevance=self.tells_relevance,
            default_params=self.default_params,
            says_sampling=self.says_sampling,
        )

    @property
    def model_name(self) -> str:
        """Name, hub id or path of the loaded model, as it was given."""
        return self._lifecycle.started().model.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ModelError` for a model that has none."""
        model = self._lifecycle.started().model
        if model.tokenizer is None:
            raise ModelError(f"{model.name} has no tokenizer: {model.why_no_tokenizer}")
        return model.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """True if prompts may be text, and answers include text. Token ids are always accepted."""
        return self._lifecycle.started().model.tokenizer is not None

    def filled_in(self, prefix: str, suffix: str) -> str | None:
        """Prompt that asks for the text between `prefix` and `suffix` (fill in the middle).

        None if the tokenizer has no fill-in tokens. Raises `ModelError` without a tokenizer.
        """
        _ = self.tokenizer
        return self.facts.filled_in(prefix, suffix)

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary, context length and KV pages of the loaded model."""
        return self._lifecycle.started().model.limits

    @property
    def has_chat_template(self) -> bool:
        """True if prompts may be lists of messages."""
        return self._lifecycle.started().model.chat_template is not None

    def template_reads(self, name: str) -> bool:
        """True if the chat template contains `name`, the name of a role or of a variable, anywhere.

        False without a template. Raises `InvalidRequestError` unless `name` is a str of 1 to 256
        characters.
        """
        name = check(InvalidRequestError, "name", name, text(1, 256))
        template = self._lifecycle.started().model.chat_template
        return template is not None and template.for_tools(name == "tools").reads(name)

    @property
    def reads_tool_calls(self) -> bool:
        """True if `chat` takes `tools` without a `tool_parser`.

        That needs a chat template that reads tools, and a known format of calls, from the template
        or the engine's options.
        """
        template = self._lifecycle.started().model.chat_template
        if template is None or not (template := template.for_tools(True)).reads("tools"):
            return False
        return self.config.tool_parser != "auto" or tells_tool_parser(
            template.source, self._lifecycle.started().parsers
        )

    @property
    def reasons(self) -> bool:
        """True if the model may reason before it answers.

        That needs a known format of reasoning, from the chat template or the engine's options, or a
        template with a variable that controls reasoning.
        """
        template = self._lifecycle.started().model.chat_template
        source = "" if template is None else template.source
        parsers = self._lifecycle.started().parsers
        if reasoning_format_named(self.config.reasoning_parser, source, parsers) is not None:
            return True
        return any(map(self.template_reads, DIALS))

    @property
    def calls_in_channels(self) -> bool:
        """True if the model writes calls as messages in channels, the way it writes its answers.

        `chat` then reads calls from channels, and the model was not trained to call by JSON in an
        answer.
        """
        template = self._lifecycle.started().model.chat_template
        if template is None or not self.reads_tool_calls:
            return False
        name, source = self.config.tool_parser, template.for_tools(True).source
        parsers = self._lifecycle.started().parsers
        read = tool_parser_named(name, source, has_tools=True, parsers=parsers)
        return read is HarmonyParser

    @property
    def retrieval(self) -> Retrieval:
        """Defaults for embedding requests, from the model's files."""
        return self._lifecycle.started().model.retrieval

    @property
    def generates(self) -> bool:
        """True if the model generates text; False if it only makes embeddings."""
        return self._lifecycle.started().model.generates

    @property
    def tells_relevance(self) -> bool:
        """True if the model is a reranker, so that `relevance` takes pairs of texts."""
        return self._lifecycle.started().model.reranker is not None

    @property
    def default_params(self) -> SamplingParams:
        """Sampling of requests without parameters."""
        return self._lifecycle.started().model.defaults

    @property
    def says_sampling(self) -> bool:
        """True if the model's files set `default_params`. False for a GGUF file without sampling
        settings: the defaults are then llama.cpp's."""
        return self._lifecycle.started().model.says_sampling

    @property
    def state(self) -> EngineState:
        """Stage of the engine's life; "failed" after a bug or the loss of its device has ended
        it."""
        return self._lifecycle.state

    def stats(self) -> EngineStats:
        """Return the engine's numbers at this moment; also works after closing.

        Raises `WrongLoopError` if they may change in another thread meanwhile.
        """
        return stats_of(self._lifecycle.at_rest())

    def dump(self) -> dict[str, Any]:
        """Return all state of the engine that helps to debug it, as plain values.

        Raises `WrongLoopError` as `stats` does.
        """
        live = self._lifecycle.at_rest()
        return {"state": self.state, **dump_of(live)}
