"""The config.json of a head that guesses tokens, in each of the forms in which there are such.

`speculators` (https://github.com/vllm-project/speculators) names the kind in
`speculators_model_type` and has a decoder's own fields in `transformer_layer_config`; the programs
of EAGLE's and Medusa's authors write flat files. Values only: no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import cast

from aioserve.errors import ModelError
from aioserve.isolation import shown
from aioserve.models.architecture import (
    Architecture,
    Attention,
    Layer,
    Linear,
    Norm,
    Tensor,
    linear,
    parts_of,
    rms_norm,
)
from aioserve.models.families.llama import llama
from aioserve.models.families.qwen import qwen3
from aioserve.models.fields import Fields

__all__ = ["DRAFT_IDS", "Eagle3Config", "HeadConfig", "MedusaConfig", "read_head_config"]

DRAFT_IDS: str = "d2t"
"""Tensor with the distance of each of the head's tokens from the target's, int64 [draft vocab]."""
MOST_FEATURES = 64
"""Most hidden states that a head reads side by side. EAGLE-3 reads three."""
MOST_HEADS = 64
_FAMILIES = {"llama": llama, "qwen3": qwen3}
_EAGLE3 = ("Eagle3DraftModel", "Eagle3Speculator", "LlamaForCausalLMEagle3")
_MEDUSA = ("MedusaModel",)
_OF_THE_TARGET = re.compile(r"^(embed_tokens|lm_head|verifier_lm_head)\.weight$")
_TABLES = re.compile(r"^(model\.)?(d2t|t2d)$")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(Architecture):
    """One decoder that reads hidden states of the target beside embeddings (Li et al., "EAGLE-3",
    2025, section 3.1). Its first layer's projections take both, side by side.

    An embedding that the file lacks is the target's; so is a missing output layer.
    """

    fusion: Linear
    """Makes one hidden state of those that are read: [hidden, features * target_hidden_size]."""
    feature_norms: tuple[Norm, ...]
    """Norms of what `fusion` reads: none, one of all together, or one of each."""
    hidden_norm: Norm
    """Norm of hidden states before the first layer; its `mixer_norm` is that of embeddings."""
    norms_residual: bool
    """Whether the residual stream begins behind `hidden_norm`."""
    norms_output: bool
    """Whether the hidden state that the next guess reads is behind the final norm."""
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None
    """Which hidden states are read: what goes into these layers of the target, counted from 0;
    what leaves the last one has the number of layers. None: the file doesn't say."""
    num_features: int
    draft_vocab_size: int
    """Number of tokens that the head knows."""
    has_embedding: bool
    has_output: bool

    @property
    def required(self) -> Iterator[Tensor]:
        own = (self.embedding,) if self.has_embedding else ()
        parts = own, self.feature_norms, self.fusion, self.hidden_norm, self.layers, self.final_norm
        return parts_of(parts, Tensor)

    @property
    def linears(self) -> Iterator[Linear]:
        return parts_of((self.fusion, self.layers), Linear)

    @property
    def stored(self) -> Iterator[Tensor]:
        """Every tensor of the file that holds floats."""
        yield from self.required
        if self.has_output:
            yield self.head

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """`feature_layers` for a target of so many layers: where the file doesn't say, the second,
        the middle and the last but two, as EAGLE's authors have them.

        Raises `ModelError` for a layer that the target lacks.
        """
        found = self.feature_layers
        if found is None:
            found = (2, num_layers // 2, num_layers - 3)
        if min(found) < 0 or max(found) > num_layers:
            raise ModelError(
                f"eagle_aux_hidden_state_layer_ids must be in [0, {num_layers}] for a target of "
                f"{num_layers} layers, got {shown(list(found))}"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Heads that each guess one of the next tokens from one hidden state (Cai et al., "Medusa",
    2024, section 2.1): number k, from 0, guesses the token k + 2 positions on, since the target
    itself draws the next one. Block j of a head is x + silu(linear(x)).
    """

    hidden_size: int
    vocab_size: int | None
    """Number of tokens that the heads know; None: as many as the target."""
    blocks: tuple[tuple[Linear, ...], ...]
    """Blocks of each head, [hidden, hidden]."""
    outputs: tuple[Linear, ...] | None
    """Output layer of each head, [vocab, hidden]; None: all have the target's."""

    @property
    def stored(self) -> Iterator[Tensor]:
        """Every tensor of the file."""
        return parts_of((self.blocks, self.outputs), Tensor)

    def canonical(self, stored_name: str) -> str:
        """The name used here for a file's tensor."""
        return stored_name

    @property
    def ignored(self) -> re.Pattern[str]:
        """Tensors that the computation doesn't need: the target's, which some files repeat."""
        return _OF_THE_TARGET


HeadConfig = Eagle3Config | MedusaConfig


def read_head_config(config: Fields, shapes: Mapping[str, tuple[int, ...]]) -> HeadConfig:
    """Read a parsed config.json; `shapes` are those of the tensors beside it, by name.

    Raises `UnsupportedModelError` for a kind of head or a setting that isn't implemented and
    `ModelError` for a malformed file; both name file, field and value.
    """
    kind = _kind(config)
    if config.has("quantization_config"):
        config.unsupported("quantization_config", "the weights of heads must be floats")
    if kind == "eagle3":
        return _eagle3(config, shapes)
    if kind == "medusa":
        return _medusa(config, shapes)
    return config.unsupported("speculators_model_type", "the kinds of heads are eagle3, medusa")


def _kind(config: Fields) -> str:
    if config.has("speculators_model_type"):
        return config.text("speculators_model_type")
    if config.has("medusa_num_heads"):
        return "medusa"
    named = config.values.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name in _EAGLE3:
        return "eagle3"
    if name in _MEDUSA:
        return "medusa"
    supported = ", ".join((*_EAGLE3, *_MEDUSA))
    return config.unsupported("architectures", f"architectures of heads are {supported}")


def _eagle3(config: Fields, names: Collection[str]) -> Eagle3Config:
    nested = config.has("transformer_layer_config")
    layer = config.nested("transformer_layer_config") if nested else config
    more = config.nested("eagle_config") if config.has("eagle_config") else config
    family = layer.text("model_type", "llama")
    if family not in _FAMILIES:
        layer.unsupported("model_type", f"the layers of heads are {', '.join(_FAMILIES)}")
    if not more.flag("use_aux_hidden_state", True):
        more.unsupported("use_aux_hidden_state", "heads read hidden states of several layers")
    decoder = _FAMILIES[family](layer)
    hidden, first = decoder.hidden_size, decoder.layers[0]
    vocab, eps = decoder.vocab_size, decoder.final_norm.eps
    target_hidden = config.integer("target_hidden_size", hidden)
    layers_read = _feature_layers(config if config.has(_FEATURE_LAYERS) else more)
    count = 3 if layers_read is None else len(layers_read)
    draft_vocab = config.integer("draft_vocab_size", vocab, most=vocab)
    here = {_canonical(name) for name in names}
    has_output = decoder.head.name in here
    if not has_output and draft_vocab != vocab:
        config.invalid("draft_vocab_size", f"{vocab} for a head without an output layer of its own")
    at = "model.layers.0"
    inherited = {field.name: getattr(decoder, field.name) for field in fields(Architecture)}
    return Eagle3Config(
        **inherited
        | {
            "layers": (_reading_both(first), *decoder.layers[1:]),
            "head": Tensor(decoder.head.name, (draft_vocab, hidden)),
            "tie_word_embeddings": not has_output,
            "ignored": re.compile(f"{decoder.ignored.pattern}|{_TABLES.pattern}"),
            "prefixes": (*_PREFIXES, *decoder.prefixes),
        },
        fusion=linear("model", count * target_hidden, "model.fc.bias" in here, fc=hidden),
        feature_norms=_feature_norms(config, more, target_hidden, count, eps),
        hidden_norm=rms_norm(f"{at}.hidden_norm", hidden, eps),
        norms_residual=config.flag("norm_before_residual", False),
        norms_output=config.flag("norm_output", False),
        target_hidden_size=target_hidden,
        feature_layers=layers_read,
        num_features=count,
        draft_vocab_size=draft_vocab,
        has_embedding=decoder.embedding.name in here,
        has_output=has_output,
    )


_FEATURE_LAYERS = "eagle_aux_hidden_state_layer_ids"
_PREFIXES = (
    ("midlayer.", "model.layers.0."),
    ("model.midlayer.", "model.layers.0."),
    ("fc.", "model.fc."),
    ("fc_norm.", "model.fc_norm."),
    ("input_norm.", "model.input_norm."),
)
"""(prefix found, prefix here), beside those of a decoder that is stored by itself."""


def _canonical(name: str) -> str:
    prefixes = (*_PREFIXES, ("layers.", "model.layers."), ("embed_tokens.", "model.embed_tokens."))
    for found, here in prefixes:
        if name.startswith(found):
            return here + name.removeprefix(found)
    return name


def _feature_layers(config: Fields) -> tuple[int, ...] | None:
    value = config.values.get(_FEATURE_LAYERS)
    if value is None:
        return None
    fits = isinstance(value, list) and 1 <= len(value) <= MOST_FEATURES
    if not fits or not all(type(layer) is int and layer >= 0 for layer in value):
        config.invalid(_FEATURE_LAYERS, f"a list of 1 to {MOST_FEATURES} numbers of layers")
    return tuple(value)


def _feature_norms(
    config: Fields, more: Fields, target_hidden: int, count: int, eps: float
) -> tuple[Norm, ...]:
    of_all = config.flag("norm_before_fc", more.flag("norm_before_fc", False))
    of_each = config.flag("fc_norm", False)
    if of_all and of_each:
        config.unsupported("fc_norm", "norm_before_fc already has one norm of all features")
    if of_all:
        return (rms_norm("model.input_norm", count * target_hidden, eps),)
    if not of_each:
        return ()
    return tuple(rms_norm(f"model.fc_norm.{i}", target_hidden, eps) for i in range(count))


def _reading_both(layer: Layer) -> Layer:
    """The layer with projections that take an embedding and a hidden state side by side."""
    mixer = cast("Attention", layer.mixer)  # llama and qwen3 have no other
    weights = tuple(
        replace(weight, shape=(weight.rows, 2 * weight.columns)) for weight in mixer.qkv.weights
    )
    return replace(layer, mixer=replace(mixer, qkv=replace(mixer.qkv, weights=weights)))


def _medusa(config: Fields, shapes: Mapping[str, tuple[int, ...]]) -> MedusaConfig:
    flat = config.has("medusa_num_heads")
    count = config.integer("medusa_num_heads" if flat else "num_heads", 5, most=MOST_HEADS)
    depth = config.integer("medusa_num_layers" if flat else "num_hidden_layers", 1, most=MOST_HEADS)
    root, block_at, output_at = "", "blocks.{}.layers.{}", "lm_heads.{}"
    if any(_BY_NUMBERS.match(name) for name in shapes):
        root = "medusa_head." if "medusa_head.0.0.linear.weight" in shapes else ""
        block_at, output_at = root + "{}.{}.linear", root + f"{{}}.{depth}"
    has_outputs = output_at.format(0) + ".weight" in shapes
    # The files of Medusa's authors have no sizes: those are the target's.
    hidden = _size(config, "hidden_size", "medusa_hidden_size", shapes, block_at.format(0, 0))
    vocab = None
    if has_outputs:
        vocab = _size(config, "vocab_size", "medusa_vocab_size", shapes, output_at.format(0))
    if config.has("truncated_vocab_size"):
        truncated = config.integer("truncated_vocab_size", least=0)
        if truncated and truncated != config.values.get("medusa_vocab_size", vocab):
            config.unsupported("truncated_vocab_size", "heads must guess all of the tokens")

    def named(at: str, outputs: int) -> Linear:
        bias = (Tensor(f"{at}.bias", (outputs,)),) if f"{at}.bias" in shapes else ()
        return Linear((Tensor(f"{at}.weight", (outputs, hidden)),), bias)

    return MedusaConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        blocks=tuple(
            tuple(named(block_at.format(i, j), hidden) for j in range(depth)) for i in range(count)
        ),
        outputs=None
        if vocab is None
        else tuple(named(output_at.format(i), vocab) for i in range(count)),
    )


_BY_NUMBERS = re.compile(r"(medusa_head\.)?0\.0\.linear\.weight$")


def _size(
    config: Fields, name: str, other: str, shapes: Mapping[str, tuple[int, ...]], at: str
) -> int:
    """The field of one of the names, or else the rows of a weight."""
    for field in (name, other):
        if config.has(field):
            return config.integer(field)
    shape = shapes.get(f"{at}.weight", ())
    return shape[0] if shape else config.invalid(name, "an integer in [1, 2147483647]")
