"""Measure how often pyhelp says what a draft says next, on texts that no draft learned from.

Usage: python tools/pyhelp/acceptance.py MODEL_DIR SPEECH_DIR --draft DRAFT_DIR --eagle HEAD_DIR

A draft token is right if it is the token that pyhelp draws itself, by its own noise. At temperature
1 it compares three drafts: the draft's likeliest token, a draw with noise of the draft's own, and
one with pyhelp's noise. In the last a race of exponentials draws both tokens.

Daliri, Musco, Suresh: "Coupling without communication and drafter-invariant speculative decoding",
2024.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from eagle import Head
from rows import Rows, Spoken
from safetensors.torch import load_file
from speech import computed
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

MOST_DRAFTS = 8
SPLITS = ("seen", "unseen", "code")
WAYS = ("greedy", "likeliest", "own noise", "same noise")
"""Ways of drafting. The first is with pyhelp at temperature 0, the others at 1."""
SAMPLES = 2
"""Number of draws of a draft for each text at temperature 1."""

Predict = Callable[[Tensor, Tensor], Tensor]
"""Function of ids [tokens] and the heads' input [tokens, 3 * hidden] to probabilities.

These are [drafts, tokens, vocab]. Number d at t is of the token t + 2 + d, which follows d right
draft tokens after token t + 1.
"""


@dataclass
class Counts:
    """Draft tokens by the number of right ones before them, and tokens by the number of drafts."""

    tried: Tensor
    right: Tensor
    steps: Tensor
    tokens: Tensor

    @classmethod
    def none(cls) -> Counts:
        """Start."""
        return cls(*(torch.zeros(MOST_DRAFTS) for _ in range(4)))

    def add(self, hits: Tensor, chosen: Tensor) -> None:
        """Count one text.

        ``hits`` [drafts, tokens] mark the right draft tokens, and ``chosen`` [tokens] the tokens
        that pyhelp chose.
        """
        places = torch.nonzero(chosen).flatten().tolist()
        begins = [at for at in places if at - 1 not in places]
        for begin in begins:
            end = begin
            while end in places:
                end += 1
            self._add_run(hits, begin, end)

    def _add_run(self, hits: Tensor, begin: int, end: int) -> None:
        """Count an answer of tokens ``begin`` to ``end``; the first is drawn without a draft."""
        for drafts in range(1, MOST_DRAFTS + 1):
            at = begin
            while at < end - 1:  # token at is known, and later ones are drafted
                count = min(drafts, end - 1 - at)
                accepted = 0
                while accepted < count and hits[accepted, at - 1]:
                    accepted += 1
                if drafts == MOST_DRAFTS:
                    self.tried[: min(accepted + 1, count)] += 1
                    self.right[:accepted] += 1
                gained = min(accepted + 1, end - 1 - at)
                self.steps[drafts - 1] += 1
                self.tokens[drafts - 1] += gained
                at += gained

    def summary(self) -> dict[str, list[float]]:
        """Return the share of right draft tokens by position, and tokens a step by number of
        drafts.
        """
        accepted = (self.right / self.tried.clamp_min(1)).tolist()
        tokens = (self.tokens / self.steps.clamp_min(1)).tolist()
        return {
            "accepted": [round(one, 3) for one in accepted],
            "tokens_per_step": [round(one, 2) for one in tokens],
        }


def of_model(draft: Qwen3ForCausalLM) -> Predict:
    """Return the drafts of a model, which knows all tokens before and nothing else."""

    def predict(ids: Tensor, _: Tensor) -> Tensor:
        probabilities = draft(input_ids=ids[None], use_cache=False).logits[0].softmax(-1)
        shifted = [
            functional.pad(probabilities[1 + d :], (0, 0, 0, 1 + d)) for d in range(MOST_DRAFTS)
        ]
        return torch.stack(shifted)

    return predict


def of_head(head: Head, embedding: Tensor) -> Predict:
    """Return the drafts of a head."""

    def predict(ids: Tensor, features: Tensor) -> Tensor:
        empty = torch.empty(1, len(ids), 0)
        rows = Rows(ids[None], empty.bool(), features[None], empty, empty.long())
        found = head(rows, embedding, MOST_DRAFTS)
        probabilities = [functional.linear(one[0], embedding).softmax(-1) for one in found]
        return torch.stack([functional.pad(one, (0, 0, 0, 1)) for one in probabilities])

    return predict


def read_head(directory: Path) -> Head:
    """Return a head that ``eagle.py`` wrote."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    layer = config["transformer_layer_config"]
    sizes = (layer[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    head = Head(*sizes)
    tensors = load_file(directory / "model.safetensors")
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head


@torch.inference_mode()
def measure(
    target: Qwen3ForCausalLM, drafts: dict[str, Predict], spoken: Spoken, most_texts: int
) -> dict[str, dict[str, Counts]]:
    """Count for each draft and each way, over greedy texts, and over texts drawn at 1."""
    found = {name: {way: Counts.none() for way in WAYS} for name in drafts}
    for greedy in (True, False):
        texts = [i for i, one in enumerate(spoken.greedy) if one is greedy][:most_texts]
        for index in texts:
            rows = spoken.rows([index], features=False)
            ids, chosen = rows.ids[0], rows.chosen[0]
            features, probabilities = computed(target, ids.tolist())
            for name, predict in drafts.items():
                predicted = predict(ids, features)
                ahead = [functional.pad(ids[2 + d :], (0, 2 + d)) for d in range(MOST_DRAFTS)]
                hits = predicted.argmax(-1) == torch.stack(ahead)
                found[name]["greedy" if greedy else "likeliest"].add(hits, chosen)
                if greedy:
                    continue
                for way in ("own noise", "same noise"):
                    for sample in range(SAMPLES):
                        hits = drawn_alike(
                            ids, probabilities, predicted, sample, way == "same noise"
                        )
                        found[name][way].add(hits, chosen)
    return found


def drawn_alike(
    ids: Tensor, probabilities: Tensor, predicted: Tensor, seed: int, same_noise: bool
) -> Tensor:
    """Return which draft tokens [drafts, tokens] are the text's, if the draft draws its own.

    The noise with which pyhelp drew token i is drawn given that it drew it. In a race of
    exponentials E / p the winner's time is Exp(1). The others' E are p times a later time.
    """
    generator = torch.Generator().manual_seed(seed)
    behind = torch.zeros_like(probabilities)
    behind[1:] = probabilities[:-1]
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    if same_noise:
        first = torch.empty(len(ids), 1).exponential_(generator=generator)
        noise = behind * first + noise
        at = ids[:, None]
        noise.scatter_(1, at, behind.gather(1, at) * first)
    hits = torch.zeros(MOST_DRAFTS, len(ids), dtype=torch.bool)
    for draft in range(MOST_DRAFTS):
        ahead = draft + 2
        count = len(ids) - ahead
        if count <= 0:
            break
        race = noise[ahead:] / predicted[draft, :count].clamp_min(1e-30)
        hits[draft, :count] = race.argmin(-1) == ids[ahead:]
    return hits


def report(name: str, split: str, counts: dict[str, Counts]) -> None:
    """Print the numbers of one draft over one split."""
    for way, one in counts.items():
        if one.steps.sum():
            print(json.dumps({"draft": name, "texts": split, "way": way} | one.summary()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="pyhelp's directory")
    parser.add_argument("speech", type=Path, help="the folder that speech.py wrote")
    parser.add_argument("--draft", type=Path, help="the directory of a small model")
    parser.add_argument("--eagle", type=Path, help="the directory of a head")
    parser.add_argument("--texts", type=int, default=60, help="texts of each kind")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    target = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    drafts: dict[str, Predict] = {}
    if options.draft:
        small = Qwen3ForCausalLM.from_pretrained(options.draft, dtype=torch.float32).eval()
        drafts["model"] = of_model(small)
    if options.eagle:
        embedding = target.model.embed_tokens.weight.detach()
        drafts["eagle"] = of_head(read_head(options.eagle), embedding)
    for split in SPLITS:
        spoken = Spoken(options.speech / f"{split}.npz")
        for name, counts in measure(target, drafts, spoken, options.texts).items():
            report(name, split, counts)


if __name__ == "__main__":
    main()
