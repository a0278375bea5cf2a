"""Whether a backend's kernels take a model's sizes: asked before its weights are read. No torch
here."""

from __future__ import annotations

from aioserve.formats.weights import AttentionLimits
from aioserve.models.architecture import Architecture

__all__ = ["too_large"]


def too_large(model: Architecture, limits: AttentionLimits | None) -> str | None:
    """What of the model's attention is beyond the limits, by the field of config.json that says it,
    with its value and limit; None: nothing is."""
    if limits is None:
        return None
    rank, dim = model.latent_rank, model.heads.dim - model.latent_rank
    field, what = ("qk_rope_head_dim", "rotate") if rank else ("head_dim", "have heads of")
    value, limit = dim, limits.head_dim
    if rank and dim <= limit:
        field, what = "kv_lora_rank", f"beside {dim} rotated numbers have latents of"
        value, limit = rank, limits.largest_rank(dim)
    if value <= limit:
        return None
    otherwise = f"; {limits.otherwise}" if limits.otherwise else ""
    return (
        f"{field} = {value} is not supported: kernels for {limits.devices} {what} at most {limit} "
        f"numbers{otherwise}"
    )
