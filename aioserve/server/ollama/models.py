"""`/api/tags`, `/api/ps`, `/api/show` and `/api/version`: the served models, in Ollama's words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import msgspec

from aioserve.engine.interface import ModelFacts
from aioserve.models.gguf.formats import FORMATS
from aioserve.models.stored import PLAIN
from aioserve.server.app_state import Call
from aioserve.server.bodies import NoParameters, Strict
from aioserve.server.endpoint import endpoint
from aioserve.server.ollama.answers import OLLAMA_ERRORS, posted
from aioserve.server.ollama.ollama_request import served_name

__all__ = ["api_version", "details_of", "ps", "show", "tags"]

GGUF_FORMATS = frozenset(form.name for form in FORMATS.values())
HEADS = re.compile(r"(For\w+|LMHeadModel|Model)$")
"""Ends of names of architectures, for the layer on top of the decoder."""
NEVER = "9999-12-31T23:59:59Z"


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    """Number of parameters, like 5.77M or 7.2B."""
    quantization_level: str
    """Format of most bytes of weights, or the dtype if the weights aren't quantised."""


class TaggedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    """Time when this server began to serve it."""
    size: int
    """Bytes of its weights in their files."""
    digest: str
    """Digest that servers of the same model, `dtype` and version of aioserve share."""
    details: ModelDetails
    capabilities: list[str]
    """Either "completion" or "embedding"; with the first, "tools" and "thinking" too."""


class RunningModel(TaggedModel, frozen=True, kw_only=True):
    expires_at: str
    """Always `NEVER`: the model is there as long as the server is."""
    context_length: int


class Tags(msgspec.Struct, frozen=True):
    models: list[TaggedModel]


class Running(msgspec.Struct, frozen=True):
    models: list[RunningModel]


class ShowBody(Strict, frozen=True, kw_only=True):
    model: str | None = None
    name: str | None = None
    """Name of the model, as older clients send it."""
    verbose: bool | None = None


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, frozen=True):
    version: str


@endpoint(OLLAMA_ERRORS, "/api/version", "The version of the server, as Ollama tells it")
async def api_version(call: Call, _: NoParameters) -> OllamaVersion:
    return OllamaVersion(metadata.version("aioserve"))


@endpoint(OLLAMA_ERRORS, "/api/tags", "The models served here, as Ollama lists them")
async def tags(call: Call, _: NoParameters) -> Tags:
    return Tags([TaggedModel(**_about(call, name)) for name in call.app_state.model_names])


@endpoint(OLLAMA_ERRORS, "/api/ps", "The models that are loaded, which are all")
async def ps(call: Call, _: NoParameters) -> Running:
    context = call.facts.limits.max_model_len
    return Running(
        [
            RunningModel(**_about(call, name), expires_at=NEVER, context_length=context)
            for name in call.app_state.model_names
        ]
    )


@posted("/api/show", "One of the models")
async def show(call: Call, body: ShowBody) -> Shown:
    served_name(call, body.model or body.name or "")
    limits = call.facts.limits
    about = _about(call, "")
    family = about["details"].family
    return Shown(
        details=about["details"],
        model_info={
            "general.architecture": family,
            f"{family}.context_length": limits.max_model_len,
            f"{family}.vocab_size": limits.vocab_size,
        },
        capabilities=about["capabilities"],
        modified_at=about["modified_at"],
    )


def details_of(described: Mapping[str, Any]) -> ModelDetails:
    """Details of a model from its description (`ModelFacts`)."""
    architecture = str(described.get("architecture", described.get("name", "unknown")))
    family = HEADS.sub("", architecture).lower() or architecture.lower()
    weights = described.get("weights", ())
    formats = [str(one["format"]) for one in weights]
    quantised = [name for name in formats if name not in PLAIN.values()]
    level = quantised[0] if quantised else str(described.get("dtype", ""))
    return ModelDetails(
        format="gguf" if level in GGUF_FORMATS else "safetensors",
        family=family,
        families=[family],
        parameter_size=_size_of(sum([int(one.get("parameters", 0)) for one in weights])),
        quantization_level=level,
    )


def _size_of(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _capabilities(facts: ModelFacts) -> list[str]:
    if not facts.generates:
        return ["embedding"]
    can = {
        "completion": True,
        "tools": facts.reads_tool_calls,
        "thinking": facts.reads("enable_thinking"),
    }
    return [name for name, has in can.items() if has]


def _about(call: Call, name: str) -> dict[str, Any]:
    began = datetime.fromtimestamp(call.app_state.created_seconds, UTC)
    described = call.facts.description
    return {
        "name": name,
        "model": name,
        "modified_at": began.isoformat().replace("+00:00", "Z"),
        "digest": hashlib.sha256(call.app_state.fingerprint.encode()).hexdigest(),
        "size": sum([int(one.get("file_bytes", 0)) for one in described.get("weights", ())]),
        "details": details_of(described),
        "capabilities": _capabilities(call.facts),
    }
