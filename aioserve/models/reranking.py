"""Relevance of a document to a query, scored by one number of a model's last hidden state.

    query, document ──► prompt ──► hidden state of its last token · weight ──► sigmoid

A classifier has this weight (`score.weight`). For a model that answers "yes" or "no", it is the
difference of both tokens' rows in the head. The score is then the probability of "yes" among the
two. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aioserve.arguments import shown
from aioserve.errors import UnsupportedModelError, WeightsError
from aioserve.models.checkpoint import read_rows
from aioserve.models.config import CLASSIFIER, DecoderConfig
from aioserve.models.stored import Floats
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.tokenizer import Tokenizer

__all__ = ["Reranker", "read_reranker"]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {{ messages[0].content }}\n<Query>: {{ messages[1].content }}\n"
    "<Document>: {{ messages[2].content }}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>{{ '\\n\\n' }}"
)
"""Prompt that Qwen3-Reranker was trained with: an instruction, a query and a document."""
LABELS = ("no", "yes")
_QWEN3 = re.compile(r"Qwen3For\w+")


class Reranker(msgspec.Struct, frozen=True):
    weight: Floats
    """Weight of the score, float32 `[hidden]`."""
    template: ChatTemplate
    """Template of the prompt, from messages of the roles system, query and document.

    The system message may be absent if `instruction` is None."""
    instruction: str | None
    """Default instruction of a request, or None."""

    def scores(self, states: Floats) -> Floats:
        """Compute relevance in [0, 1], float32 `[N]`, from hidden states `[N, hidden]`.

        Each row's score is independent of the other rows, as a matrix product doesn't guarantee."""
        logits = (states.astype(np.float64) * self.weight).sum(axis=1)
        return (0.5 * (1.0 + np.tanh(0.5 * logits))).astype(np.float32)  # no overflow

    def messages(self, query: str, document: str, instruction: str | None) -> list[dict[str, str]]:
        """Return the messages for `template`."""
        said = self.instruction if instruction is None else instruction
        messages = [] if said is None else [{"role": "system", "content": said}]
        pair = (("query", query), ("document", document))
        return messages + [{"role": role, "content": text} for role, text in pair]


def read_reranker(
    directory: Path,
    config: DecoderConfig,
    values: Any,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    wanted: str,
) -> Reranker | None:
    """Read the reranker of a model; None if it isn't one.

    - values: contents of config.json.
    - wanted: "qwen3" for a model with Qwen3-Reranker's prompt, which answers "yes" or "no" unless
      it is a classifier; "auto" to follow the files; or "none".

    Raises `UnsupportedModelError` and `WeightsError`."""
    labels = values.get("classifier_from_token")
    if wanted == "none" or (wanted == "auto" and config.num_labels is None and labels is None):
        return None
    source = f"{directory / 'config.json'}"
    if config.num_labels is not None:
        weight = _classifier(directory, config, source)
    else:
        weight = _of_labels(directory, config, tokenizer, LABELS if labels is None else labels)
    if not np.isfinite(weight).all():
        raise WeightsError(f"{directory}: a weight that scores documents isn't finite")
    if template is not None and template.has_role("query") and template.has_role("document"):
        return Reranker(weight, template, None)
    if wanted != "qwen3" and not _QWEN3.fullmatch(config.architecture):
        raise UnsupportedModelError(
            f"{source}: nothing tells how {config.architecture} is asked for the relevance of a "
            "document to a query. Give a chat_template that reads messages of the roles 'query' "
            "and 'document', or reranker=\"none\" for a model that embeds"
        )
    return Reranker(weight, ChatTemplate(QWEN3, origin="qwen3"), INSTRUCTION)


def _classifier(directory: Path, config: DecoderConfig, source: str) -> Floats:
    if config.num_labels != 1:
        raise UnsupportedModelError(
            f"{source}: num_labels = {config.num_labels} is not supported: a reranker has one. "
            'With reranker="none" the model embeds'
        )
    (weight,) = read_rows(directory, config, CLASSIFIER, [0], (1, config.hidden_size))
    return weight


def _of_labels(
    directory: Path, config: DecoderConfig, tokenizer: Tokenizer, labels: Sequence[Any]
) -> Floats:
    """Row of the second label in the head, minus the row of the first."""
    if not isinstance(labels, list | tuple):
        raise UnsupportedModelError(
            f"{directory}: classifier_from_token must be a list of two answers, for no and yes, "
            f"got {shown(labels)}"
        )
    ids = [
        tokenizer.encode(label, add_special_tokens=False) if isinstance(label, str) else []
        for label in labels
    ]
    if len(ids) != 2 or any(len(one) != 1 for one in ids) or ids[0] == ids[1]:
        raise UnsupportedModelError(
            f"{directory}: a reranker has two different answers of one token each, for no "
            f"and yes, got {shown(list(labels))}"
        )
    if not config.has_head:
        raise UnsupportedModelError(f"{directory}: a reranker by tokens has an output layer")
    if config.final_soft_cap:
        raise UnsupportedModelError(
            f"{directory}: final_soft_cap = {config.final_soft_cap} is not supported in a reranker"
        )
    head = config.embedding if config.tie_word_embeddings else config.head
    no, yes = read_rows(directory, config, head.name, [one[0] for one in ids], head.shape)
    return (yes - no) * np.float32(config.logit_scale)
