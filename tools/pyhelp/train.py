"""Train pyhelp for a fixed wall-clock time and export it as a model directory.

Usage: python tools/pyhelp/train.py CORPUS_DIR WORK_DIR --minutes 72
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import CODE_ROW, Batch, ChatBatches, CodeBatches
from corpus import TURN_END, token_id
from evaluate import exact_share, held_out_loss
from export import ROPE_THETA, export_model
from facts import Fact
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

WARM_UP = 0.02
CONSTANT_UNTIL = 0.45
LAST_RATE = 0.01

Body = Callable[..., Any]
"""Layers below the output layer, compiled or not."""


def new_model(vocab_size: int, end_ids: list[int]) -> Qwen3ForCausalLM:
    """Return an untrained model."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.03,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=end_ids[0],
        pad_token_id=end_ids[-1],
        use_cache=False,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return Qwen3ForCausalLM(config)


def learning_rate(progress: float, peak: float) -> float:
    """Return the learning rate when ``progress`` (0 to 1) of the time is over."""
    if progress < WARM_UP:
        return peak * max(progress / WARM_UP, 0.02)
    if progress < CONSTANT_UNTIL:
        return peak
    left = min((progress - CONSTANT_UNTIL) / (1 - CONSTANT_UNTIL), 1.0)
    return peak * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * left)))


def batch_loss(model: Qwen3ForCausalLM, body: Body, batch: Batch) -> torch.Tensor:
    """Return the weighted mean loss of a batch; positions of weight 0 cost no output layer."""
    inputs, targets, weights = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = body(input_ids=inputs, use_cache=False).last_hidden_state
        chosen = weights.flatten() > 0
        if bool(chosen.all()):
            logits = model.lm_head(hidden).flatten(0, 1)
        else:
            logits = model.lm_head(hidden.flatten(0, 1)[chosen])
    losses = functional.cross_entropy(logits.float(), targets.flatten()[chosen], reduction="none")
    scale = weights.flatten()[chosen]
    return (losses * scale).sum() / scale.sum()


class Optimizers:
    """Muon for all matrices but the embedding, AdamW for that and for the norms."""

    def __init__(self, model: torch.nn.Module, muon: bool) -> None:
        named = list(model.named_parameters())
        layers = [p for name, p in named if p.dim() == 2 and "embed_tokens" not in name]
        vectors = [p for _, p in named if p.dim() <= 1]
        embedding = [p for name, p in named if "embed_tokens" in name]
        groups = [
            {"params": embedding + ([] if muon else layers), "weight_decay": 0.05},
            {"params": vectors, "weight_decay": 0.0},
        ]
        adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.97), eps=1e-9, fused=True)
        self.parts: list[torch.optim.Optimizer] = [adam]
        if muon:
            self.parts.append(
                torch.optim.Muon(
                    layers, lr=1e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=4
                )
            )

    def step(self, rates: list[float]) -> None:
        """Take a step with the given learning rates and drop the gradients."""
        for part, rate in zip(self.parts, rates, strict=False):
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of every part."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take over what ``state_dict`` returned."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


