"""Train a small Llama on the text that pyhelp learned from: a draft of another family.

Usage: python tools/pyhelp/other_family.py CORPUS_DIR WORK_DIR --minutes 6

It has pyhelp's tokens and the size of pyhelp's draft, and never sees pyhelp's answers. So it stands
for a model of others that happens to have the same vocabulary.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from batches import ChatBatches, CodeBatches
from corpus import END_OF_TEXT, TURN_END, token_id
from facts import Fact
from tokenizers import Tokenizer
from train import Optimizers, batch_loss, learning_rate
from transformers import LlamaConfig, LlamaForCausalLM

CODE_ROWS = 4
CHAT_TOKENS = 1536
"""Tokens of chats in a step, as many as of code."""


def new_llama(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Return an untrained Llama of three layers of width 64, with attention of two heads."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, TURN_END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
    )
    return LlamaForCausalLM(config)


def train(options: argparse.Namespace) -> None:
    """Train until the time is over, and write the model directory."""
    torch.manual_seed(options.seed)
    names = json.loads((options.corpus / "facts.json").read_text(encoding="utf-8"))
    code = CodeBatches(options.corpus, options.seed)
    facts = [Fact(name, answer) for name, answer in names]
    chats = ChatBatches(options.corpus, facts, options.seed)
    model: Any = new_llama(chats.tokenizer)  # its losses are computed as pyhelp's
    optimizer = Optimizers(model, muon=True)
    began, steps, means = time.process_time(), 0, [0.0, 0.0]
    while (progress := (time.process_time() - began) / (60 * options.minutes)) < 1:
        for index, batch in enumerate((code.batch(CODE_ROWS), chats.batch(CHAT_TOKENS))):
            loss = batch_loss(model, model.model.forward, batch)
            loss.backward()
            means[index] += (loss.item() - means[index]) / min(steps + 1, 50)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        peaks = (options.rate, options.muon_rate)
        optimizer.step([learning_rate(progress, peak) for peak in peaks])
        steps += 1
        if steps % 50 == 0:
            print(f"step {steps} done {progress:.3f} code {means[0]:.3f} chats {means[1]:.3f}")
    model.to(torch.bfloat16).save_pretrained(options.work)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="the folder that corpus.py wrote")
    parser.add_argument("work", type=Path, help="the model directory to write")
    parser.add_argument("--minutes", type=float, default=6.0, help="the budget of processor time")
    parser.add_argument("--rate", type=float, default=5e-3, help="the peak rate of AdamW")
    parser.add_argument("--muon-rate", type=float, default=1e-2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options)


if __name__ == "__main__":
    main()
