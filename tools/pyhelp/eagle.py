"""Train a head that drafts from pyhelp's hidden states, and write it as ``speculators`` does.

Usage: python tools/pyhelp/eagle.py MODEL_DIR SPEECH_DIR WORK_DIR --minutes 12

The head is that of EAGLE-3. Its one decoder layer reads hidden states of three of pyhelp's layers
beside the next token's embedding. It reads its own output if those of pyhelp are not known yet.
Embedding and output layer are pyhelp's.

Li et al.: "EAGLE-3: Scaling up inference acceleration of large language models via training-time
test", 2025.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import cast

import torch
from rows import Rows, Spoken, divergence
from safetensors.torch import save_file
from speech import FEATURE_LAYERS
from torch import Tensor, nn
from torch.nn import functional
from train import Optimizers, learning_rate
from transformers import Qwen3ForCausalLM

ROPE_THETA = 10000.0
EPS = 1e-6
HEAD_DIM = 64
STEP_WEIGHT = 0.85
"""Weight of a step's loss beside that of the step before."""


class Norm(nn.RMSNorm):
    """RMS norm that computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """x [.., hidden] -> [.., hidden] in float32."""
        return super().forward(x.float())


class Attention(nn.Module):
    """Attention over pyhelp's hidden states, and over the drafts since then."""

    def __init__(self, inputs: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(inputs, heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(inputs, HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(inputs, HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(heads * HEAD_DIM, hidden, bias=False)

    def forward(self, x: Tensor, step: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend from step number ``step`` of every start, x ``[rows, starts, inputs]``.

        A start sees the first step of all starts up to it, and its own later steps. The ``cache``
        has keys and values of each step, ``[rows, starts, HEAD_DIM]``.
        """
        rows, starts, _ = x.shape
        cos, sin = angles(starts, step)
        queries = self.q_proj(x).unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2)
        queries = rotated(queries, cos, sin) * HEAD_DIM**-0.5
        cache.append((rotated(self.k_proj(x), cos, sin), self.v_proj(x)))
        keys, values = cache[0]
        scores = queries @ keys[:, None].transpose(2, 3)
        later = torch.ones(starts, starts, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        own = [(queries * keys[:, None]).sum(-1, keepdim=True) for keys, _ in cache[1:]]
        shares = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(values.dtype)
        attended = shares[..., :starts] @ values[:, None]
        for index, (_, values) in enumerate(cache[1:]):
            attended = attended + shares[..., starts + index, None] * values[:, None]
        return self.o_proj(attended.transpose(1, 2).reshape(rows, starts, -1))


class MLP(nn.Module):
    """Gated MLP of Llama."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., hidden] -> [.., hidden]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Decoder layer, which reads embeddings beside hidden states."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(hidden, EPS)
        self.hidden_norm = Norm(hidden, EPS)
        self.self_attn = Attention(2 * hidden, hidden, heads)
        self.post_attention_layernorm = Norm(hidden, EPS)
        self.mlp = MLP(hidden, inner)

    def forward(
        self, embedded: Tensor, hidden: Tensor, step: int, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Both [rows, starts, hidden] -> the same."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, step, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):
    """Head, with the names that its tensors have in files."""

    scales: Tensor
    """Factors on the input of ``fc``, [3 * hidden]. Deep layers have large numbers."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        inputs = len(FEATURE_LAYERS) * hidden
        self.register_buffer("scales", torch.ones(inputs), persistent=False)
        self.fc = nn.Linear(inputs, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(hidden, heads, inner)])
        self.norm = Norm(hidden, EPS)

    @property
    def layer(self) -> Layer:
        """Only layer of the head."""
        return cast("Layer", self.layers[0])

    @torch.no_grad()
    def begin(self, norm: Tensor, features: Tensor) -> None:
        """Start as a head that passes on the last of the hidden states that it reads.

        ``features`` [tokens, 3 * hidden] are some of these, and ``norm`` [hidden] is pyhelp's last
        norm.
        """
        hidden = len(norm)
        sizes = features.square().unflatten(1, (-1, hidden)).mean((0, 2)).sqrt()
        self.scales.copy_(sizes.reciprocal().repeat_interleave(hidden))
        self.norm.weight.copy_(norm)
        self.fc.weight.mul_(0.1)[:, -hidden:].add_(torch.eye(hidden))
        self.layer.self_attn.o_proj.weight.zero_()
        self.layer.mlp.down_proj.weight.zero_()

    def forward(self, rows: Rows, embedding: Tensor, steps: int) -> list[Tensor]:
        """Return, for each step, the input of the output layer: [rows, width - 1, hidden].

        Start i has pyhelp's hidden states up to token i, and token i + 1. Its step s reads token i
        + 1 + s, if all drafts before are right, and predicts the token after it.
        """
        hidden = self.fc(rows.features[:, :-1] * self.scales)
        ids, cache, found = rows.ids[:, 1:], [], []
        for step in range(steps):
            shifted = functional.pad(ids[:, step:], (0, step))
            hidden = self.layer(functional.embedding(shifted, embedding), hidden, step, cache)
            found.append(self.norm(hidden))
        return found


def angles(count: int, first: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of ``count`` positions, [count, HEAD_DIM / 2]."""
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM
    turns = torch.arange(first, first + count)[:, None] / ROPE_THETA**exponents
    return turns.cos(), turns.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [.., count, HEAD_DIM], pairing dimension i with i + HEAD_DIM / 2."""
    first, second = x.float().chunk(2, dim=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    return torch.cat(pairs, dim=-1).to(x.dtype)


def predicted(rows: Rows, step: int) -> Tensor:
    """Return the starts [rows, width - 1] whose step has a token to predict.

    For these pyhelp chose that token, and the one that the start begins with.
    """
    chosen = rows.chosen[:, 1:]
    ahead = functional.pad(chosen[:, step + 1 :], (0, step + 1))
    return chosen & ahead


def loss_of(head: Head, embedding: Tensor, rows: Rows, steps: int) -> tuple[Tensor, list[float]]:
    """Return the loss, and each step's divergence from pyhelp's distribution in nats."""
    total, each, weight = torch.zeros(()), [], 1.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head(rows, embedding, steps)
    for step, hidden in enumerate(found):
        wanted = predicted(rows, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = functional.linear(hidden[wanted], embedding)
        starts, at = wanted.nonzero(as_tuple=True)
        ahead = at + step + 1
        loss = divergence(logits, rows.shares[starts, ahead], rows.tops[starts, ahead])
        total = total + weight * loss
        weight *= STEP_WEIGHT
        each.append(loss.item())
    return total, each


def save(head: Head, options: argparse.Namespace, target: Qwen3ForCausalLM) -> None:
    """Write config.json and model.safetensors as the library ``speculators`` does."""
    config, out = target.config, options.work
    out.mkdir(parents=True, exist_ok=True)
    floats = head.state_dict()
    floats["fc.weight"] = floats["fc.weight"] * head.scales
    tensors = {name: value.to(torch.bfloat16) for name, value in floats.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    written = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": options.steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "pyhelp", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": options.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": options.heads,
            "num_key_value_heads": 1,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": EPS,
            "rope_theta": ROPE_THETA,
            "attention_bias": False,
            "mlp_bias": False,
        },
        "draft_vocab_size": config.vocab_size,
        "norm_before_residual": False,
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def train(options: argparse.Namespace) -> None:
    """Train until the time is over, and write the head."""
    torch.manual_seed(options.seed)
    target = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    embedding = target.model.embed_tokens.weight.detach()
    head = Head(target.config.hidden_size, options.heads, options.inner)
    optimizer = Optimizers(head, muon=True)
    batches = Spoken(options.speech / "train.npz").batches(options.tokens, options.seed)
    some = next(batches)
    head.begin(target.model.norm.weight, some.features[some.chosen])
    began, steps, means = time.process_time(), 0, [0.0] * options.steps
    while (progress := (time.process_time() - began) / (60 * options.minutes)) < 1:
        loss, each = loss_of(head, embedding, next(batches), options.steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        peaks = (options.rate, options.muon_rate)
        optimizer.step([learning_rate(progress, peak) for peak in peaks])
        steps += 1
        means = [
            mean + (one - mean) / min(steps, 50) for mean, one in zip(means, each, strict=True)
        ]
        if steps % 25 == 0:
            shown = " ".join(f"{mean:.3f}" for mean in means)
            print(f"step {steps} done {progress:.3f} divergence {shown}", flush=True)
    save(head, options, target)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="pyhelp's directory")
    parser.add_argument("speech", type=Path, help="the folder that speech.py wrote")
    parser.add_argument("work", type=Path, help="the folder to write the head to")
    parser.add_argument("--minutes", type=float, default=12.0, help="the budget of processor time")
    parser.add_argument("--heads", type=int, default=2, help="query heads")
    parser.add_argument("--inner", type=int, default=128, help="width of the MLP")
    parser.add_argument("--steps", type=int, default=4, help="drafts in a row that are trained")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="the peak rate of AdamW")
    parser.add_argument("--muon-rate", type=float, default=1e-2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options)


if __name__ == "__main__":
    main()
