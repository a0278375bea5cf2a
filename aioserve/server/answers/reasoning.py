"""How much a model shall reason, as its chat template takes it.

Some templates read an effort, others have a switch; to one that has neither nothing can be said.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from aioserve.engine.engine import Engine
from aioserve.server.errors import ApiError

__all__ = ["Effort", "variables_of"]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def variables_of(engine: Engine, effort: str | None, field: str) -> dict[str, Any]:
    """Variables of the template that say so. Raises `ApiError` about the `field` of an effort that
    nothing would come of."""
    if effort is None:
        return {}
    if engine.template_reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    if engine.template_reads("enable_thinking") and effort in get_args(Effort):
        return {"enable_thinking": effort != "none"}
    raise ApiError(
        400,
        f"{field} isn't supported: the model's chat template reads neither reasoning_effort nor "
        "enable_thinking",
        param=field,
        code="unsupported_parameter",
    )
