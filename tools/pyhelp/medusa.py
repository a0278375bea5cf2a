"""Train Medusa heads for pyhelp, and count the gain of branches beside their chain of drafts.

Usage: python tools/pyhelp/medusa.py MODEL_DIR SPEECH_DIR WORK_DIR --minutes 5

Each head drafts one token from pyhelp's last hidden state, by pyhelp's output layer. None knows the
draft of another, so a chain of them is soon wrong, and their second choices make up a tree. A
branch is counted as an engine without a mask of ancestors computes it. It is one more sequence,
from the last known token on, and each of its tokens takes a row.

The best branches for a number of rows are found on answers that the heads learned from, and counted
on others.

Cai et al.: "Medusa: Simple LLM inference acceleration framework with multiple decoding heads",
2024.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time

import numpy as np
import torch
from rows import Rows, Spoken, divergence
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from train import learning_rate
from transformers import Qwen3ForCausalLM

RANKS = 3
"""Number of a head's first choices that branches are made of."""
ROWS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
Ranks = tuple[int, ...]
"""Path of drafts: for each head in turn, the rank of its choice."""


class Heads(nn.Module):
    """Heads of one block each, whose tensors have the names that they have in files."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        blocks = [nn.Linear(hidden, hidden) for _ in range(count)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor, output: Tensor) -> list[Tensor]:
        """Return logits [n, vocab] of each head for hidden states [n, hidden]."""
        return [self.logits(number, hidden, output) for number in range(len(self.blocks))]

    def logits(self, number: int, hidden: Tensor, output: Tensor) -> Tensor:
        """Return logits [n, vocab] of one head."""
        return functional.linear(hidden + functional.silu(self.blocks[number](hidden)), output)


@torch.no_grad()
def states(model: Qwen3ForCausalLM, rows: Rows) -> Tensor:
    """Return the input of pyhelp's output layer, [rows, width, hidden]."""
    return model.model(input_ids=rows.ids, use_cache=False).last_hidden_state


def train(model: Qwen3ForCausalLM, options: argparse.Namespace) -> Heads:
    """Train until the time is over."""
    torch.manual_seed(options.seed)
    heads = Heads(model.config.hidden_size, options.heads)
    output = model.lm_head.weight.detach()
    optimizer = torch.optim.AdamW(heads.parameters(), lr=options.rate, weight_decay=0.0)
    batches = Spoken(options.speech / "train.npz").batches(
        options.tokens, options.seed, features=False
    )
    began, step = process_time(), 0
    while (progress := (process_time() - began) / (60 * options.minutes)) < 1:
        rows = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, options.rate)
        total, each = torch.zeros(()), []
        hidden = states(model, rows)
        for number in range(options.heads):
            # The head at token t drafts token t + 2 + number, which pyhelp drew after the others.
            ahead = number + 1
            wanted = rows.chosen[:, 1:] & functional.pad(rows.chosen[:, 1 + ahead :], (0, ahead))
            texts, at = wanted.nonzero(as_tuple=True)
            own = heads.logits(number, hidden[texts, at], output)
            loss = divergence(own, rows.shares[texts, at + ahead], rows.tops[texts, at + ahead])
            total = total + loss
            each.append(loss.item())
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 25 == 0:
            shown = " ".join(f"{one:.3f}" for one in each)
            print(f"step {step} done {progress:.3f} divergence {shown}", flush=True)
    return heads


def save(heads: Heads, model: Qwen3ForCausalLM, out: Path) -> None:
    """Write config.json and model.safetensors as Medusa's own library does."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for number, block in enumerate(heads.blocks):
        for name, value in block.state_dict().items():
            tensors[f"{number}.0.linear.{name}"] = value.to(torch.bfloat16)
        tensors[f"{number}.1.weight"] = model.lm_head.weight.detach().to(torch.bfloat16).clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "medusa",
        "medusa_num_heads": len(heads.blocks),
        "medusa_num_layers": 1,
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def order(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Return the first tokens of a race of exponentials, [n, RANKS].

    It has the same noise [n, vocab] for pyhelp and a head. With a temperature of 0 tokens are
    ordered by their logits [n, vocab].
    """
    if temperature == 0:
        return logits.topk(RANKS).indices
    times = noise.log() - logits.float() / temperature
    return times.topk(RANKS, largest=False).indices


