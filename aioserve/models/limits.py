"""Check of a model's sizes against a backend's kernels, before weights are read. No torch here."""

from __future__ import annotations

from aioserve.formats.weights import AttentionLimits
from aioserve.models.architecture import Architecture

__all__ = ["too_large"]


def too_large(model: Architecture, limits: AttentionLimits | None) -> str | None:
    """Describe the first size of the model's attention beyond `limits`; None if all fit.

    The text names the field of config.json, its value and its limit."""
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
