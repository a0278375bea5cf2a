"""Train the small model that drafts for pyhelp, on pyhelp's own texts.

Usage: python tools/pyhelp/draft.py MODEL_DIR CORPUS_DIR SPEECH_DIR WORK_DIR --minutes 10

It has pyhelp's tokens and learns pyhelp's distribution of the next one, by the divergence between
the two at temperature 1.

Hinton et al.: "Distilling the knowledge in a neural network", 2015.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from export import ROPE_THETA, export_model
from rows import Rows, Spoken, divergence
from train import Optimizers, learning_rate
from transformers import Qwen3Config, Qwen3ForCausalLM


def new_draft(target: Qwen3ForCausalLM, options: argparse.Namespace) -> Qwen3ForCausalLM:
    """Return an untrained draft with the tokens of ``target``."""
    config = Qwen3Config(
        vocab_size=target.config.vocab_size,
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 32,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=target.config.max_position_embeddings,
        tie_word_embeddings=True,
        initializer_range=0.05,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=target.config.eos_token_id,
        pad_token_id=target.config.pad_token_id,
        use_cache=False,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return Qwen3ForCausalLM(config)


def loss_of(draft: Qwen3ForCausalLM, rows: Rows) -> torch.Tensor:
    """Return the divergence over the tokens that pyhelp chose."""
    wanted = rows.chosen[:, 1:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = draft.model(input_ids=rows.ids[:, :-1], use_cache=False).last_hidden_state
        logits = draft.lm_head(hidden[wanted])
    return divergence(logits, rows.shares[:, :-1][wanted], rows.tops[:, :-1][wanted])


def train(options: argparse.Namespace) -> None:
    """Train until the time is over, and write the model directory."""
    torch.manual_seed(options.seed)
    target = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    draft = new_draft(target, options)
    optimizer = Optimizers(draft, muon=True)
    batches = Spoken(options.speech / "train.npz").batches(
        options.tokens, options.seed, features=False
    )
    began, steps, mean, seen = time.process_time(), 0, 0.0, 0
    while (progress := (time.process_time() - began) / (60 * options.minutes)) < 1:
        rows = next(batches)
        loss = loss_of(draft, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        peaks = (options.rate, options.muon_rate)
        optimizer.step([learning_rate(progress, peak) for peak in peaks])
        steps, seen = steps + 1, seen + int(rows.chosen.sum())
        mean += (loss.item() - mean) / min(steps, 50)
        if steps % 50 == 0:
            print(f"step {steps} done {progress:.3f} divergence {mean:.3f} seen {seen}", flush=True)
    numbers = {"minutes": options.minutes, "steps": steps, "tokens": seen, "divergence": mean}
    export_model(draft, options.corpus, options.work, numbers, copied=())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="pyhelp's directory")
    parser.add_argument("corpus", type=Path, help="the folder that corpus.py wrote")
    parser.add_argument("speech", type=Path, help="the folder that speech.py wrote")
    parser.add_argument("work", type=Path, help="the model directory to write")
    parser.add_argument("--minutes", type=float, default=10.0, help="the budget of processor time")
    parser.add_argument("--width", type=int, default=64, help="a multiple of 32")
    parser.add_argument("--inner", type=int, default=256, help="width of the MLPs")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=3072, help="tokens a step")
    parser.add_argument("--rate", type=float, default=5e-3, help="the peak rate of AdamW")
    parser.add_argument("--muon-rate", type=float, default=1e-2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options)


if __name__ == "__main__":
    main()