@torch.no_grad()
def answers(
    model: Qwen3ForCausalLM, heads: Heads, spoken: Spoken, temperature: float, count: int
) -> Iterator[np.ndarray]:
    """Yield, for each of `count` texts, the ranks of pyhelp's tokens among a head's choices.

    Ranks are [starts, heads], and RANKS if the token is not among them. After an answer there is no
    token.
    """
    output = model.lm_head.weight
    for index in range(min(count, len(spoken.lengths))):
        rows = spoken.rows([index], features=False)
        length = spoken.lengths[index]
        first = int(rows.chosen[0].nonzero()[0]) if rows.chosen[0].any() else length
        if first + 2 >= length:
            continue
        random = torch.Generator().manual_seed(index)
        size = (length + heads_of(heads) + 1, model.config.vocab_size)
        noise = torch.empty(size).exponential_(generator=random)
        ids = rows.ids[:, :first]
        found = model.model(input_ids=ids, use_cache=True)
        hidden, cache = [found.last_hidden_state[0, -1:]], found.past_key_values
        drawn: list[int] = []
        while len(drawn) < length - first:
            logits = functional.linear(hidden[-1], output)
            place = first + len(drawn)
            drawn.append(int(order(logits, noise[place : place + 1], temperature)[0, 0]))
            if drawn[-1] == model.config.eos_token_id:
                break
            found = model.model(
                input_ids=torch.tensor([drawn[-1:]]), past_key_values=cache, use_cache=True
            )
            hidden.append(found.last_hidden_state[0])
        if len(drawn) < 3:
            continue
        # State i drew token i; head h drafts token i + 1 + h from it.
        read = torch.cat(hidden)[: len(drawn) - 1]
        ranks = np.full((len(read), heads_of(heads)), RANKS)
        for number, logits in enumerate(heads(read, output)):
            ranked = order(logits, noise[first + 1 + number :][: len(read)], temperature).numpy()
            for start in range(len(read) - number):
                at = np.flatnonzero(ranked[start] == drawn[start + 1 + number])
                if len(at):
                    ranks[start, number] = at[0]
        yield ranks


def heads_of(heads: Heads) -> int:
    """Return the number of heads."""
    return len(heads.blocks)


def kept(ranks: np.ndarray, path: Ranks) -> np.ndarray:
    """Return how many tokens of a path are right, from each start of `ranks` [starts, heads]."""
    right = ranks[:, : len(path)] == np.array(path)
    return np.cumprod(right, axis=1).sum(1)


def tokens_per_step(texts: Sequence[np.ndarray], paths: Sequence[Ranks]) -> float:
    """Return the mean number of tokens that a step brings: one drawn, and those kept before it."""
    tokens = steps = 0
    for ranks in texts:
        best = np.max([kept(ranks, path) for path in paths], axis=0)
        at = 0
        while at < len(ranks):
            gained = min(1 + int(best[at]), len(ranks) - at)
            tokens, steps, at = tokens + gained, steps + 1, at + gained
    return tokens / steps


def chosen_paths(texts: Sequence[np.ndarray], rows: int, branches: int) -> list[Ranks]:
    """Return the chain and branches, of at most `rows` rows, which bring most tokens.

    There are at most `branches` branches.
    """
    heads = texts[0].shape[1]
    candidates = [
        path
        for depth in range(1, heads + 1)
        for path in itertools.product(range(RANKS), repeat=depth)
        if any(path) and sum(rank > 0 for rank in path) == 1
    ]
    best: tuple[float, list[Ranks]] = (0.0, [])
    for depth in range(1, min(heads, rows - 1) + 1):
        paths: list[Ranks] = [(0,) * depth]
        left, mean = rows - 1 - depth, tokens_per_step(texts, [(0,) * depth])
        while len(paths) <= branches:
            fit = [path for path in candidates if len(path) + 1 <= left and path not in paths]
            gains = [
                (tokens_per_step(texts, [*paths, path]) - mean) / (len(path) + 1) for path in fit
            ]
            if not gains or max(gains) <= 0:
                break
            path = fit[int(np.argmax(gains))]
            mean += max(gains) * (len(path) + 1)
            left -= len(path) + 1
            paths.append(path)
        best = max(best, (mean, paths))
    return best[1]


def compare(model: Qwen3ForCausalLM, heads: Heads, options: argparse.Namespace) -> None:
    """Print tokens a step by rows, of chains and of chains with branches."""
    for temperature in (0.0, 1.0):
        learned, others = (
            list(answers(model, heads, Spoken(options.speech / name), temperature, options.texts))
            for name in ("train.npz", "unseen.npz")
        )
        every = np.concatenate(others)
        shares = [
            [f"{np.mean(every[:, h] == r):.2f}" for r in range(RANKS)]
            for h in range(every.shape[1])
        ]
        print(f"temperature {temperature:g}: {len(others)} answers, heads right by rank {shares}")
        for rows in ROWS:
            chain = tokens_per_step(others, chosen_paths(learned, rows, 0))
            paths = chosen_paths(learned, rows, 8)
            tree = tokens_per_step(others, paths)
            print(f"{rows:3} rows  chain {chain:.3f}  branches {tree:.3f}  {paths}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="pyhelp's directory")
    parser.add_argument("speech", type=Path, help="the folder that speech.py wrote")
    parser.add_argument("work", type=Path, help="the folder to write the heads to")
    parser.add_argument("--minutes", type=float, default=5.0, help="the budget of processor time")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="the peak rate of AdamW")
    parser.add_argument("--texts", type=int, default=100, help="answers of each kind to count on")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    heads = train(model, options)
    save(heads, model, options.work)
    compare(model, heads, options)


if __name__ == "__main__":
    main()