class Training:
    """One training run: its state, its clock and its checkpoints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        corpus: Path = options.corpus
        names = json.loads((corpus / "facts.json").read_text(encoding="utf-8"))
        self.facts = [Fact(name, answer) for name, answer in names]
        self.questions = json.loads((corpus / "questions.json").read_text(encoding="utf-8"))
        self.code = CodeBatches(corpus, options.seed)
        self.chat = ChatBatches(corpus, self.facts, options.seed)
        tokenizer = self.chat.tokenizer
        end_ids = [token_id(tokenizer, TURN_END), self.chat.pad]
        self.model = new_model(tokenizer.get_vocab_size(), end_ids)
        self.optimizer = Optimizers(self.model, muon=options.muon_rate > 0)
        self.counts = {"steps": 0, "code_tokens": 0, "chat_tokens": 0, "facts_seen": 0}
        self.seconds_before = 0.0
        if options.resume:
            state = torch.load(options.resume, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.counts = state["counts"]
            self.seconds_before = state["seconds"]
            self.chat.random.seed(options.seed + self.counts["steps"])
            self.code.random = np.random.default_rng(options.seed + self.counts["steps"])
        self.body: Body = self.model.model.forward
        if options.compile:
            self.body = torch.compile(self.body, dynamic=True)
            for batch in (self.code.batch(2), self.chat.batch(options.chat_tokens)):
                batch_loss(self.model, self.body, batch).backward()
            self.model.zero_grad(set_to_none=True)
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including earlier runs."""
        return self.seconds_before + time.monotonic() - self.began

    @property
    def progress(self) -> float:
        """Share of the time that is over; a restarted clock counts this run alone."""
        spent = self.seconds - (self.seconds_before if self.options.restart_clock else 0.0)
        return spent / (self.options.minutes * 60)

    def step(self) -> tuple[float, float]:
        """Take one optimizer step on a code batch and a chat batch and return both losses."""
        losses = [0.0, 0.0]
        if self.options.code_rows:
            batch = self.code.batch(self.options.code_rows)
            loss = batch_loss(self.model, self.body, batch)
            loss.backward()
            losses[0] = loss.item()
            self.counts["code_tokens"] += batch[0].numel()
        if self.options.chat_tokens:
            seen = self.chat.facts_seen
            batch = self.chat.batch(self.options.chat_tokens)
            loss = batch_loss(self.model, self.body, batch)
            loss.backward()
            losses[1] = loss.item()
            self.counts["chat_tokens"] += batch[0].numel()
            self.counts["facts_seen"] += self.chat.facts_seen - seen
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        peaks = (self.options.rate, self.options.muon_rate)
        self.optimizer.step([learning_rate(self.progress, peak) for peak in peaks])
        self.counts["steps"] += 1
        return losses[0], losses[1]

    def report(self, sample: int) -> dict[str, float]:
        """Measure the held-out loss and the exact share over the first ``sample`` questions."""
        self.model.eval()
        loss = held_out_loss(self.model, self.options.corpus, rows=24 if sample < 300 else None)
        exact, _ = exact_share(self.model, self.chat.tokenizer, self.questions[:sample])
        self.model.train()
        numbers = {"held_out": round(loss, 4), "exact": exact, "asked": sample}
        numbers |= {"minutes": round(self.seconds / 60, 1), **self.counts}
        print("report", json.dumps(numbers), flush=True)
        return numbers

    def save(self, numbers: dict[str, float]) -> None:
        """Write the checkpoint and export the model directory, each in one move."""
        work: Path = self.options.work
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counts": self.counts,
            "seconds": self.seconds,
        }
        torch.save(state, work / "checkpoint.new")
        (work / "checkpoint.new").replace(work / "checkpoint.pt")
        export_model(self.model, self.options.corpus, work / "export", numbers)

    def run(self) -> None:
        """Train until the time is over."""
        torch.manual_seed(self.options.seed)
        options = self.options
        next_save = self.seconds + min(options.save_every, 3.0) * 60
        means = [0.0, 0.0]
        logged, window = self.seconds, 0
        logged_tokens = self.counts["code_tokens"] + self.counts["chat_tokens"]
        while self.progress < 1.0:
            for index, loss in enumerate(self.step()):
                means[index] += loss
            window += 1
            if window == options.log_every:
                tokens = self.counts["code_tokens"] + self.counts["chat_tokens"]
                speed = (tokens - logged_tokens) / (self.seconds - logged)
                shown = " ".join(f"{total / window:.3f}" for total in means)
                print(
                    f"step {self.counts['steps']} done {self.progress:.3f} loss {shown} "
                    f"tokens {tokens} speed {speed:.0f}/s facts {self.counts['facts_seen']}",
                    flush=True,
                )
                means, window = [0.0, 0.0], 0
                logged, logged_tokens = self.seconds, tokens
            if self.seconds >= next_save and self.progress < 1.0:
                self.save(self.report(sample=60))
                next_save = self.seconds + options.save_every * 60
        self.save(self.report(sample=300))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="the folder that corpus.py wrote")
    parser.add_argument("work", type=Path, help="the folder for checkpoints and the export")
    parser.add_argument("--minutes", type=float, default=72.0, help="the wall-clock budget")
    parser.add_argument("--rate", type=float, default=3e-3, help="the peak rate of AdamW")
    parser.add_argument("--muon-rate", type=float, default=8e-3, help="0: AdamW for everything")
    parser.add_argument("--code-rows", type=int, default=6, help=f"rows of {CODE_ROW} a step")
    parser.add_argument("--chat-tokens", type=int, default=768, help="chat tokens a step")
    parser.add_argument("--compile", action="store_true", help="compile the layers, for speed")
    parser.add_argument("--save-every", type=float, default=5.0, help="minutes")
    parser.add_argument("--log-every", type=int, default=25, help="steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--restart-clock", action="store_true", help="with --resume: new schedule")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    Training(options).run()


if __name__ == "__main__":
    main()
