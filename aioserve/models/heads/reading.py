"""Reading of the config.json of a head, in its several forms.

The library `speculators` (https://github.com/vllm-project/speculators) names the kind in
`speculators_model_type`, and has the fields of a decoder in `transformer_layer_config`. The
programs of EAGLE's and Medusa's authors write flat files. No tensors here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import cast

from aioserve.models.architecture import (
    Architecture,
    Attention,
    Layer,
    Linear,
    Norm,
    Tensor,
    linear,
    rms_norm,
)
from aioserve.models.families.llama import llama
from aioserve.models.families.qwen import qwen3
from aioserve.models.fields import Fields
from aioserve.models.heads.config import Eagle3Config, HeadConfig, MedusaConfig, MTPConfig

__all__ = ["read_head_config"]

MOST_FEATURES = 64
"""Most hidden states that a head reads side by side. EAGLE-3 reads three."""
MOST_HEADS = 64
_FAMILIES = {"llama": llama, "qwen3": qwen3}
_EAGLE3 = ("Eagle3DraftModel", "Eagle3Speculator", "LlamaForCausalLMEagle3")
_MEDUSA = ("MedusaModel",)
_TABLES = re.compile(r"^(model\.)?(d2t|t2d)$")


def read_head_config(config: Fields, shapes: Mapping[str, tuple[int, ...]]) -> HeadConfig:
    """Read a parsed config.json. `shapes` are those of the tensors in the weight files, by name.

    Raises `UnsupportedModelError` for a kind of head or a setting that isn't implemented and
    `ModelError` for a malformed file; both name file, field and value.
    """
    kind = _kind(config)
    if config.has("quantization_config"):
        config.unsupported("quantization_config", "the weights of heads must be floats")
    if kind == "eagle3":
        return _eagle3(config, shapes)
    if kind == "mtp":
        return _mtp(config)
    if kind == "medusa":
        return _medusa(config, shapes)
    return config.unsupported(
        "speculators_model_type", "the kinds of heads are eagle3, mtp, medusa"
    )


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
    return config.unsupported(
        "architectures",
        f"architectures of heads are {supported}, where speculators_model_type doesn't say more",
    )


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
"""Pairs of a prefix in files and the prefix that replaces it here, besides the decoder's own."""


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
    """Widen a layer's QKV projections to take an embedding and a hidden state side by side."""
    mixer = cast("Attention", layer.mixer)  # the only kind in llama and qwen3
    weights = tuple(
        replace(weight, shape=(weight.rows, 2 * weight.columns)) for weight in mixer.qkv.weights
    )
    return replace(layer, mixer=replace(mixer, qkv=replace(mixer.qkv, weights=weights)))


def _mtp(config: Fields) -> MTPConfig:
    layer = config.nested("transformer_layer_config")
    if layer.text("model_type") != "qwen3":
        layer.unsupported("model_type", "the layer of an MTP head must be qwen3's")
    if config.integer("num_nextn_predict_layers", 1) != 1:
        config.unsupported("num_nextn_predict_layers", "an MTP head has one layer")
    # The file repeats the target's config, with all its layers. The head's layer is like the last.
    decoder = qwen3(layer)
    hidden, eps, own = decoder.hidden_size, decoder.final_norm.eps, decoder.layers[-1]
    if own.mixer.window:
        layer.unsupported("layer_types", "the layer of an MTP head has full attention")
    at = f"model.layers.{decoder.num_layers - 1}"
    inherited = {field.name: getattr(decoder, field.name) for field in fields(Architecture)}
    return MTPConfig(
        **inherited
        | {
            "layers": (own,),
            "final_norm": rms_norm(f"{at}.final_layernorm", hidden, eps),
            "ignored": re.compile(rf"{decoder.ignored.pattern}|^(embed_tokens|lm_head)\.weight$"),
            "prefixes": (("mtp_layers.0.", f"{at}."),),
        },
        token_norm=rms_norm(f"{at}.token_layernorm", hidden, eps),
        hidden_norm=rms_norm(f"{at}.hidden_layernorm", hidden, eps),
        projection=linear(at, 2 * hidden, input_proj=hidden),
    )


def _medusa(config: Fields, shapes: Mapping[str, tuple[int, ...]]) -> MedusaConfig:
    flat = config.has("medusa_num_heads")
    count = config.integer("medusa_num_heads" if flat else "num_heads", 5, most=MOST_HEADS)
    depth = config.integer("medusa_num_layers" if flat else "num_hidden_layers", 1, most=MOST_HEADS)
    root, block_at, output_at = "", "blocks.{}.layers.{}", "lm_heads.{}"
    if any(_BY_NUMBERS.match(name) for name in shapes):
        root = "medusa_head." if "medusa_head.0.0.linear.weight" in shapes else ""
        block_at, output_at = root + "{}.{}.linear", root + f"{{}}.{depth}"
    has_outputs = output_at.format(0) + ".weight" in shapes
    # The files of Medusa's authors lack sizes, which the shapes of weights tell.
    hidden = _size(config, "hidden_size", "medusa_hidden_size", shapes, block_at.format(0, 0))
    vocab = None
    if has_outputs:
        vocab = _size(config, "vocab_size", "medusa_vocab_size", shapes, output_at.format(0))
    if config.has("truncated_vocab_size"):
        truncated = config.integer("truncated_vocab_size", least=0)
        if truncated and truncated != config.values.get("medusa_vocab_size", vocab):
            config.unsupported("truncated_vocab_size", "heads must draft any of the tokens")

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
    """Read a size from one of two fields, or else from the rows of a weight."""
    for field in (name, other):
        if config.has(field):
            return config.integer(field)
    shape = shapes.get(f"{at}.weight", ())
    return shape[0] if shape else config.invalid(name, "an integer in [1, 2147483647]")
