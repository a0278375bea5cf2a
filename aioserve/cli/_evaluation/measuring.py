"""Options and course of `aioserve evaluate`: it opens the engines, chooses the windows and
measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from aioserve.arguments import counted
from aioserve.capacity.models import read_model
from aioserve.cli._engine import open_engine
from aioserve.cli._evaluation.divergence import Divergence, RowReader, compare_text
from aioserve.cli._evaluation.scoring import Scored, score_text
from aioserve.cli._evaluation.text import EvaluatedText, check_same_tokens, tokens_of_text
from aioserve.cli._evaluation.windows import Window, second_halves, sliding_windows
from aioserve.cli._models import local_model
from aioserve.errors import ConfigError
from aioserve.progress_bar import bar_on_terminal

if TYPE_CHECKING:
    from aioserve import Engine

__all__ = ["Measured", "Options", "check", "measure"]

CONTEXT = 512
"""Tokens of a window, if the model takes as many."""
LEAST_CONTEXT = 2
MAX_CONTEXT = 1 << 24
MAX_CONCURRENCY = 1024
PAGE_SIZE = 16


class Options(NamedTuple):
    """Options of the command line for windows."""

    context: int | None
    stride: int | None
    second_halves: bool
    max_tokens: int | None
    concurrency: int


class Measured(NamedTuple):
    """Results of the engines. `reference` and `divergence` are None without a reference."""

    text: EvaluatedText
    context: int
    stride: int | None
    windows: list[Window]
    scored: Scored
    reference: Scored | None
    divergence: Divergence | None
    facts: tuple[dict[str, Any], ...]
    """Dtype, device and backend of each engine."""


def check(options: Options) -> None:
    """Raise `ConfigError` for a count that is out of bounds or has no effect."""
    limits: dict[str, tuple[int | None, int, int]] = {
        "context": (options.context, LEAST_CONTEXT, MAX_CONTEXT),
        "stride": (options.stride, 1, options.context or MAX_CONTEXT),
        "max_tokens": (options.max_tokens, 2, MAX_CONTEXT),
        "concurrency": (options.concurrency, 1, MAX_CONCURRENCY),
    }
    for name, (value, least, most) in limits.items():
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"{name} must be in [{least}, {most}], got {value}",
                argument=name,
                value=value,
                limit=least if value < least else most,
            )
    if options.second_halves and options.stride is not None:
        raise ConfigError(
            "stride has no effect with --second-halves: leave one of them out", argument="stride"
        )


async def measure(
    models: Sequence[tuple[str, Mapping[str, Any]]], contents: str, options: Options
) -> Measured:
    """Measure a model, and its reference if `models` has a second entry.

    Each comes with options of its engine. Raises `ConfigError` for models or options that don't go
    together.
    """
    engines: list[Engine] = []
    readers = [RowReader() for _ in models]
    async with AsyncExitStack() as stack:
        for (model, of_engine), reader in zip(models, readers, strict=True):
            sizes = _engine_sizes(model, of_engine.get("architecture"), options)
            engine = open_engine(model, plugins=(reader,), **sizes, **of_engine)
            with _blaming_context(options.context):
                engines.append(await stack.enter_async_context(engine))
        if len(engines) > 1:
            check_same_tokens(engines[0], engines[1], contents)
        text = tokens_of_text(contents, engines[0], options.max_tokens)
        context, stride, windows = _windows(options, engines, text)
        scores: list[Scored] = []
        for (model, _), engine in zip(models, engines, strict=True):
            with bar_on_terminal(f"scoring {model}") as bar:
                scores.append(await score_text(engine, text, windows, options.concurrency, bar))
        divergence = None
        if len(engines) > 1:
            with bar_on_terminal("comparing distributions") as bar:
                divergence = await compare_text(
                    (engines[0], engines[1]),
                    (readers[0], readers[1]),
                    text,
                    windows,
                    options.concurrency,
                    bar,
                )
        facts = tuple([engine.dump()["model"] for engine in engines])
    reference = scores[1] if len(scores) > 1 else None
    return Measured(text, context, stride, windows, scores[0], reference, divergence, facts)


def _engine_sizes(model: str, read_as: str | None, options: Options) -> dict[str, Any]:
    """Return options of `Engine` that give it room for the windows and no more.

    Another engine may run beside it.
    """
    context = options.context
    if context is None:
        context = min(
            CONTEXT, read_model(local_model(model), read_as=read_as).max_position_embeddings - 1
        )
    return {
        "max_num_seqs": options.concurrency,
        "max_model_len": context + 1,
        "page_size": PAGE_SIZE,
    }


@contextmanager
def _blaming_context(context: int | None) -> Iterator[None]:
    """Rephrase an engine's error about `max_model_len` as one about the context."""
    try:
        yield
    except ConfigError as error:
        if context is None or not str(error).startswith("max_model_len "):
            raise
        raise ConfigError(
            f"context={context} takes a max_model_len of {context + 1}: {error}",
            argument="context",
            value=context,
            limit=error.limit,
        ) from error


def _windows(
    options: Options, engines: list[Engine], text: EvaluatedText
) -> tuple[int, int | None, list[Window]]:
    """Return context, stride and windows. Raises `ConfigError` if no window is possible."""
    most = min([engine.limits.max_model_len - 1 for engine in engines])
    context = options.context or min(CONTEXT, most)
    num_before, num_tokens = len(text.before), len(text.token_ids)
    size = context - num_before
    if size < LEAST_CONTEXT:
        raise ConfigError(
            f"context must be at least {LEAST_CONTEXT + num_before}, got {context}",
            argument="context",
            value=context,
            limit=LEAST_CONTEXT + num_before,
        )
    if options.second_halves:
        windows = [one for one in second_halves(num_tokens, context, num_before) if one.num_scored]
        if not windows:
            raise ConfigError(
                f"text must have at least {size} tokens for a whole chunk of {context}, "
                f"got {counted(num_tokens, 'token')}",
                argument="text",
                value=num_tokens,
                limit=size,
            )
        return context, None, windows
    stride = options.stride or max(1, context // 2)
    largest = size - 1 + min(1, num_before)
    if stride > largest:
        raise ConfigError(
            f"stride must be at most {largest} with a context of {context}, so that each token has "
            f"context, got {stride}",
            argument="stride",
            value=stride,
            limit=largest,
        )
    return context, stride, sliding_windows(num_tokens, size, stride, num_before)
