"""What an engine tells of its model and of itself. Changes nothing."""

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
    """The part of `Engine` that is asked and never waited for."""

    def __init__(self, config: EngineConfig, lifecycle: EngineLifecycle) -> None:
        self.config: EngineConfig = config
        self._lifecycle = lifecycle
        self._facts: ModelFacts | None = None

    @property
    def facts(self) -> ModelFacts:
        """All that is fixed about the loaded model, as one value."""
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
        """What was loaded: a name, a hub id or a path, as it was given."""
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
        """Whether prompts may be text, and answers have any. Token ids always may be given."""
        return self._lifecycle.started().model.tokenizer is not None

    def filled_in(self, prefix: str, suffix: str) -> str | None:
        """The prompt of what stands between two texts, as the model was trained for it (FIM); None
        where its tokenizer has no marks for that. Raises `ModelError` without a tokenizer."""
        _ = self.tokenizer
        return self.facts.filled_in(prefix, suffix)

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary, context length and KV pages of the loaded model."""
        return self._lifecycle.started().model.limits

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be lists of messages."""
        return self._lifecycle.started().model.chat_template is not None

    def template_reads(self, name: str) -> bool:
        """Whether the chat template has that word, the name of a role or of a variable, anywhere;
        False where there is no template. Raises `InvalidRequestError` for no str of 1 to 256
        characters."""
        name = check(InvalidRequestError, "name", name, text(1, 256))
        template = self._lifecycle.started().model.chat_template
        return template is not None and template.for_tools(name == "tools").reads(name)

    @property
    def reads_tool_calls(self) -> bool:
        """Whether `chat` takes `tools` without a `tool_parser` beside them: the chat template reads
        them, and it or the engine's options tell how the model calls them."""
        template = self._lifecycle.started().model.chat_template
        if template is None or not (template := template.for_tools(True)).reads("tools"):
            return False
        return self.config.tool_parser != "auto" or tells_tool_parser(template.source)

    @property
    def reasons(self) -> bool:
        """True if the model may reason before it answers. Its chat template or the engine's options
        tell how it writes that, or the template has a switch or an effort of it."""
        template = self._lifecycle.started().model.chat_template
        source = "" if template is None else template.source
        if reasoning_format_named(self.config.reasoning_parser, source) is not None:
            return True
        return any(map(self.template_reads, DIALS))

    @property
    def calls_in_channels(self) -> bool:
        """Whether the model writes calls as messages in channels, as it writes its answers: so
        `chat` reads them, and JSON in an answer isn't what the model was trained to call with."""
        template = self._lifecycle.started().model.chat_template
        if template is None or not self.reads_tool_calls:
            return False
        name, source = self.config.tool_parser, template.for_tools(True).source
        return tool_parser_named(name, source, has_tools=True) is HarmonyParser

    @property
    def retrieval(self) -> Retrieval:
        """How texts are embedded where a request doesn't say: as the model's files do."""
        return self._lifecycle.started().model.retrieval

    @property
    def generates(self) -> bool:
        """True where the model makes text; False where it makes embeddings alone."""
        return self._lifecycle.started().model.generates

    @property
    def tells_relevance(self) -> bool:
        """Whether the model is a reranker, so that `relevance` takes pairs of texts."""
        return self._lifecycle.started().model.reranker is not None

    @property
    def default_params(self) -> SamplingParams:
        """How requests without parameters are sampled."""
        return self._lifecycle.started().model.defaults

    @property
    def says_sampling(self) -> bool:
        """True if the model's files set `default_params`. False for a GGUF file that says nothing
        of sampling: they are then those of llama.cpp."""
        return self._lifecycle.started().model.says_sampling

    @property
    def state(self) -> EngineState:
        """Where it is in its life; "failed" where a bug or its device has ended it."""
        return self._lifecycle.state

    def stats(self) -> EngineStats:
        """The engine's numbers at this moment; also after it was closed. Raises `WrongLoopError`
        where they may change in another thread meanwhile."""
        return stats_of(self._lifecycle.at_rest())

    def dump(self) -> dict[str, Any]:
        """Everything about the engine's state that helps to debug it, as plain values. Raises
        `WrongLoopError` as `stats` does."""
        live = self._lifecycle.at_rest()
        return {"state": self.state, **dump_of(live)}
