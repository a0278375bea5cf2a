"""Heads in plain torch, which compute all rows again for each draft token.

The formulas are those of Li et al., "EAGLE-3", 2025, section 3.1, of DeepSeek-AI, "DeepSeek-V3",
2024, section 2.2, and of Llama's decoder layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

Rows = tuple[Tensor, list[int]]
"""Hidden states [T, hidden], and the id of the token after each."""


class PlainEagle3:
    """EAGLE-3 head. `embedding` and `output` are the target's, for files without their own."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], embedding: Tensor,
        output: Tensor,
    ) -> None:  # fmt: skip
        self.config, self.layer = config, config["transformer_layer_config"]
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.embedding = self.tensors.get("embed_tokens.weight", embedding.double())
        self.output = self.tensors.get("lm_head.weight", output.double())

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def fuse(self, features: Tensor) -> Tensor:
        features = features.double()
        if self.config.get("norm_before_fc"):
            features = self.norm("input_norm", features)
        if self.config.get("fc_norm"):
            parts = features.chunk(len(self.config["eagle_aux_hidden_state_layer_ids"]), dim=1)
            features = torch.cat([self.norm(f"fc_norm.{i}", p) for i, p in enumerate(parts)], 1)
        return self.linear("fc", features)

    def rotated(self, x: Tensor) -> Tensor:
        """Rotate x [T, heads, dim] at positions 0 to T - 1."""
        count, _, dim = x.shape
        frequencies = self.layer["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.arange(count)[:, None, None] * frequencies
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attention(self, at: str, x: Tensor) -> Tensor:
        dim, count = self.layer["head_dim"], len(x)
        q, k, v = (
            self.linear(f"{at}.self_attn.{name}_proj", x).unflatten(1, (-1, dim)) for name in "qkv"
        )
        if self.layer["model_type"] == "qwen3":
            q, k = self.norm(f"{at}.self_attn.q_norm", q), self.norm(f"{at}.self_attn.k_norm", k)
        q, k = self.rotated(q), self.rotated(k)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
        return self.linear(f"{at}.self_attn.o_proj", attended)

    def mlp(self, at: str, x: Tensor) -> Tensor:
        y = self.norm(f"{at}.post_attention_layernorm", x)
        gate, up = (self.linear(f"{at}.mlp.{name}_proj", y) for name in ("gate", "up"))
        return self.linear(f"{at}.mlp.down_proj", silu(gate) * up)

    def hidden_states(self, hidden: Tensor, ids: list[int]) -> Tensor:
        """Compute hidden states [T, hidden] of rows at positions 0 to T - 1."""
        x = hidden
        for i in range(self.layer["num_hidden_layers"]):
            at = f"layers.{i}"
            normed = self.norm(f"{at}.input_layernorm", self.embedding[ids] if i == 0 else x)
            if i == 0:
                of_hidden = self.norm(f"{at}.hidden_norm", x)
                normed = torch.cat([normed, of_hidden], dim=1)
                x = of_hidden if self.config["norm_before_residual"] else x
            x = x + self.attention(at, normed)
            x = x + self.mlp(at, x)
        return self.norm("norm", x) if self.config.get("norm_output") else x

    def logits(self, hidden: Tensor) -> Tensor:
        x = hidden if self.config.get("norm_output") else self.norm("norm", hidden)
        own = linear(x, self.output)
        if "d2t" not in self.tensors:
            return own
        vocab = self.config["transformer_layer_config"]["vocab_size"]
        logits = torch.full((len(own), vocab), -torch.inf, dtype=own.dtype)
        logits[:, torch.arange(own.shape[1]) + self.tensors["d2t"].long()] = own
        return logits

    def draft(self, features: Tensor, ids: list[int], count: int) -> tuple[Tensor, list[int]]:
        """Draft `count` greedy tokens after rows. Returns logits, [count, vocab], and tokens."""
        hidden, ids, found, drawn = self.fuse(features), list(ids), [], []
        for _ in range(count):
            last = self.hidden_states(hidden, ids)[-1:]
            found.append(self.logits(last))
            drawn.append(int(found[-1].argmax()))
            hidden, ids = torch.cat([hidden, last]), [*ids, drawn[-1]]
        return torch.cat(found), drawn


class PlainMTP(PlainEagle3):
    def fuse(self, features: Tensor) -> Tensor:
        return features.double()

    def hidden_states(self, hidden: Tensor, ids: list[int]) -> Tensor:
        at = "mtp_layers.0"
        tokens = self.norm(f"{at}.token_layernorm", self.embedding[ids])
        both = torch.cat([tokens, self.norm(f"{at}.hidden_layernorm", hidden)], dim=1)
        x = self.linear(f"{at}.input_proj", both)
        x = x + self.attention(at, self.norm(f"{at}.input_layernorm", x))
        return self.norm(f"{at}.final_layernorm", x + self.mlp(at, x))

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.output)
